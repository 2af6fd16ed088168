"""The estimate of a run against what small models on the CPU really have, do and keep."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from geonorm import UserError
from geonorm.cli import main
from geonorm.estimation.estimate import estimate, that_fit
from geonorm.estimation.gpus import GPUS, gpu
from geonorm.placements import available
from geonorm.training.config import RunConfig
from geonorm.training.distributed import recompute_blocks
from geonorm.training.recipe import load
from geonorm.training.setup import shaped_model
from geonorm.training.validation import autocast, token_losses
from tolerances import SAVED_BYTES, UNCOUNTED_FLOPS

RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "paper"
SHAPE = [
    "model.hidden_size=64",
    "model.num_layers=4",
    "model.num_heads=4",
    "data.vocab_size=300",
    "data.seq_len=48",
    "global_batch_size=6",
]
PLACEMENTS = [name for name in available() if name != "geonorm"]
# What an option lists layer by layer, and a stream that grows now and then.
BY_LAYER = [
    "geonorm options={alphas: [1, 1, 0.5, 0.5, 0.3, 0.3, 0.2, 0.2]}",
    "mix options={layers: [post, sandwich, pre, pre]}",
    "attnres options={block_size: 3}",
]
VARIANTS = ["geonorm", "geonorm options={learnable: true}", *PLACEMENTS, *BY_LAYER]
# Rows a token that enter each of six layers; they are made inside the first.
ROWS = {
    "geonorm": [1] * 6,
    "resi_dual": [1, *[2] * 5],
    "hyper": [1, *[4] * 5],
    "attnres": [1, 3, 5, 7, 9, 11],
}


def config_of(*words: str) -> RunConfig:
    return load([], [*SHAPE, *words])


def variant(text: str) -> list[str]:
    name, _, rest = text.partition(" ")
    return [f"model.placement={name}", *([f"model.{rest}"] if rest else [])]


def kept_bytes(model: torch.nn.Module, config: RunConfig) -> int:
    """Bytes of distinct storages that a forward pass with real tensors saves, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor
        return tensor

    ids = torch.zeros(config.global_batch_size // config.accumulation, config.data.seq_len + 1, dtype=torch.int64)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        autocast(torch.device("cpu"), config.precision),
    ):
        losses = token_losses(model, ids)
    del losses
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


# Rows that differ in what precision and tying change; every placement in the defaults.
OTHERS = ["geonorm", "pre", "deepnorm", "ngpt", "hyper", "attnres"]
CASES = [*((text, "fp32", "false") for text in VARIANTS), *((text, "bf16", "true") for text in OTHERS)]


@pytest.mark.parametrize(("text", "precision", "tied"), CASES)
def test_parameters_are_exact_and_activations_what_autograd_keeps(text, precision, tied):
    config = config_of(*variant(text), f"precision={precision}", f"model.tie_embeddings={tied}")
    model = shaped_model(config, 300)
    plan = estimate(config, gpu("h100"))
    assert plan.num_parameters == sum(p.numel() for p in model.parameters())
    assert plan.memory.activations == pytest.approx(kept_bytes(model, config), rel=SAVED_BYTES)


def test_with_checkpointing_only_streams_are_kept_and_one_block_at_a_time():
    config = config_of("gradient_checkpointing=true", "model.num_layers=6")
    model = shaped_model(config, 300)
    recompute_blocks(model)
    whole = estimate(dataclasses.replace(config, gradient_checkpointing=False), gpu("h100")).memory.activations
    saving = estimate(config, gpu("h100")).memory.activations
    stream = 4 * 6 * 48 * 64
    block = (whole - saving + 6 * stream) / 5
    # Entry and exit are inside the first and last block, so what they keep is not kept: a little below the estimate.
    assert saving - block - 3 * stream < kept_bytes(model, config) <= saving - block


@pytest.mark.parametrize("name", ROWS)
def test_streams_of_several_rows_are_kept_whole_with_checkpointing(name):
    config = config_of("gradient_checkpointing=true", "model.num_layers=6", f"model.placement={name}")
    model = shaped_model(config, 300)
    recompute_blocks(model)
    known = {}
    plan = estimate(config, gpu("h100"), known=known)
    saved = known[6]
    assert saved.streams == sum(ROWS[name]) * 4 * 6 * 48 * 64
    assert saved.streams <= kept_bytes(model, config) <= saved.streams + saved.rest
    assert plan.memory.activations == saved.streams + saved.block + saved.rest


def test_accumulation_divides_activations_by_micro_batches():
    one, three = (estimate(config_of(f"accumulation={count}"), gpu("h100")) for count in (1, 3))
    assert three.micro_batch == 2
    assert three.memory.activations == pytest.approx(one.memory.activations / 3, rel=SAVED_BYTES)
    assert three.flops == one.flops


