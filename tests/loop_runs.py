"""Runs of the training loop in this process, each a few steps of a tiny model."""

from __future__ import annotations

from geonorm.data import Windows
from geonorm.placements import create
from geonorm.training import (
    RunConfig,
    train,
)
from geonorm.training.setup import shaped_model
from run_configs import run_config

SHAPE = {"model.hidden_size": 16, "model.num_layers": 2, "model.num_heads": 2}
SETTINGS = run_config(
    steps=12, batch=4, length=16, warmup=3, log_every=1, eval_every=4, eval_windows=6, layers_every=5, **SHAPE
)


def make_trial(placement: str = "geonorm", **changes) -> RunConfig:
    options = changes.pop("options", {})
    chosen = {"model.placement": placement, "model.options": create(placement, **options).options()}
    return run_config(SETTINGS, **chosen, **changes)


def build_model(trial: RunConfig):
    return shaped_model(trial, 257)


def run(corpus, trial: RunConfig, model=None):
    model = model or build_model(trial)
    rows: list[dict] = []
    length, seed = trial.data.seq_len, trial.seed
    outcome = train(
        model,
        Windows(corpus.train, length=length, seed=seed),
        corpus.held_out("val", length, trial.evaluation.windows).ids,
        corpus.token_bytes,
        trial,
        rows.append,
    )
    return outcome, rows, model
