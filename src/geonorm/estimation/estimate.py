"""What a training run will take: parameters, tokens, operations, memory of a GPU, time.

Formulas, with N parameters, W GPUs, b windows of T tokens a micro-batch on each GPU, L layers of width d, vocabulary V,
B the bytes that one layer keeps for its backward pass, R what the rest of the model keeps and S the bytes of a layer's
stream, 4 b T d for each row that a token has in it:

    operations a token   6 N' + 12 L H Q T, see geonorm.training.throughput.flops_per_token; with checkpointing a third
                         of what falls on the layers is added, their second forward pass
    weights              4 N; cut up by FSDP 4 N / W, and three layers and the part outside them whole at a time
    gradients            4 N; cut up by FSDP 4 N / W, but whole while micro-batches accumulate
    moments              8 N for AdamW, 4 for each parameter under Muon; cut up by FSDP a W-th of it
    activations          L B + R; with checkpointing L S + B + R; sums over the layers where they differ
    logits               b T V times 4 in float32 and 6 in bfloat16: what the loss and its gradient hold on top

The peak is their sum. The CUDA context, workspaces, buffers of NCCL and fragmentation are not in it: a tenth of the
memory is left for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from geonorm.errors import UserError, check_count, check_positive
from geonorm.estimation.dry_run import Saved, saved_bytes
from geonorm.estimation.gpus import Gpu
from geonorm.models import blocks
from geonorm.placements import create
from geonorm.training.config import RunConfig
from geonorm.training.optimizer import make_optimizer
from geonorm.training.setup import shaped_model
from geonorm.training.throughput import flops_per_token

# Part of the memory that is left for what is not counted.
RESERVE = 0.1
# Layers that FSDP holds whole at a time: the one at work, the one fetched ahead, the one being let go.
_WHOLE_LAYERS = 3


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each GPU at the peak of a step."""

    weights: float
    gradients: float
    moments: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """Sum of all."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a run takes.

    Attributes:
        config: the recipe.
        gpu, num_gpus: what it is meant to run on.
        mfu: assumed share of the peak that the model's operations reach, recomputation not counted as such.
        vocab_size: of the corpus if it is there, else the recipe's.
        num_parameters: exact. num_tokens: trained on.
        flops: operations of the whole run that count; executed: with recomputation.
        micro_batch: windows a GPU and micro-batch.
        memory: of each GPU.
    """

    config: RunConfig
    gpu: Gpu
    num_gpus: int
    mfu: float
    vocab_size: int
    num_parameters: int
    num_tokens: int
    flops: float
    executed: float
    micro_batch: int
    memory: Memory

    @property
    def gpu_hours(self) -> float:
        """Hours of one GPU."""
        return self.executed / (self.gpu.peak(self.config.precision) * self.mfu) / 3600

    @property
    def hours(self) -> float:
        """Hours of wall time, without evaluation, checkpoints and what GPUs wait for each other."""
        return self.gpu_hours / self.num_gpus

    @property
    def available(self) -> float:
        """Bytes of a GPU that the estimate may fill."""
        return self.gpu.memory * (1 - RESERVE)

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.memory.total <= self.available


def estimate(
    config: RunConfig,
    gpu: Gpu,
    num_gpus: int = 1,
    *,
    mfu: float = 0.4,
    vocab_size: int | None = None,
    known: dict[int, Saved] | None = None,
) -> Estimate:
    """Estimate a run.

    Args:
        config: the recipe.
        gpu: kind of GPU; num_gpus: how many.
        mfu: share of the peak to assume, 0 to 1.
        vocab_size: of the corpus; None for the recipe's.
        known: what dry runs of this model have found, by windows of a micro-batch; this one's is added.

    Raises:
        UserError: the batch cannot be shared by the GPUs, or a shape or value that does not fit.
    """
    if not check_positive("mfu", mfu) <= 1:
        raise UserError(f"`mfu` must be at most 1, got {mfu}")
    check_count("num_gpus", num_gpus)
    if config.parallel == "none" and num_gpus > 1:
        raise UserError(f"`parallel` is none, which uses one GPU, not {num_gpus}; add parallel=ddp or parallel=fsdp")
    if config.global_batch_size % (num_gpus * config.accumulation):
        raise UserError(
            f"`global_batch_size` {config.global_batch_size} is not a multiple of {num_gpus} GPUs times `accumulation`"
            f" {config.accumulation}"
        )
    vocab_size = vocab_size or config.data.vocab_size
    model: Any = _on_meta(config, vocab_size, config.model.num_layers)
    micro_batch = config.global_batch_size // (num_gpus * config.accumulation)
    known = {} if known is None else known
    if micro_batch not in known:
        known[micro_batch] = saved_bytes(
            lambda depth: shaped_model(_with_depth(config, depth), vocab_size),
            config.model.num_layers,
            micro_batch,
            config.data.seq_len,
            config.precision,
            alike=_layers_alike(config),
        )
    num_tokens = config.steps * config.global_batch_size * config.data.seq_len
    token = flops_per_token(model, config.data.seq_len)
    of_head = 6.0 * model.get_output_embeddings().weight.numel()
    recomputed = (token - of_head) / 3 if config.gradient_checkpointing else 0.0
    return Estimate(
        config=config,
        gpu=gpu,
        num_gpus=num_gpus,
        mfu=mfu,
        vocab_size=vocab_size,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_tokens=num_tokens,
        flops=token * num_tokens,
        executed=(token + recomputed) * num_tokens,
        micro_batch=micro_batch,
        memory=_memory(config, model, known[micro_batch], micro_batch, num_gpus, vocab_size),
    )


