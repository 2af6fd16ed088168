"""``geonorm train`` around its loop: faults, counters, samples, trackers, speed, mistakes."""

from __future__ import annotations

import functools
import json
import math
import sys
import types
import warnings

import pytest
import torch

from geonorm import UserError
from geonorm.cli import main
from geonorm.data import Windows
from geonorm.models import ModelShape, build_model
from geonorm.training import rank_run as running
from geonorm.training import trackers
from geonorm.training.checkpoint import Checkpoints
from geonorm.training.config import ModelConfig, TrackingConfig
from geonorm.training.counters import SPIKE_MINIMUM, Counters
from geonorm.training.distributed import joined, solo
from geonorm.training.optimizer import make_optimizer
from geonorm.training.rank_run import DIVERGED
from geonorm.training.recipe import dump, load
from geonorm.training.run import run
from geonorm.training.throughput import flops_per_token
from train_runs import assert_same_end, rows, tensors, tiny, tiny_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny_corpus(tmp_path_factory.mktemp("corpus"))


def spoil(monkeypatch, first: int, last: int) -> None:
    """Make the gradients of steps ``first`` to ``last`` NaN; a step has two micro-batches here."""
    original = running.make_model

    def make_model(config, corpus):
        model, calls = original(config, corpus), [0]

        def spoiled(grad):
            calls[0] += 1
            return grad * math.nan if first <= (calls[0] + 1) // 2 <= last else grad

        model.lm_head.weight.register_hook(spoiled)
        return model

    monkeypatch.setattr(running, "make_model", make_model)


