"""The loop of a controlled comparison: what it promises about data, gradients, evaluation and faults."""

from __future__ import annotations

import functools
import itertools
import json
import math

import numpy as np
import pytest
import torch

from corpora import small_corpus
from geonorm import UserError
from geonorm.data import Windows
from geonorm.inspection.probe import gradient_norms, recorded_angles
from geonorm.models import blocks
from geonorm.placements import available
from geonorm.storage import finite
from geonorm.training import (
    MetricsFile,
    evaluate,
    lr_factor,
    make_optimizer,
    parameter_groups,
    train,
)
from geonorm.training.optimizer import wsd_factor
from geonorm.training.validation import IGNORED, token_losses
from loop_runs import SETTINGS, build_model, make_trial, run
from run_configs import run_config
from tolerances import worst


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("placement", available())
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_placement_learns_and_repeats_bit_for_bit(corpus, placement, precision):
    trial = make_trial(placement, precision=precision, steps=40, eval_every=40, lr=1e-2)
    first, rows, model = run(corpus, trial)
    second, again, other = run(corpus, trial)
    assert first.status == "ok"
    assert first.evaluation.loss < math.log(257) - 1.0
    assert first.evaluation.loss == second.evaluation.loss
    assert [row["loss"] for row in rows if row["kind"] == "train"] == [
        row["loss"] for row in again if row["kind"] == "train"
    ]
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_rows_of_metrics(corpus):
    outcome, rows, _ = run(corpus, make_trial())
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in ("train", "eval", "layers")}
    assert [row["step"] for row in kinds["train"]] == list(range(1, 13))
    assert [row["step"] for row in kinds["eval"]] == [4, 8, 12]
    assert [row["step"] for row in kinds["layers"]] == [1, 5, 10, 12]
    assert kinds["eval"][-1]["val_loss"] == outcome.evaluation.loss
    assert kinds["eval"][-1]["tokens"] == outcome.tokens == 12 * 4 * 16
    for row in kinds["layers"]:
        assert len(row["grad_norm"]) == len(row["angle"]["attention"]) == len(row["angle"]["mlp"]) == 2
        assert all(0 < value < math.pi for part in row["angle"].values() for value in part)
        assert all(value > 0 for value in row["grad_norm"])


def test_evaluation_leaves_no_trace(corpus):
    """Another rhythm of evaluation and measurement changes no weight, dropout included."""
    ends = []
    for rhythm in (1, 12):
        trial = make_trial(eval_every=rhythm, layers_every=rhythm)
        model = build_model(trial)
        for block in blocks(model):
            block.self_attn.attention_dropout = 0.5
        ends.append(run(corpus, trial, model)[2])
    for mine, theirs in zip(ends[0].parameters(), ends[1].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_every_placement_sees_the_same_windows(corpus, monkeypatch):
    seen: dict[str, list] = {}
    original = Windows.batch
    for placement in ("geonorm", "post"):
        record = seen.setdefault(placement, [])

        def batch(self, start, size, record=record):
            ids = original(self, start, size)
            record.append(ids)
            return ids

        monkeypatch.setattr(Windows, "batch", batch)
        run(corpus, make_trial(placement))
    assert len(seen["geonorm"]) == 12
    assert all(np.array_equal(a, b) for a, b in zip(seen["geonorm"], seen["post"], strict=True))


def test_accumulation_is_a_token_mean(corpus):
    losses = [
        [row["loss"] for row in run(corpus, make_trial(accumulation=parts))[1] if row["kind"] == "train"]
        for parts in (1, 4)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


class Ragged(Windows):
    """Windows whose labels end early, the earlier the lower the window's number."""

    def batch(self, start, size):
        ids = super().batch(start, size)
        for row in range(size):
            ids[row, 3 + (start + row) % 8 :] = IGNORED
        return ids


def add_gradient(gradients, name, grad):
    gradients[name] = gradients.get(name, 0) + grad


def test_ragged_labels_give_the_token_mean_however_a_step_is_split(corpus):
    """One batch of 8 against 4 micro-batches of 2: losses and gradients. A mean of means is off by far more."""
    ends = []
    for parts in (1, 4):
        trial = make_trial(batch=8, accumulation=parts, steps=1, warmup=0, eval_every=1, clip=1e9)
        model, rows, gradients = build_model(trial), [], {}
        for name, parameter in model.named_parameters():
            parameter.register_hook(functools.partial(add_gradient, gradients, name))
        windows = Ragged(corpus.train, length=16)
        train(model, windows, corpus.held_out("val", 16, 2).ids, corpus.token_bytes, trial, rows.append)
        ends.append((next(row["loss"] for row in rows if row["kind"] == "train"), gradients))
    (loss, mine), (other, theirs) = ends
    assert loss == pytest.approx(other, rel=1e-6)
    for name, grad in mine.items():
        assert worst(theirs[name] / grad.abs().max(), grad / grad.abs().max()) <= 1e-6, name
    batch = Ragged(corpus.train, length=16).batch(0, 8)
    labelled = torch.from_numpy(batch[:, 1:] != IGNORED)
    with torch.no_grad():
        losses = token_losses(build_model(make_trial()), torch.from_numpy(batch))
    assert loss == pytest.approx(losses[labelled].mean().item(), rel=1e-6)
    assert abs(loss - losses.sum(1).div(labelled.sum(1)).mean().item()) > 1e-4 * loss


def test_evaluation_of_ragged_windows(corpus):
    model = build_model(make_trial())
    windows = Ragged(corpus.val, length=16).batch(0, 20)
    one, seven = (evaluate(model, windows, corpus.token_bytes, batch=n, precision="fp32") for n in (1, 7))
    assert one.loss == pytest.approx(seven.loss, rel=1e-6)
    labelled = windows[:, 1:] != IGNORED
    assert one.loss == pytest.approx(np.average(one.window_losses, weights=labelled.sum(1)), rel=1e-9)
    assert one.bits_per_byte * corpus.token_bytes[windows[:, 1:][labelled]].sum() == pytest.approx(
        one.loss * labelled.sum() / math.log(2)
    )


def test_evaluation_does_not_depend_on_its_batch(corpus):
    model = build_model(make_trial())
    windows = corpus.held_out("val", 16, 20).ids
    one, seven = (evaluate(model, windows, corpus.token_bytes, batch=n, precision="fp32") for n in (1, 7))
    assert one.loss == pytest.approx(seven.loss, rel=1e-6)
    assert one.window_losses == pytest.approx(seven.window_losses, rel=1e-5)
    assert one.loss == pytest.approx(one.window_losses.mean(), rel=1e-12)


def test_bits_per_byte_counts_the_bytes_of_the_targets(corpus):
    model = build_model(make_trial())
    windows = corpus.held_out("val", 16, 5).ids
    result = evaluate(model, windows, corpus.token_bytes, batch=5, precision="fp32")
    with torch.no_grad():
        nats = token_losses(model, torch.from_numpy(windows)).double().sum().item()
    num_bytes = sum(int(corpus.token_bytes[token]) for token in windows[:, 1:].ravel())
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes)


@pytest.mark.parametrize("placement", available())
def test_weight_decay_spares_gains_biases_and_step_sizes(placement):
    options = {"learnable": True} if placement == "geonorm" else {}
    model = build_model(make_trial(placement, options=options))
    settings = run_config(SETTINGS, weight_decay=0.5, warmup=0)
    optimizer, _ = make_optimizer(model, settings)
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, model.parameters()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        # Gates have two axes and are no weights of the model: they are the placement's own.
        kept = parameter.dim() < 2 or "_connection." in name or "exit_module." in name
        assert torch.equal(parameter, before[name]) == kept, name
    assert [group["weight_decay"] for group in parameter_groups(model, 0.5)] == [0.5, 0.0]


def test_learning_rate_warms_up_and_follows_a_cosine():
    factors = [lr_factor(step, steps=100, warmup=10, min_ratio=0.1) for step in range(101)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10] == 1.0
    assert factors[55] == pytest.approx(0.55)
    assert factors[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))


