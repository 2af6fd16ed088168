"""Steps and runs that go wrong: gradients that are not finite, nothing to learn from, nothing learned."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from corpora import small_corpus
from geonorm import UserError
from geonorm.data import Windows
from geonorm.training import (
    evaluate,
    train,
)
from geonorm.training.counters import Counters
from geonorm.training.outcome import verdict
from geonorm.training.validation import IGNORED
from loop_runs import build_model, make_trial, run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_never_reaches_weights_or_moments(corpus, bad):
    trial = make_trial(steps=15)
    model = build_model(trial)
    weight = model.lm_head.weight
    weight.register_hook(lambda grad: torch.full_like(grad, bad))
    before = [p.detach().clone() for p in model.parameters()]
    outcome, rows, _ = run(corpus, trial, model)
    assert outcome.status == "diverged"
    assert "not finite in 10 steps in a row" in outcome.message
    assert outcome.skipped == 10
    assert sum(row["kind"] == "skipped" for row in rows) == 10
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_one_bad_step_is_skipped_and_counted(corpus):
    trial = make_trial()
    model = build_model(trial)
    calls = [0]

    def spoil_third(grad):
        calls[0] += 1
        return grad * math.nan if calls[0] == 3 else grad

    model.lm_head.weight.register_hook(spoil_third)
    outcome, rows, _ = run(corpus, trial, model)
    assert (outcome.status, outcome.skipped) == ("ok", 1)
    assert [row["step"] for row in rows if row["kind"] == "skipped"] == [3]
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("first", [7, 12])
def test_a_run_that_ends_while_it_skips_has_not_ended_well(corpus, first):
    trial = make_trial()
    model = build_model(trial)
    calls = [0]

    def spoil(grad):
        calls[0] += 1
        return grad * math.nan if calls[0] >= first else grad

    model.lm_head.weight.register_hook(spoil)
    outcome, rows, _ = run(corpus, trial, model)
    assert (outcome.status, outcome.skipped) == ("diverged", 13 - first)
    steps = "the last step" if first == 12 else "6 steps in a row"
    assert outcome.message == f"loss or gradient was not finite in {steps}, up to step 12"
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, first))


class WithoutLabels(Windows):
    """No token of the batches of steps 3 and 12, of 4 windows each, has a label."""

    def mask(self, start, size):
        return np.full((size, self.length + 1), start // 4 + 1 not in (3, 12))


def test_a_step_without_labels_is_no_step(corpus, recwarn):
    trial, rows, taken = make_trial(), [], []
    model = build_model(trial)
    model.lm_head.weight.register_hook(lambda grad: taken.append(1))
    windows = WithoutLabels(corpus.train, length=16)
    outcome = train(model, windows, corpus.held_out("val", 16, 6).ids, corpus.token_bytes, trial, rows.append)
    assert (outcome.status, outcome.skipped) == ("ok", 0)
    assert len(taken) == 10
    assert [row["step"] for row in rows if row["kind"] == "unlabelled"] == [3, 12]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [step for step in range(1, 13) if step % 9 != 3]
    assert math.isfinite(outcome.train_loss)
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


def test_evaluation_leaves_out_windows_without_labels(corpus, recwarn):
    model = build_model(make_trial())
    windows = corpus.held_out("val", 16, 6).ids
    masked = windows.copy()
    masked[[1, 4], 1:] = IGNORED
    found = evaluate(model, masked, corpus.token_bytes, batch=4, precision="fp32")
    rest = evaluate(model, windows[[0, 2, 3, 5]], corpus.token_bytes, batch=4, precision="fp32")
    assert found.loss == pytest.approx(rest.loss, rel=1e-6)
    assert found.window_losses == pytest.approx(rest.window_losses, rel=1e-6)
    assert found.labelled_windows.tolist() == [0, 2, 3, 5]
    masked[:, 1:] = IGNORED
    with pytest.raises(UserError, match="no token of the 6 windows to evaluate on has a label"):
        evaluate(model, masked, corpus.token_bytes, batch=4, precision="fp32")
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


def test_a_run_that_learned_nothing_is_not_well(corpus):
    outcome, _, _ = run(corpus, make_trial(steps=12, lr=50.0))
    assert outcome.status in ("diverged", "unlearned")
    assert outcome.message


@pytest.mark.parametrize(
    ("val_loss", "losses", "status"),
    [
        (5.60, [5.62, 5.61], "unlearned"),
        (math.log(256), [5.62, 5.61] * 50, "unlearned"),
        (5.60, [], "unlearned"),
        (6.20, [5.62, 5.61], "diverged"),
        (5.60, [5.62, 4.0, 5.61], "diverged"),
        (math.inf, [5.62, 5.61], "diverged"),
        (5.40, [5.62, 5.61] * 50, "ok"),
    ],
)
def test_the_loss_of_guessing_lies_on_no_border(val_loss, losses, status):
    for nudge in (-1e-4, 0, 1e-4):
        progress = Counters.start(100)
        progress.recent.extend(losses)
        assert verdict(val_loss + nudge, 256, progress)[0] == status


def test_a_run_that_ends_while_it_skips_has_diverged():
    progress = Counters.start(12)
    progress.add_skipped()
    assert verdict(2.0, 256, progress)[0] == "diverged"


def test_two_steps_of_a_new_model_have_not_diverged(corpus):
    trial = make_trial(steps=2, lr=1e-6, warmup=0)
    model = build_model(trial)
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    outcome, _, _ = run(corpus, trial, model)
    assert outcome.evaluation.loss >= math.log(len(corpus.token_bytes))
    assert outcome.status == "unlearned"