def test_steps_that_are_not_finite_are_skipped_counted_and_leave_no_trace(corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        spoil(patch, 1, 2)
        with warnings.catch_warnings():
            # A scheduler that is stepped before its optimiser warns.
            warnings.filterwarnings("error", message=".*lr_scheduler.*")
            assert run(tiny(corpus, "checkpoint.every=2"), tmp_path / "run") == 0
    assert [row["step"] for row in rows(tmp_path / "run", "skipped")] == [1, 2]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["skipped_steps"] == 2
    assert all(value.isfinite().all() for value in tensors(tmp_path / "run", 30).values() if value.is_floating_point())


def test_the_first_skipped_step_leaves_weights_as_drawn_and_no_moments(corpus, tmp_path, monkeypatch):
    spoil(monkeypatch, 1, 1)
    assert run(tiny(corpus, "steps=2", "schedule.warmup=0", "checkpoint.every=1"), tmp_path / "run") == 0
    first = tensors(tmp_path / "run", 1)
    assert not any(name.startswith("optimizer.") for name in first)
    torch.manual_seed(0)
    fresh = build_model(ModelShape(16, 2, 2), "geonorm", {}, vocab_size=257, length=40, seed=0)
    assert all(torch.equal(value, first[f"model.{name}"]) for name, value in fresh.named_parameters())


def test_too_many_in_a_row_end_the_run_and_keep_the_last_good_checkpoint(corpus, tmp_path, monkeypatch, capsys):
    config = tiny(corpus, "faults.max_skipped=3")
    with monkeypatch.context() as patch:
        spoil(patch, 20, 99)
        assert run(config, tmp_path / "run") == DIVERGED
    assert "not finite in 3 steps in a row, up to step 22; the last checkpoint, of step 16" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "diverged"
    assert run(tiny(corpus), tmp_path / "straight") == 0
    assert run(config, tmp_path / "run", resume=True) == 0
    assert_same_end(tmp_path / "run", tmp_path / "straight")


def test_which_losses_are_spikes():
    progress = Counters.start(1000)
    quiet = [2.0 + 0.01 * (-1) ** number for number in range(SPIKE_MINIMUM)]
    assert not any(progress.add_loss(loss, 7.0) for loss in [50.0, *quiet[:-1]])
    # The 50 among 100 losses makes the deviation 4.8.
    assert not progress.add_loss(30.0, 7.0)
    progress = Counters.start(1000)
    assert not any(progress.add_loss(loss, 7.0) for loss in quiet)
    assert not progress.add_loss(2.06, 7.0)
    assert progress.add_loss(2.09, 7.0)
    assert not progress.add_loss(1.0, 7.0)
    assert progress.spikes == 1
    again = Counters.from_json(json.loads(json.dumps(progress.to_json())), 1000)
    assert again == progress


@pytest.mark.parametrize("prompts", ["[]", "['']", "[Ada, '']"])
def test_samples_need_prompts(corpus, prompts):
    with pytest.raises(UserError, match="prompts` is empty or holds an empty prompt"):
        tiny(corpus, "sampling.every=1", f"sampling.prompts={prompts}")


def test_a_model_that_main_memory_cannot_hold_is_one_line(corpus, tmp_path):
    with pytest.raises(UserError, match=r"^out of main memory[^\n]*$"):
        run(tiny(corpus, "model.hidden_size=1e9"), tmp_path / "run")


@pytest.mark.parametrize(
    "word", ["model.placement=geonrm", "model.options.decy=1", "model.num_heads=3", "model.start=nothere"]
)
def test_a_wrong_model_is_told_before_text_is_prepared(corpus, tmp_path, monkeypatch, word):
    monkeypatch.setattr(running, "open_corpus", lambda config, say: pytest.fail("text was prepared"))
    with pytest.raises(UserError):
        run(tiny(corpus, word), tmp_path / "run")


def test_samples_leave_no_trace(corpus, tmp_path):
    config = tiny(corpus, "sampling.every=1", "sampling.tokens=3", "sampling.prompts=[Ada, Ben]")
    assert run(config, tmp_path / "with") == 0
    assert run(tiny(corpus), tmp_path / "without") == 0
    for name, value in tensors(tmp_path / "without", 30).items():
        assert torch.equal(value, tensors(tmp_path / "with", 30)[name]), name
    samples = rows(tmp_path / "with", "sample")
    assert [row["step"] for row in samples] == list(range(1, 31))
    assert [text["prompt"] for text in samples[0]["texts"]] == ["Ada", "Ben"]


def test_the_resolved_recipe_is_saved_and_shown(corpus, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"steps: 12\noptimizer: {{lr: 1e-2}}\ndata: {{corpus: {corpus.path}, seq_len: 8}}\n")
    words = [
        "train",
        "--config",
        str(recipe),
        "--out",
        str(tmp_path / "run"),
        "optimizer.lr=2e-3",
        "global_batch_size=2",
    ]
    assert main([*words, "--show"]) == 0
    shown = capsys.readouterr().out
    assert "lr: 0.002\n" in shown
    assert "warmup: 1\n" in shown
    assert not (tmp_path / "run").exists()
    assert main(words) == 0
    assert (tmp_path / "run" / "config.yaml").read_text() == shown
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "finished: validation loss" in out
    assert main(["train", "--out", str(tmp_path / "run"), "--resume"]) == 0


def test_data_takes_the_place_of_the_recipe_s_text(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("GEONORM_CACHE", str(tmp_path / "cache"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump(tiny(tmp_path / "gone", "steps=2", "schedule.warmup=1")))
    command = ["train", "--config", str(recipe), "--overwrite", "--out"]
    assert main([*command, str(tmp_path / "ready"), "--data", str(corpus.path)]) in (0, DIVERGED)
    assert load([tmp_path / "ready" / "config.yaml"], []).data.corpus == corpus.path
    (tmp_path / "a.txt").write_text("one two three four " * 400)
    assert main([*command, str(tmp_path / "text"), "--data", str(tmp_path / "*.txt")]) in (0, DIVERGED)
    assert [row["step"] for row in rows(tmp_path / "text")] == [1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.lrr=1"], "error: unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?\n"),
        (["--config", "gone.yaml"], "error: cannot read the recipe gone.yaml: No such file or directory\n"),
        (["model.placement=prr"], "error: unknown placement"),
        (["model.hidden_size=30", "model.num_heads=4"], "error: `hidden_size` 30 is not divisible by `num_heads` 4"),
        (
            ["model.num_heads=4", "model.num_kv_heads=3"],
            "error: `model.num_heads` 4 is not a multiple of `model.num_kv_heads` 3\n",
        ),
        (["model.family=lama"], "error: unknown family 'lama'; did you mean 'llama'?"),
        (["model.start=."], "error: `model.start` . is not a folder with a saved model (no config.json)\n"),
        (["data.corpus=."], "is not a prepared corpus"),
        (["data.seq_len=100000"], "use a shorter length or more text"),
        (["--parallel", "ddp"], "error: `parallel` is ddp, but no ranks were started; run torchrun"),
        (["device=cuda"], "error: `device` is cuda, but torch sees no GPU"),
        (["tracking.trackers=[wandb]"], "error: `tracking.trackers` names wandb, which is not installed; run "),
        (["--resume", "--overwrite"], "error: --resume and --overwrite are both given; keep one\n"),
    ],
)
def test_mistakes_are_one_line_and_leave_the_folder_free(corpus, tmp_path, monkeypatch, capsys, words, message):
    if any("cuda" in word for word in words) and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump(tiny(corpus)))
    assert main(["train", "--config", str(recipe), "--out", str(tmp_path / "run"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_ranks_without_a_way_to_share_the_work(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 ranks were started, but `parallel` is none"), joined("none", "cpu"):
        pass


def test_damaged_ids_are_named(corpus, tmp_path, monkeypatch):
    original = Windows.batch
    monkeypatch.setattr(Windows, "batch", lambda self, start, size: original(self, start, size) + 200 * (start == 8))
    with pytest.raises(UserError, match=r"train\.tokens holds the id \d+ in the windows of step 3, but the vocabulary"):
        run(tiny(corpus), tmp_path / "run")


def test_running_out_of_memory_is_one_line(corpus, tmp_path, monkeypatch):
    def step(self, number):
        raise torch.OutOfMemoryError("tried to allocate 2 TiB\nmore")

    monkeypatch.setattr(running.Loop, "take_step", step)
    with pytest.raises(UserError, match=r"^out of memory \(tried to allocate 2 TiB\); raise `accumulation`"):
        run(tiny(corpus), tmp_path / "run")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_spares_gains_and_step_sizes_whatever_the_optimiser(corpus, name):
    model = build_model(ModelShape(16, 2, 2), "geonorm", {"learnable": True}, vocab_size=257, length=8, seed=0)
    config = tiny(corpus, f"optimizer.name={name}", "optimizer.weight_decay=0.5", "schedule.warmup=0")
    optimizer, _ = make_optimizer(model, config)
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, model.parameters()))
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, before[key]) == (parameter.dim() < 2), key
    in_muon = {
        id(p) for one in optimizer.optimizers if type(one).__name__ == "Muon" for p in one.param_groups[0]["params"]
    }
    matrices = {id(p) for key, p in model.named_parameters() if p.dim() == 2 and "layers." in key}
    assert in_muon == (matrices if name == "muon" else set())


def test_operations_and_the_share_of_the_peak(corpus, tmp_path):
    model = build_model(ModelShape(16, 2, 2), "geonorm", {}, vocab_size=257, length=40, seed=0)
    inner = ModelShape(16).inner
    matrices = 2 * (4 * 16 * 16 + 3 * 16 * inner) + 257 * 16 + 16
    assert flops_per_token(model, 40) == 6 * matrices + 12 * 2 * 16 * 40
    assert run(tiny(corpus, "peak_flops=1e9", "steps=3", "schedule.warmup=0"), tmp_path / "run") == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    last = [row for row in map(json.loads, lines) if row["kind"] == "train"][-1]
    assert last["mfu"] == pytest.approx(last["tokens_per_second"] * flops_per_token(model, 40) / 1e9)
    assert last["tokens_per_second"] == pytest.approx(4 * 40 / last["step_seconds"])
    assert last["peak_memory_bytes"] > 1e7


def test_trackers_get_every_number(corpus, tmp_path, monkeypatch):
    calls: list = []
    for name in ("wandb", "trackio"):
        fake = types.ModuleType(name)
        fake.init = functools.partial(lambda package, **more: calls.append((package, "init", more)), name)
        fake.log = lambda values, step: calls.append(("log", step, values))
        fake.finish = lambda: calls.append("finish")
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    config = tiny(corpus, "steps=3", "schedule.warmup=0", "tracking.trackers=[wandb, trackio, tensorboard]")
    assert run(config, tmp_path / "run") == 0
    assert [call for call in calls if call == "finish"] == ["finish"] * 2
    (_, _, wandb), _ = calls[:2]
    assert (wandb["project"], wandb["name"], wandb["mode"]) == ("geonorm", "run", "offline")
    assert wandb["config"]["optimizer"]["lr"] == 0.01
    logged = [(step, values) for kind, step, values in (call for call in calls[2:] if call != "finish")]
    assert {step for step, _ in logged} == {1, 2, 3}
    names = set().union(*(values for _, values in logged))
    assert {"train/loss", "train/lr", "eval/val_loss", "layers/angle/mlp/2", "layers/grad_norm/1"} <= names
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_configuration_of_trackers_and_of_the_model():
    with pytest.raises(UserError, match=r"unknown tracking\.trackers 'wand'; did you mean 'wandb'"):
        TrackingConfig(trackers=("wand",))
    assert trackers.numbers({"kind": "eval", "step": 3, "a": None, "b": [1, {"c": 2.5}]}) == {
        "eval/b/1": 1,
        "eval/b/2/c": 2.5,
    }
    with pytest.raises(UserError, match=r"`model\.num_layers` must be a whole number of at least 1, got 0"):
        ModelConfig(num_layers=0)


def test_a_run_that_is_held_by_another_process(corpus, tmp_path):
    from filelock import FileLock

    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"), pytest.raises(UserError, match="another process is training in"):
        run(tiny(corpus), tmp_path / "run")


@pytest.mark.slow
def test_compiled_and_eager_agree(corpus, tmp_path):
    for name in ("false", "true"):
        config = tiny(corpus, "steps=4", "schedule.warmup=0", f"compile={name}")
        assert run(config, tmp_path / name) in (0, DIVERGED)
    mine, theirs = ([row["loss"] for row in rows(tmp_path / name)] for name in ("false", "true"))
    assert mine == pytest.approx(theirs, rel=1e-5)


def test_checkpoints_of_no_run_are_none(tmp_path):
    assert Checkpoints(tmp_path / "none", solo(torch.device("cpu"))).find("id", print) is None
