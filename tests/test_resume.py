"""Resume is exact: a run that was stopped anywhere ends with the bits of one that was not."""

from __future__ import annotations

import json
import shutil
import signal

import pytest
import torch

from geonorm import UserError
from geonorm.models import blocks
from geonorm.signals import INTERRUPTED, TRY_AGAIN
from geonorm.storage import write_json
from geonorm.training import rank_run as running
from geonorm.training.checkpoint import expendable
from geonorm.training.manifest import MANIFEST
from geonorm.training.run import run
from train_runs import assert_same_end, finish, rows, stop_after, tensors, tiny, tiny_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def dropout(monkeypatch):
    """Draws in training, so that a random stream that is not restored shows."""
    original = running.make_model

    def make_model(config, corpus):
        model = original(config, corpus)
        for block in blocks(model):
            block.self_attn.attention_dropout = 0.3
        return model

    monkeypatch.setattr(running, "make_model", make_model)


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    """An undisturbed run for each set of overrides, made once."""
    made = {}

    def get(*overrides):
        if overrides not in made:
            out = tmp_path_factory.mktemp("straight") / "run"
            assert run(tiny(corpus, *overrides), out) == 0
            made[overrides] = out
        return made[overrides]

    return get


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("optimizer.name=muon", "schedule.name=wsd", "schedule.warmup=5"),
        ("precision=bf16", "model.options.learnable=true", "gradient_checkpointing=true", "checkpoint.background=true"),
        ("model.tie_embeddings=true", "model.num_kv_heads=1", "model.placement=deepnorm", "sampling.every=7"),
    ],
)
def test_stopped_during_warm_up_in_an_epoch_under_accumulation(corpus, straight, tmp_path, monkeypatch, overrides):
    config = tiny(corpus, *overrides)
    with monkeypatch.context() as patch:
        stop_after(patch, 17)
        assert run(config, tmp_path / "run") == TRY_AGAIN
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 18))
    finish(config, tmp_path / "run")
    assert_same_end(tmp_path / "run", straight(*overrides))


def test_the_run_passes_more_than_one_epoch_and_draws(corpus, straight):
    """What the exactness above would be worth little without."""
    first, last = (tensors(straight(), step)["random.0.cpu"] for step in (24, 30))
    assert not torch.equal(first, last)
    assert (corpus.train.num_tokens - 1) // 40 < 30 * 4


def test_a_rollback_leaves_one_row_a_step(corpus, straight, tmp_path, capsys):
    shutil.copytree(straight(), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-30")
    finish(tiny(corpus), tmp_path / "run")
    assert "going on from step 24" in capsys.readouterr().out
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 31))
    assert_same_end(tmp_path / "run", straight())


def test_a_finished_run_is_finished(corpus, straight, tmp_path):
    shutil.copytree(straight(), tmp_path / "run")
    before = json.loads((tmp_path / "run" / "result.json").read_text())
    finish(tiny(corpus), tmp_path / "run")
    after = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {**after, "peak_memory_bytes": 0} == {**before, "peak_memory_bytes": 0}
    assert_same_end(tmp_path / "run", straight())