@pytest.mark.parametrize("text", ["geonorm", "pre"])
def test_operations_are_what_torch_counts(text):
    config = config_of(*variant(text), "steps=1", "schedule.warmup=0")
    model = shaped_model(config, 300)
    model.set_attn_implementation("eager")
    ids = torch.zeros(config.global_batch_size, config.data.seq_len + 1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        token_losses(model, ids).sum().backward()
    assert estimate(config, gpu("h100")).flops == pytest.approx(counter.get_total_flops(), rel=UNCOUNTED_FLOPS)


def test_recomputation_adds_the_forward_pass_of_the_blocks():
    config = config_of("steps=1", "schedule.warmup=0", "gradient_checkpointing=true")
    model = shaped_model(config, 300)
    model.set_attn_implementation("eager")
    recompute_blocks(model)
    ids = torch.zeros(config.global_batch_size, config.data.seq_len + 1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        token_losses(model, ids).sum().backward()
    assert estimate(config, gpu("h100")).executed == pytest.approx(counter.get_total_flops(), rel=UNCOUNTED_FLOPS)


def test_memory_by_hand():
    count = estimate(config_of(), gpu("h100")).num_parameters
    alone = estimate(config_of(), gpu("h100")).memory
    assert (alone.weights, alone.gradients, alone.moments) == (4 * count, 4 * count, 8 * count)
    assert alone.logits == 6 * 48 * 300 * 4
    model = shaped_model(config_of(), 300)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    outside = count - 4 * layer
    cut = estimate(config_of("parallel=fsdp"), gpu("h100"), 2).memory
    assert cut.weights == 2 * count + 4 * (3 * layer + outside)
    assert cut.gradients == 2 * count + 4 * (2 * layer + outside)
    assert cut.moments == 4 * count
    assert estimate(config_of("parallel=fsdp", "accumulation=3"), gpu("h100"), 2).memory.gradients == 4 * count
    muon = estimate(config_of("optimizer.name=muon"), gpu("h100")).memory.moments
    assert muon == 4 * 4 * layer + 8 * outside
    time = estimate(config_of(), gpu("a100"), mfu=0.5)
    assert time.gpu_hours == pytest.approx(time.flops / (19.5e12 * 0.5) / 3600)


def test_what_would_fit_is_found():
    small = dataclasses.replace(GPUS["h100"], memory=10e6)
    plan = estimate(config_of(), small)
    assert not plan.fits
    others = list(that_fit(plan))
    assert others
    assert all(other.fits for other in others)
    assert others[0].config == dataclasses.replace(plan.config, accumulation=others[0].config.accumulation)
    assert not list(that_fit(estimate(config_of(), dataclasses.replace(small, memory=1e6))))


@pytest.mark.parametrize("size", ["125m", "350m", "1.3b"])
def test_the_papers_sizes_are_what_their_names_say_and_fit_eight_gpus(size):
    config = load([RECIPES / f"{size}-arxiv.yaml"])
    plan = estimate(config, gpu("h100"), 8)
    named = {"125m": 125e6, "350m": 350e6, "1.3b": 1.3e9}[size]
    assert plan.num_parameters == pytest.approx(named, rel=0.02)
    assert plan.num_tokens / plan.num_parameters == pytest.approx(20, rel=0.03)
    assert plan.fits


def test_every_part_of_the_papers_recipes_goes_with_every_other():
    for start in sorted(RECIPES.glob("*-*.yaml")):
        assert load([start]).model.options == {"decay": "harmonic"}
        for length in sorted((RECIPES / "length").iterdir()):
            for placement in sorted((RECIPES / "placement").iterdir()):
                config = load([start, length, placement])
                assert config.global_batch_size * config.data.seq_len == 524288
                assert config.data.seq_len == int(length.stem)
                assert config.model.placement == placement.stem.split("-")[0]
                assert config.global_batch_size % (8 * config.accumulation) == 0


def test_the_command(capsys, tmp_path):
    recipe = tmp_path / "some.yaml"
    recipe.write_text("model: {hidden_size: 32}")
    assert main(["plan", *SHAPE[1:], str(recipe)]) == 0
    assert "width 32, 4 heads" in capsys.readouterr().out
    assert main(["plan", *SHAPE]) == 0
    printed = capsys.readouterr().out
    assert "fits, with 10% left" in printed
    assert "assuming 40% of its peak of 67 TFLOP/s" in printed
    assert main(["plan", *SHAPE, "global_batch_size=524288", "--mfu", "0.3"]) == 1
    printed = capsys.readouterr().out
    assert "does NOT fit" in printed
    assert "fits with   accumulation=" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h10"], "unknown GPU 'h10'; did you mean 'h100'?"),
        (["--num-gpus", "2"], "`parallel` is none, which uses one GPU, not 2"),
        (["parallel=ddp", "--num-gpus", "4"], "`global_batch_size` 6 is not a multiple of 4 GPUs"),
        (["--mfu", "1.5"], "`mfu` must be at most 1, got 1.5"),
        (["--mfu", "0"], "`mfu` must be positive"),
        (["model.start=somewhere"], "`model.start` names a saved model"),
        (["nowhere.yaml"], "cannot read the recipe nowhere.yaml"),
        (["model.hiden_size=3"], "unknown key 'model.hiden_size'; did you mean 'model.hidden_size'?"),
    ],
)
def test_mistakes_are_one_line_with_exit_code_2(words, message, capsys):
    assert main(["plan", *SHAPE, *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_estimates_take_the_precision_of_the_peak():
    assert gpu("H100").peak("bf16") > gpu("h100").peak("fp32")
    with pytest.raises(UserError, match="unknown GPU"):
        gpu("cray")
