"""Where should a Transformer normalise? GeoNorm and the placements it is measured against.

``import geonorm`` needs torch alone: the step on the sphere and the placements. Models, data, training and the command
line live in subpackages with extras of their own, imported when first named.
"""

import importlib
from types import ModuleType

from geonorm.signals import is_command, leave_while_importing

if is_command():
    # Before torch, whose import takes seconds.
    leave_while_importing()

from geonorm import geometry, placements, schedules
from geonorm.errors import UserError
from geonorm.import_hook import find_models_on_demand
from geonorm.ops import sphere_step

__version__ = "0.1.0"
__all__ = ["UserError", "__version__", "geometry", "placements", "schedules", "sphere_step"]

_LATER = ("conversion", "data", "evaluation", "experiments", "inspection", "models", "report", "training")

# So that AutoModelForCausalLM.from_pretrained loads a rewired model; transformers itself is not imported by this.
find_models_on_demand()


def __getattr__(name: str) -> ModuleType:
    """Import a subpackage when it is first named, as in ``geonorm.models.rewire``."""
    if name in _LATER:
        return importlib.import_module(f"geonorm.{name}")
    raise AttributeError(f"module 'geonorm' has no attribute {name!r}")
