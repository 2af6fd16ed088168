"""Training one model under controlled conditions."""

from geonorm.training.evaluate import Evaluation, evaluate
from geonorm.training.loop import Outcome, train
from geonorm.training.metrics import MetricsFile
from geonorm.training.optimizer import lr_factor, make_optimizer, parameter_groups
from geonorm.training.settings import TrainSettings

__all__ = [
    "Evaluation",
    "MetricsFile",
    "Outcome",
    "TrainSettings",
    "evaluate",
    "lr_factor",
    "make_optimizer",
    "parameter_groups",
    "train",
]
