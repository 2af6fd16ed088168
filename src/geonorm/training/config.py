"""Configuration of one training run: what a recipe can say. Imports nothing heavy, so that help appears soon."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from geonorm.errors import UserError, check_unicode, plain
from geonorm.ranges import FACTOR, POSITIVE, SEED, Count, Number, check_ranges

Tracker = Literal["tensorboard", "trackio", "wandb"]
_SHARE = Number(0, 1, above=True)
_BELOW_ONE = Number(0, 1, below=True)


class _Section:
    """A part of the configuration, whose values are checked when it is made."""

    def __post_init__(self) -> None:
        check_ranges(self, f"{type(self).__name__.removesuffix('Config').lower()}.")


@dataclasses.dataclass(frozen=True)
class ModelConfig(_Section):
    """The model: a family and a shape, or a folder to start from.

    Attributes:
        start: folder with a saved model of a supported family; its weights and shape are where training starts, and
            the shape below is not used. A stock model is rewired to ``placement``.
        family: family of a model built from its shape.
        hidden_size: width of the stream; num_layers: of an attention and an MLP each; num_heads: of the attention.
        num_kv_heads: heads of keys and values; None for as many as ``num_heads``.
        intermediate_size: inner width of the MLP; None for 8/3 of ``hidden_size`` rounded up to a multiple of 8.
        tie_embeddings: one matrix for embedding and head.
        placement: name of the placement; None for geonorm, or what the model in ``start`` has.
        options: of the placement, see ``geonorm placements``.
    """

    start: Path | None = None
    family: str = "llama"
    hidden_size: Annotated[int, Count()] = 128
    num_layers: Annotated[int, Count(1, 10_000)] = 8
    num_heads: Annotated[int, Count()] = 4
    num_kv_heads: Annotated[int | None, Count()] = None
    intermediate_size: Annotated[int | None, Count()] = None
    tie_embeddings: bool = False
    placement: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {key: plain(f"model.options.{key}", value) for key, value in self.options.items()}
        object.__setattr__(self, "options", given)


@dataclasses.dataclass(frozen=True)
class DataConfig(_Section):
    """The text: sources to prepare, or a corpus that was prepared before.

    Attributes:
        sources: what ``geonorm prepare`` takes: files, folders, patterns, ``hf://`` datasets; or one prepared folder.
            None for text that is on every machine.
        corpus: folder of a prepared corpus; excludes ``sources``.
        vocab_size: size of the tokenizer trained on ``sources``.
        val_fraction, test_fraction, min_documents, max_share, group_by, dedup: how text is held out, see
            `geonorm.data.prepare`.
        text_column: column of JSON and Parquet files that holds the text.
        seq_len: tokens a window.
    """

    sources: tuple[str, ...] = ()
    corpus: Path | None = None
    vocab_size: Annotated[int, Count()] = 2048
    val_fraction: Annotated[float, _SHARE] = 0.05
    test_fraction: Annotated[float, _SHARE] = 0.05
    min_documents: Annotated[int, Count()] = 8
    max_share: Annotated[float, _SHARE] = 0.25
    group_by: str | None = None
    dedup: Literal["exact", "near"] | None = None
    text_column: str = "text"
    seq_len: Annotated[int, Count()] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sources and self.corpus is not None:
            raise UserError("`data.sources` and `data.corpus` are both given; keep one")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(_Section):
    """The optimiser.

    Attributes:
        name: ``"adamw"``, or ``"muon"`` for Muon on the matrices of the blocks and AdamW on everything else.
        lr: peak learning rate. Muon's update is brought to the RMS of AdamW's, so that one rate serves both.
        betas, eps: AdamW's; momentum: Muon's.
        weight_decay: of matrices; gains, biases and step sizes are not decayed.
        clip: upper limit of the gradient norm.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: Annotated[float, FACTOR] = 4e-3
    betas: Annotated[tuple[float, float], _BELOW_ONE] = (0.9, 0.95)
    eps: Annotated[float, FACTOR] = 1e-8
    momentum: Annotated[float, _BELOW_ONE] = 0.95
    weight_decay: Annotated[float, Number(0, 1e6)] = 0.1
    clip: Annotated[float, POSITIVE] = 1.0


@dataclasses.dataclass(frozen=True)
class ScheduleConfig(_Section):
    """The learning rate over the run.

    Attributes:
        name: ``"cosine"``, or ``"wsd"``: warm-up, stable at the peak, then a linear decay.
        warmup: steps of linear warm-up; None for a tenth of the steps.
        decay: last steps over which ``"wsd"`` decays; None for a fifth of the steps.
        min_lr_ratio: the run ends at this part of the peak.
    """

    name: Literal["cosine", "wsd"] = "cosine"
    warmup: Annotated[int | None, Count(0)] = None
    decay: Annotated[int | None, Count(0)] = None
    min_lr_ratio: Annotated[float, Number(0, 1)] = 0.1


@dataclasses.dataclass(frozen=True)
class EvaluationConfig(_Section):
    """Evaluation, measurements and lines of loss; counts are optimiser steps.

    Attributes:
        every: steps between evaluations; the last step is always evaluated.
        windows: number of fixed validation windows.
        layers_every: steps between measurements of every layer.
        log_every: steps between rows of training loss.
    """

    every: Annotated[int, Count()] = 100
    windows: Annotated[int, Count()] = 256
    layers_every: Annotated[int, Count()] = 100
    log_every: Annotated[int, Count()] = 10


