"""A trial: one model, one placement, one learning rate, one seed."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from geonorm.models import ModelShape
from geonorm.placements import Placement, create
from geonorm.training import TrainSettings

RESULT = "result.json"
SPEC = "trial.json"
METRICS = "metrics.jsonl"
TEST_WINDOWS = "test_windows.json"
LOG = "log.txt"


@dataclasses.dataclass(frozen=True)
class Trial:
    """Everything that decides a trial's result.

    Attributes:
        placement: name; options: every option, in full.
        shape: of the model.
        training: settings, with the trial's learning rate and seed.
        vocab_size: of the corpus' tokenizer; corpus: fingerprint of the corpus.
    """

    placement: str
    options: dict[str, Any]
    shape: ModelShape
    training: TrainSettings
    vocab_size: int
    corpus: str

    def build_placement(self) -> Placement:
        """Return the placement with its options."""
        return create(self.placement, **self.options)

    @property
    def label(self) -> str:
        """Name of the placement with its unusual options, the same for every learning rate and seed."""
        return self.build_placement().label()

    @property
    def id(self) -> str:
        """Name of the trial's folder."""
        plain = re.sub(r"[^A-Za-z0-9.=_]+", "-", self.label).strip("-")
        return f"{plain}-lr{self.training.lr!r}-seed{self.training.seed}"

    def result(self, status: str, message: str, **measured: Any) -> dict[str, Any]:
        """Return a result of this trial; what was not measured is None, or 0 for counts."""
        return {
            "id": self.id,
            "label": self.label,
            "placement": self.placement,
            "options": self.build_placement().changed_options(),
            "seed": self.training.seed,
            "lr": self.training.lr,
            "val_loss": None,
            "val_bits_per_byte": None,
            "test_loss": None,
            "test_bits_per_byte": None,
            "train_loss": None,
            "num_parameters": None,
            "tokens": 0,
            "seconds": 0.0,
            "status": status,
            "message": message,
            "skipped_steps": 0,
            "tokens_per_second": None,
            "peak_memory_bytes": None,
            "code": None,
            "step": None,
            **measured,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data; :meth:`from_json` gives the trial back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trial:
        """Rebuild a trial from :meth:`to_json`."""
        training = {**data["training"], "betas": tuple(data["training"]["betas"])}
        return cls(**{**data, "shape": ModelShape(**data["shape"]), "training": TrainSettings(**training)})


def folder_holds_another(folder: Path, trial: Trial) -> bool:
    """True if the folder holds a finished result of a trial that is not exactly this one."""
    return (folder / RESULT).exists() and (folder / SPEC).exists() and _spec(folder) != _plain(trial)


def read_result(folder: Path, trial: Trial) -> dict[str, Any] | None:
    """Return a finished trial's result if the folder holds one of exactly this trial, else None."""
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    finished = isinstance(result, dict) and result.get("status") in ("ok", "diverged", "unlearned")
    return result if finished and _spec(folder) == _plain(trial) else None


def _spec(folder: Path) -> Any:
    try:
        return json.loads((folder / SPEC).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None


def _plain(trial: Trial) -> Any:
    return json.loads(json.dumps(trial.to_json()))
