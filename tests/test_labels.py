"""Labels apart from inputs: what has no label is read, is not learned, and counts nowhere."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional

from geonorm.cli import main
from geonorm.data import Corpus, Windows, prepare
from geonorm.models import ModelShape, build_model
from geonorm.report.results import Trial
from geonorm.sweep.summary import Design, summarize
from geonorm.training import evaluate, train
from geonorm.training.run import run
from geonorm.training.validation import IGNORED, token_losses
from run_configs import run_config
from tolerances import SAME_64, SAME_LOSS, worst
from train_runs import assert_same_end, finish, rows, stop_after, tiny
from turns import answers, chat_tokenizer, conversations, write_lines

SETTINGS = run_config(steps=1, batch=8, length=40, warmup=0, lr=1e-2, log_every=1, eval_every=1, clip=1e9)
SHARES = {"vocab_size": 257, "val_fraction": 0.2, "test_fraction": 0.2}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return prepare([write_lines(folder / "a.jsonl", answers(120))], out=folder / "out", **SHARES)


def make_model():
    shape = ModelShape(hidden_size=16, num_layers=2, num_heads=2)
    return build_model(shape, "geonorm", {}, vocab_size=257, length=40, seed=0)


def by_hand(model, ids, mask):
    """Mean loss of the labelled tokens, from the logits of the whole windows."""
    ids, mask = torch.from_numpy(ids), torch.from_numpy(mask)
    labels = ids.masked_fill(~mask, IGNORED)[:, 1:]
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.double()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED).item()


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("parts", [1, 4])
def test_a_step_is_the_mean_over_labelled_tokens(corpus, parts, monkeypatch):
    windows = Windows(corpus.train, length=40)
    ids, mask = windows.batch(0, 8), windows.mask(0, 8)
    counts = mask[:, 1:].sum(axis=1)
    assert counts.min() < counts.max(), "or a mean of means would do"
    want_model = make_model()
    want = by_hand(want_model, ids, mask)
    labels = torch.from_numpy(np.where(mask, ids, IGNORED)[:, 1:])
    logits = want_model(input_ids=torch.from_numpy(ids[:, :-1]), use_cache=False).logits
    functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED).backward()

    model, found = make_model(), []
    seen = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.update({name: seen.get(name, 0) + grad}))
    settings = dataclasses.replace(SETTINGS, accumulation=parts)
    outcome = train(model, windows, corpus.held_out("val", 40, 2).ids, corpus.token_bytes, settings, found.append)
    assert next(row["loss"] for row in found if row["kind"] == "train") == pytest.approx(want, rel=SAME_LOSS)
    for name, gradient in gradients(want_model).items():
        size = gradient.abs().max()
        assert worst(seen[name] / size, gradient / size) <= SAME_LOSS, name
    assert outcome.labelled_tokens == counts.sum() < outcome.tokens == 8 * 40


def test_a_token_without_a_label_is_read(corpus):
    """The losses of the others are those that they have with all labels; padding in its place would change them."""
    model, windows = make_model(), Windows(corpus.train, length=40)
    ids, mask = (torch.from_numpy(part) for part in (windows.batch(0, 8), windows.mask(0, 8)))
    labels = ids.masked_fill(~mask, IGNORED)
    with torch.no_grad():
        everything, some = token_losses(model, ids), token_losses(model, ids, labels[:, 1:])
        padded = token_losses(model, labels)
    labelled = mask[:, 1:]
    assert torch.equal(some[labelled], everything[labelled])
    assert (some[~labelled] == 0).all()
    assert (padded[labelled] - everything[labelled]).abs().max() > 1e-3


def test_evaluation_counts_labelled_tokens_and_their_bytes(corpus):
    model, held_out = make_model(), corpus.held_out("val", 40, 20)
    one, seven = (evaluate(model, held_out, corpus.token_bytes, batch=n, precision="fp32") for n in (1, 7))
    assert one.loss == pytest.approx(by_hand(model, held_out.ids, held_out.mask), rel=SAME_LOSS)
    assert seven.loss == pytest.approx(one.loss, rel=SAME_LOSS)
    targets = held_out.ids[:, 1:][held_out.mask[:, 1:]]
    num_bytes = sum(int(corpus.token_bytes[token]) for token in targets)
    assert one.bits_per_byte == pytest.approx(one.loss * len(targets) / math.log(2) / num_bytes, rel=SAME_64)
    assert one.window_labels.tolist() == held_out.mask[:, 1:].sum(axis=1).tolist()
    assert one.window_labels.min() > 0
    assert one.loss == pytest.approx(np.average(one.window_losses, weights=one.window_labels), rel=SAME_64)


TRAIN = (
    *(
        "model.hidden_size=32",
        "model.num_layers=2",
        "model.num_heads=2",
        "data.seq_len=48",
        "steps=60",
        "global_batch_size=8",
        "device=cpu",
    ),
    *("optimizer.lr=2e-2", "evaluation.every=60", "evaluation.log_every=10", "checkpoint.every=60"),
)


def test_answers_alone_are_learned_from_the_command_line(tmp_path, capsys):
    """The prompts are noise, which nothing predicts below 2 nats; their answers are always the same."""
    path = write_lines(tmp_path / "answers.jsonl", answers(200))
    words = ["--vocab-size", "257", "--val-fraction", "0.2", "--test-fraction", "0.2"]
    assert main(["prepare", str(path), "--out", str(tmp_path / "corpus"), *words]) == 0
    corpus = Corpus.load(tmp_path / "corpus")
    labels = corpus.description["num_labels"]
    assert f"{labels['train']:,} train, {labels['val']:,} validation and" in capsys.readouterr().out
    assert main(["train", *TRAIN, "--data", str(tmp_path / "corpus"), "--out", str(tmp_path / "run")]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["val_loss"] < 0.5
    assert 0 < result["labelled_tokens"] < result["tokens"] / 2
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["num_labels"] == labels

    # The same text with a label on everything is mostly noise.
    whole = write_lines(tmp_path / "whole.jsonl", [{"text": r["prompt"] + r["completion"]} for r in answers(200)])
    sources = f"data.sources=['{whole}']"
    shares = ("data.vocab_size=257", "data.val_fraction=0.2", "data.test_fraction=0.2")
    assert main(["train", *TRAIN, sources, *shares, "--out", str(tmp_path / "all")]) == 0
    everything = json.loads((tmp_path / "all" / "result.json").read_text())
    assert everything["val_loss"] > 1.0
    assert everything["labelled_tokens"] == everything["tokens"]


def test_assistant_turns_alone_are_learned_from_the_command_line(tmp_path):
    path = write_lines(tmp_path / "talk.jsonl", conversations(200))
    words = ["--tokenizer", str(chat_tokenizer(tmp_path / "tokenizer")), "--out", str(tmp_path / "corpus")]
    assert main(["prepare", str(path), *words]) == 0
    assert main(["train", *TRAIN, "--data", str(tmp_path / "corpus"), "--out", str(tmp_path / "run")]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert 0 < result["labelled_tokens"] < result["tokens"]
    first, *_, last = rows(tmp_path / "run")
    assert last["loss"] < first["loss"] / 2


@pytest.mark.slow
def test_a_comparison_counts_labelled_tokens(corpus, tmp_path):
    run = ["steps=40", "data.seq_len=40", "global_batch_size=4", "evaluation.windows=4"]
    words = f"--preset tiny --data {corpus.path} --placements pre post --out {tmp_path / 'o'} --jobs 1".split()
    assert main(["compare", *run, *words, "--lrs", "1e-2", "--seeds", "0"]) == 0
    results = json.loads((tmp_path / "o" / "results.json").read_text())
    windows = Windows(corpus.train, length=40)
    counted = int(windows.mask(0, 40 * 4)[:, 1:].sum())
    assert {trial["labelled_tokens"] for trial in results["trials"]} == {counted}
    assert results["corpus"]["num_labels_train"] == corpus.num_labels["train"]


def test_a_resumed_run_ends_with_the_same_bits(corpus, tmp_path, monkeypatch):
    config = tiny(corpus)
    whole = finish(config, tmp_path / "whole")
    with monkeypatch.context() as patched:
        stop_after(patched, 13)
        assert run(config, tmp_path / "parts") == 75
    assert_same_end(whole, finish(config, tmp_path / "parts"))
    ends = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "parts")]
    assert ends[0]["labelled_tokens"] == ends[1]["labelled_tokens"] < ends[0]["tokens"]


def test_a_run_is_not_taken_up_with_other_labels(corpus, tmp_path, capsys):
    """The ids are the same, so nothing but the mask tells the corpora apart."""
    records = [{"prompt": r["prompt"][:5], "completion": r["prompt"][5:] + r["completion"]} for r in answers(120)]
    other = prepare([write_lines(tmp_path / "a.jsonl", records)], out=tmp_path / "other", **SHARES)
    assert (other.train.tokens == corpus.train.tokens).all()
    out = tmp_path / "run"
    assert (
        main(["train", *TRAIN, "steps=2", "checkpoint.every=1", f"data.corpus={corpus.path}", "--out", str(out)]) == 0
    )
    shutil.rmtree(out / "checkpoints" / "step-2")
    assert main(["train", f"data.corpus={other.path}", "--out", str(out), "--resume"]) == 2
    assert "`data` is other text now" in capsys.readouterr().err


def test_a_summary_is_a_mean_over_tokens(tmp_path):
    """Windows of 1 and 9 labels: the mean of their losses is no mean over tokens."""
    losses, labels = {"pre": [4.0, 2.0, 3.0, 1.0], "post": [3.0, 2.5, 3.0, 1.5]}, [1, 9, 1, 9]
    trials = []
    for label, by_window in losses.items():
        for seed in range(2):
            mean = float(np.average(by_window, weights=labels)) + seed
            name = f"{label}-{seed}"
            losses_of = {"val_loss": mean, "test_loss": mean}
            trial = Trial(
                id=name, label=label, placement=label, options={}, lr=1.0, seed=seed, status="ok", **losses_of
            )
            (tmp_path / name).mkdir()
            written = {"loss": [loss + seed for loss in by_window], "labels": labels, "document": [0, 0, 1, 1]}
            (tmp_path / name / "test_windows.json").write_text(json.dumps(written))
            trials.append(trial)
    rows = {row.label: row for row in summarize(trials, tmp_path, Design((0, 1)))[0]}
    assert rows["post"].difference.mean == pytest.approx((-1 * 1 + 0.5 * 9 + 0.5 * 9) / 20, rel=SAME_64)
    for row in rows.values():
        assert np.mean(row.test_loss_ci) == pytest.approx(row.test_loss_mean, rel=SAME_64)