def test_learning_rate_is_stable_and_then_decays():
    factors = [wsd_factor(step, steps=20, warmup=4, decay=5, min_ratio=0.1) for step in range(20)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:15] == [1.0] * 11
    assert factors[15:] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])
    assert wsd_factor(9, steps=10, warmup=0, decay=0, min_ratio=0.1) == 1.0


def test_probe_measures_the_median_angle_of_each_step(corpus):
    model = build_model(make_trial())
    ids = torch.from_numpy(corpus.held_out("val", 16, 3).ids[:, :-1])
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    connections = [connection for block in blocks(model) for connection in connections_of(block)]
    handles = [c.register_forward_hook(lambda _, args, out: seen.append((args[0], out))) for c in connections]
    with recorded_angles(model) as angles:
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    cosines = [torch.nn.functional.cosine_similarity(x.double(), y.double(), dim=-1) for x, y in seen]
    expected = [cosine.arccos().median().item() for cosine in cosines]
    measured = [angles[part][layer] for layer in range(2) for part in ("attention", "mlp")]
    assert measured == pytest.approx(expected, rel=1e-4)
    assert not any(connection._forward_hooks for connection in connections)


def connections_of(block) -> list[torch.nn.Module]:
    return [block.attention_connection, block.mlp_connection]


def test_gradient_norms_by_layer(corpus):
    model = build_model(make_trial())
    ids = torch.from_numpy(corpus.held_out("val", 16, 3).ids)
    token_losses(model, ids).mean().backward()
    expected = [
        math.sqrt(sum(p.grad.double().square().sum().item() for p in block.parameters())) for block in blocks(model)
    ]
    assert gradient_norms(model) == pytest.approx(expected, rel=1e-5)


def test_metrics_file_is_readable_at_any_time(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write({"loss": math.nan, "nested": [1.0, {"deep": math.inf}]})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"loss": None, "nested": [1.0, {"deep": None}]}
    metrics.close()
    assert finite((1.5, -math.inf)) == [1.5, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "`steps` must be a whole number of at least 1"),
        ({"lr": -1.0}, "`optimizer.lr` must be positive, got -1.0"),
        ({"warmup": 12}, "`schedule.warmup` must be shorter than `steps`, got 12 and 12"),
        ({"batch": 5, "accumulation": 2}, "`global_batch_size` 5 is not a multiple of `accumulation` 2"),
        ({"precision": "fp8"}, "unknown value of `precision` 'fp8'"),
        ({"weight_decay": -0.1}, r"`optimizer.weight_decay` must be a number in \[0, 1e\+06\], got -0\.1"),
        ({"min_lr_ratio": 2.0}, r"`schedule.min_lr_ratio` must be a number in \[0, 1\]"),
        ({"betas": (0.9, 1.0)}, r"`optimizer.betas` must be a number in \[0, 1\), got 1\.0"),
        ({"betas": (0.9,)}, "`optimizer.betas` needs 2 values"),
        ({"seed": 99999999999999999999}, "`seed` must be at most 9223372036854775807, got 99999999999999999999"),
        ({"lr": math.inf}, "`optimizer.lr` must be"),
    ],
)
def test_settings_out_of_range(changes, message):
    with pytest.raises(UserError, match=message):
        run_config(SETTINGS, **changes)