@dataclasses.dataclass(frozen=True)
class SamplingConfig(_Section):
    """Text drawn from the model while it trains.

    Attributes:
        every: steps between samples; 0 for none.
        prompts: what the model continues.
        tokens: new tokens a prompt.
        temperature: of the draws; 0 takes the likeliest token.
    """

    every: Annotated[int, Count(0)] = 0
    prompts: tuple[str, ...] = ("The ",)
    tokens: Annotated[int, Count()] = 64
    temperature: Annotated[float, Number(0, 1e6)] = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every and not (self.prompts and all(self.prompts)):
            raise UserError("`sampling.prompts` is empty or holds an empty prompt; give at least one character each")
        for prompt in self.prompts:
            check_unicode("sampling.prompts", prompt)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(_Section):
    """Checkpoints; counts are optimiser steps.

    Attributes:
        every: steps between checkpoints; the last step is always saved.
        keep_last: newest checkpoints that stay.
        keep_every: a checkpoint whose step is a multiple of it stays too; 0 for none.
        background: write while training goes on; costs memory for one copy of the state. None: on a GPU only.
    """

    every: Annotated[int, Count()] = 100
    keep_last: Annotated[int, Count()] = 2
    keep_every: Annotated[int, Count(0)] = 0
    background: bool | None = None


@dataclasses.dataclass(frozen=True)
class TrackingConfig(_Section):
    """Where metrics go besides ``metrics.jsonl``.

    Attributes:
        trackers: any of ``"tensorboard"``, ``"trackio"``, ``"wandb"``.
        project: name of the project at trackio or wandb; name: of the run there; None for the folder's name.
    """

    trackers: tuple[Tracker, ...] = ()
    project: str = "geonorm"
    name: str | None = None


@dataclasses.dataclass(frozen=True)
class FaultsConfig(_Section):
    """What happens when a step goes wrong.

    Attributes:
        max_skipped: so many steps in a row with a loss or gradient that is not finite end the run.
        spike_deviations: a loss counts as a spike if it lies so many standard deviations above the mean of up to
            1,000 losses before it.
    """

    max_skipped: Annotated[int, Count()] = 10
    spike_deviations: Annotated[float, POSITIVE] = 7.0


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One training run.

    Attributes:
        model, data, optimizer, schedule, evaluation, sampling, checkpoint, tracking, faults: see each.
        steps: optimiser steps of the whole run.
        global_batch_size: windows in one optimiser step, over all ranks.
        accumulation: micro-batches that each rank splits its share of a step into.
        precision: ``"fp32"``, or ``"bf16"`` for bfloat16 autocast with float32 weights.
        compile: compile the model; the first step then takes longer.
        gradient_checkpointing: recompute each block in the backward pass instead of keeping what it needs.
        parallel: over the ranks that torchrun started: ``"ddp"`` keeps the model whole on each, ``"fsdp"`` cuts it up.
        device: ``"auto"`` takes a GPU if there is one.
        peak_flops: the device's peak, FLOP/s in ``precision``, for the share of it that is used; 0 for not asked, -1 to
            measure it with a large matrix product.
        seed: of the weights and of the order of the windows.
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sampling: SamplingConfig = SamplingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    faults: FaultsConfig = FaultsConfig()
    steps: Annotated[int, Count()] = 500
    global_batch_size: Annotated[int, Count()] = 16
    accumulation: Annotated[int, Count()] = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    gradient_checkpointing: bool = False
    parallel: Literal["none", "ddp", "fsdp"] = "none"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    peak_flops: Annotated[float, Number(-1, 1e30)] = 0.0
    seed: Annotated[int, SEED] = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        if -1 < self.peak_flops < 0:
            raise UserError(f"`peak_flops` must be a number of FLOP/s, 0 or -1, got {self.peak_flops}")
        if self.global_batch_size % self.accumulation:
            raise UserError(
                f"`global_batch_size` {self.global_batch_size} is not a multiple of `accumulation` {self.accumulation}"
            )
        if self.warmup_steps >= self.steps:
            raise UserError(f"`schedule.warmup` must be shorter than `steps`, got {self.warmup_steps} and {self.steps}")
        if self.warmup_steps + self.decay_steps > self.steps:
            raise UserError(
                f"`schedule.warmup` {self.warmup_steps} and `schedule.decay` {self.decay_steps} together are longer "
                f"than `steps` {self.steps}"
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimiser step, over all ranks."""
        return self.global_batch_size * self.data.seq_len

    def filled(self) -> RunConfig:
        """Return it with the lengths of warm-up and decay spelled out, so that they stay if ``steps`` changes."""
        schedule = dataclasses.replace(self.schedule, warmup=self.warmup_steps, decay=self.decay_steps)
        return dataclasses.replace(self, schedule=schedule)

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up."""
        return self.steps // 10 if self.schedule.warmup is None else self.schedule.warmup

    @property
    def decay_steps(self) -> int:
        """Steps of decay at the end of ``"wsd"``; 0 for a cosine."""
        if self.schedule.name != "wsd":
            return 0
        return self.steps // 5 if self.schedule.decay is None else self.schedule.decay