def test_a_first_interrupt_saves_and_says_so(corpus, straight, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_after(patch, 3, signal.SIGINT)
        assert run(tiny(corpus), tmp_path / "run") == INTERRUPTED
    assert "saved step 3 of 30; go on with --resume" in capsys.readouterr().out
    finish(tiny(corpus), tmp_path / "run")
    assert_same_end(tmp_path / "run", straight())


@pytest.mark.parametrize("change", ["truncated", "stale", "another run", "unfinished", "extra file", "flipped"])
def test_the_last_good_checkpoint_is_used_and_a_message_says_so(corpus, straight, tmp_path, capsys, change):
    out = tmp_path / "run"
    shutil.copytree(straight(), out)
    newest = out / "checkpoints" / "step-30"
    weights = next(newest.glob("*.safetensors"))
    if change == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif change == "flipped":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif change == "extra file":
        shutil.copy(weights, newest / "other.safetensors")
    elif change == "unfinished":
        (newest / MANIFEST).unlink()
    elif change == "stale":
        (out / "checkpoints" / "step-9000").mkdir()
        shutil.rmtree(newest)
    else:
        write_json(out / "run.json", {**json.loads((out / "run.json").read_text()), "id": "other"})
        with pytest.raises(UserError, match=r"none of the 2 checkpoints in .* is good"):
            run(tiny(corpus), out, resume=True)
        return
    finish(tiny(corpus), out)
    said = capsys.readouterr().out
    assert "not used: " in said
    assert "going on from step 24" in said
    assert (out / "checkpoints" / ("damaged-step-9000-1" if change == "stale" else "damaged-step-30-1")).is_dir()
    assert_same_end(out, straight())


def test_which_checkpoints_stay():
    steps = [500, 1000, 8000, 9000, 10000]
    assert expendable(steps, 2, 0) == [500, 1000, 8000]
    assert expendable(steps, 2, 4000) == [500, 1000]
    assert expendable(steps[:2], 2, 0) == []
    assert expendable([10000, 9000], 1, 0) == [9000]


def test_the_newest_is_the_highest_number(corpus, straight, tmp_path, capsys):
    """Checkpoints 8, 16, 24 and 30 were saved; 8 comes last in the order of strings."""
    assert sorted(path.name for path in (straight() / "checkpoints").iterdir()) == ["step-24", "step-30"]


def test_the_folder_is_not_used_twice_unless_told(corpus, straight, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(straight(), out)
    with pytest.raises(UserError, match=r"is not empty; add --resume .* --overwrite"):
        run(tiny(corpus), out)
    with pytest.raises(UserError, match=r"`optimizer\.lr` is 0.02 now but was 0.01"):
        run(tiny(corpus, "optimizer.lr=2e-2"), out, resume=True)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("do not delete")
    with pytest.raises(UserError, match="holds no training run"):
        run(tiny(corpus), tmp_path / "letters", overwrite=True)
    assert run(tiny(corpus), out, overwrite=True) == 0
    assert_same_end(out, straight())


def test_a_stable_run_can_be_made_longer(corpus, tmp_path, capsys):
    out = tmp_path / "run"
    wsd = ("schedule.name=wsd", "schedule.warmup=2", "schedule.decay=2")
    assert run(tiny(corpus, *wsd, "steps=10"), out) == 0
    longer = tiny(corpus, *wsd, "steps=16")
    with pytest.raises(UserError, match="from step 8 at the latest, but its newest checkpoint is of step 10"):
        run(longer, out, resume=True)
    shutil.rmtree(out / "checkpoints" / "step-10")
    assert run(longer, out, resume=True) == 0
    assert run(longer, tmp_path / "straight") == 0
    assert rows(out) == rows(tmp_path / "straight")
    assert [row["lr"] for row in rows(out)][2:14] == [1e-2] * 12


def test_other_text_is_not_gone_on_with(corpus, straight, tmp_path):
    shutil.copytree(straight(), tmp_path / "run")
    other = tiny_corpus(tmp_path / "other")
    path = other.path / "train.tokens.json"
    write_json(path, {**json.loads(path.read_text()), "sha256": "0"})
    with pytest.raises(UserError, match="`data` is other text now"):
        run(tiny(other), tmp_path / "run", resume=True)


@pytest.mark.parametrize("left", ["nothing written", "identity only", "before the first checkpoint"])
def test_a_start_that_was_killed_is_started_again(corpus, straight, tmp_path, left):
    out = tmp_path / "run"
    shutil.copytree(straight(), out)
    shutil.rmtree(out / "checkpoints")
    (out / "config.yaml.123.partial").write_text("st")
    if left != "before the first checkpoint":
        for name in ("config.yaml", "metrics.jsonl", "result.json", "test_windows.json"):
            (out / name).unlink()
        shutil.rmtree(out / "model")
    if left == "nothing written":
        (out / "run.json").unlink()
    finish(tiny(corpus), out)
    assert_same_end(out, straight())


def test_lost_metrics_are_not_made_up(corpus, straight, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(straight(), out)
    (out / "metrics.jsonl").write_text("")
    shutil.rmtree(out / "checkpoints" / "step-30")
    finish(tiny(corpus), out)
    assert [row["step"] for row in rows(out)] == list(range(25, 31))
