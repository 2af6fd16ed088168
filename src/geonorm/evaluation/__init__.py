"""What a model is worth: tasks of lm-eval, perplexity and bits per byte on text, and a look at what it writes.

Names are imported when first asked for, so that the options of the commands are read without the libraries of models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geonorm.evaluation.generation import GenerationSettings, generate
    from geonorm.evaluation.tasks import evaluate_tasks
    from geonorm.evaluation.text import Perplexity, perplexity

__all__ = ["GenerationSettings", "Perplexity", "evaluate_tasks", "generate", "perplexity"]

_HOME = {
    "GenerationSettings": "generation",
    "Perplexity": "text",
    "evaluate_tasks": "tasks",
    "generate": "generation",
    "perplexity": "text",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for from its module."""
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
