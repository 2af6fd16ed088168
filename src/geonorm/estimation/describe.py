"""The estimate of a run in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from geonorm.data import Corpus
from geonorm.estimation.estimate import RESERVE, Estimate, estimate, that_fit
from geonorm.estimation.gpus import gpu
from geonorm.training.recipe import load

_CHANGED = ("parallel", "gradient_checkpointing", "accumulation")


def plan_recipe(files: Sequence[Path], words: Sequence[str], gpu_name: str, num_gpus: int, mfu: float) -> int:
    """Print the estimate of a recipe; ``words`` are further recipes, and overrides wherever there is a ``=``.

    Returns:
        0 if it fits the GPUs, 1 if not.

    Raises:
        UserError: the recipe cannot be read, or does not fit the number of GPUs.
    """
    recipes = [*files, *(Path(word) for word in words if "=" not in word)]
    config = load(recipes, [word for word in words if "=" in word])
    folder = config.data.corpus
    # A corpus that is not there yet is no reason not to plan.
    vocab_size = Corpus.load(folder).vocab_size if folder is not None and folder.exists() else None
    plan = estimate(config, gpu(gpu_name), num_gpus, mfu=mfu, vocab_size=vocab_size)
    print("\n".join(lines(plan, [] if plan.fits else list(that_fit(plan)))))
    return 0 if plan.fits else 1


def lines(plan: Estimate, others: list[Estimate]) -> list[str]:
    """The estimate, a line a quantity.

    Args:
        plan: of the recipe as it is.
        others: changes that would fit, where it does not.
    """
    config, memory = plan.config, plan.memory
    chosen = config.model
    parts = ", ".join(f"{name} {_gb(value)}" for name, value in dataclasses.asdict(memory).items())
    saving = "blocks recomputed" if config.gradient_checkpointing else "blocks kept"
    verdict = "fits" if plan.fits else "does NOT fit"
    found = [
        f"model       {plan.num_parameters:,} parameters: {chosen.num_layers} layers, width {chosen.hidden_size}, "
        f"{chosen.num_heads} heads, vocabulary {plan.vocab_size:,}",
        f"placement   {chosen.placement or 'geonorm'}{_options(chosen.options)}",
        f"training    {plan.num_tokens:.3g} tokens: {config.steps:,} steps of {config.global_batch_size} windows of "
        f"{config.data.seq_len} ({plan.num_tokens / plan.num_parameters:.1f} tokens a parameter)",
        f"operations  {plan.flops:.3g} FLOPs: 6 N + 12 L d T a token"
        + (f"; {plan.executed:.3g} with recomputation" if plan.executed > plan.flops else ""),
        f"memory      {_gb(memory.total)} of {_gb(plan.gpu.memory)} on each GPU: {parts}",
        f"            {config.parallel}, {config.precision}, {saving}, micro-batches of {plan.micro_batch} windows",
        f"            {verdict}, with {RESERVE:.0%} left for what is not counted",
        f"time        {plan.gpu_hours:.3g} GPU-hours, {plan.hours:.3g} hours on {plan.num_gpus} x {plan.gpu.name}, "
        f"assuming {plan.mfu:.0%} of its peak of {plan.gpu.peak(config.precision) / 1e12:g} TFLOP/s",
    ]
    for other in others:
        changed = [
            f"{name}={str(getattr(other.config, name)).lower()}"
            for name in _CHANGED
            if getattr(other.config, name) != getattr(config, name)
        ]
        found.append(f"fits with   {' '.join(changed)} ({_gb(other.memory.total)}, {other.gpu_hours:.3g} GPU-hours)")
    if not plan.fits and not others:
        found.append("fits with   nothing that leaves the result as it is; take more or larger GPUs")
    return found


def _options(options: dict) -> str:
    return f" ({', '.join(f'{name}={value}' for name, value in options.items())})" if options else ""


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
