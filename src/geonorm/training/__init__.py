"""Training one model under controlled conditions."""

from typing import TYPE_CHECKING

from geonorm.lazy import names_from

if TYPE_CHECKING:
    from geonorm.training.config import RunConfig
    from geonorm.training.loop import train
    from geonorm.training.metrics import MetricsFile
    from geonorm.training.optimizer import lr_factor, make_optimizer, parameter_groups
    from geonorm.training.outcome import Outcome
    from geonorm.training.result import RunResult
    from geonorm.training.validation import Evaluation, evaluate

# Imported when first named, so that the command line can show its help without loading the models.
_HOMES = {
    "Evaluation": "validation",
    "MetricsFile": "metrics",
    "Outcome": "outcome",
    "RunConfig": "config",
    "RunResult": "result",
    "evaluate": "validation",
    "lr_factor": "optimizer",
    "make_optimizer": "optimizer",
    "parameter_groups": "optimizer",
    "train": "loop",
}

__all__ = [
    "Evaluation",
    "MetricsFile",
    "Outcome",
    "RunConfig",
    "RunResult",
    "evaluate",
    "lr_factor",
    "make_optimizer",
    "parameter_groups",
    "train",
]

__getattr__ = names_from(__name__, _HOMES)
