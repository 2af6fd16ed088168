"""Configurations of runs in short words."""

from __future__ import annotations

from geonorm.training import RunConfig, recipe

_KEYS = {
    "batch": "global_batch_size",
    "length": "data.seq_len",
    "lr": "optimizer.lr",
    "betas": "optimizer.betas",
    "weight_decay": "optimizer.weight_decay",
    "clip": "optimizer.clip",
    "warmup": "schedule.warmup",
    "min_lr_ratio": "schedule.min_lr_ratio",
    "log_every": "evaluation.log_every",
    "eval_every": "evaluation.every",
    "eval_windows": "evaluation.windows",
    "layers_every": "evaluation.layers_every",
}


def run_config(base: RunConfig | None = None, **changes) -> RunConfig:
    """A configuration with changes, such as ``lr=1e-3``; dotted keys come in a dict, ``**{"model.family": "gpt2"}``."""
    data = recipe.resolved(base or RunConfig())
    for name, value in changes.items():
        data = recipe.merged(data, recipe.nested(_KEYS.get(name, name), value))
    return recipe.build(RunConfig, data)