def that_fit(plan: Estimate) -> Iterator[Estimate]:
    """Changes of a recipe that do not change its result and make it fit, the least first."""
    accumulations = [
        count
        for count in range(plan.config.accumulation, plan.config.global_batch_size // plan.num_gpus + 1)
        if plan.config.global_batch_size % (plan.num_gpus * count) == 0
    ]
    known: dict[int, Saved] = {}
    for parallel in ("ddp", "fsdp") if plan.config.parallel == "ddp" else (plan.config.parallel,):
        for checkpointing in sorted({plan.config.gradient_checkpointing, True}):
            for accumulation in accumulations:
                config = dataclasses.replace(
                    plan.config, parallel=parallel, gradient_checkpointing=checkpointing, accumulation=accumulation
                )
                other = estimate(config, plan.gpu, plan.num_gpus, mfu=plan.mfu, vocab_size=plan.vocab_size, known=known)
                if other.fits:
                    yield other
                    break


def _memory(config: RunConfig, model: Any, saved: Saved, micro_batch: int, num_gpus: int, vocab_size: int) -> Memory:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    depth = config.model.num_layers
    layer = sum(parameter.numel() for parameter in blocks(model)[0].parameters())
    tokens = micro_batch * config.data.seq_len
    moments = float(
        sum(
            (8 if isinstance(one, torch.optim.AdamW) else 4) * parameter.numel()
            for one in make_optimizer(model, config)[0].optimizers
            for group in one.param_groups
            for parameter in group["params"]
        )
    )
    weights = gradients = 4.0 * num_parameters
    if config.parallel == "fsdp":
        outside = num_parameters - depth * layer
        weights = weights / num_gpus + 4.0 * (min(_WHOLE_LAYERS, depth) * layer + outside)
        # While micro-batches accumulate, each GPU keeps the gradients of all parameters.
        gradients = gradients if config.accumulation > 1 else gradients / num_gpus + 4.0 * (2 * layer + outside)
        moments /= num_gpus
    activations = saved.total
    if config.gradient_checkpointing:
        activations = saved.streams + saved.block + saved.rest
    logits = (6 if config.precision == "bf16" else 4) * tokens * vocab_size
    return Memory(weights, gradients, moments, activations, logits)


def _with_depth(config: RunConfig, depth: int) -> RunConfig:
    options = dict(config.model.options)
    # Options with an entry for each layer or sub-layer; those of the first layers.
    for name, entries in (("layers", depth), ("alphas", 2 * depth)):
        if depth < config.model.num_layers and isinstance(options.get(name), (list, tuple)):
            options[name] = options[name][:entries]
    return dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=depth, options=options))


def _layers_alike(config: RunConfig) -> bool:
    placement = create(config.model.placement or "geonorm", **config.model.options)
    return placement.single_stream and placement.at(1, config.model.num_layers) is placement


def _on_meta(config: RunConfig, vocab_size: int, depth: int) -> nn.Module:
    if config.model.start is not None:
        raise UserError("`model.start` names a saved model; give its shape under `model` to estimate the run")
    with torch.device("meta"):
        return shaped_model(_with_depth(config, depth), vocab_size)
