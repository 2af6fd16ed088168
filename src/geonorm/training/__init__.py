"""Training one model under controlled conditions."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geonorm.training.config import RunConfig
    from geonorm.training.evaluation import Evaluation, evaluate
    from geonorm.training.loop import Outcome, train
    from geonorm.training.metrics import MetricsFile
    from geonorm.training.optimizer import make_optimizer, parameter_groups
    from geonorm.training.schedule import lr_factor
    from geonorm.training.settings import TrainSettings

# Imported when first named, so that the command line can show its help without loading the models.
_HOMES = {
    "Evaluation": "evaluation",
    "MetricsFile": "metrics",
    "Outcome": "loop",
    "RunConfig": "config",
    "TrainSettings": "settings",
    "evaluate": "evaluation",
    "lr_factor": "schedule",
    "make_optimizer": "optimizer",
    "parameter_groups": "optimizer",
    "train": "loop",
}

__all__ = [
    "Evaluation",
    "MetricsFile",
    "Outcome",
    "RunConfig",
    "TrainSettings",
    "evaluate",
    "lr_factor",
    "make_optimizer",
    "parameter_groups",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a name from its module when it is first used."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"geonorm.training.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'geonorm.training' has no attribute {name!r}")
