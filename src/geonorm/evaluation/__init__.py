"""What a model is worth: tasks of lm-eval, perplexity and bits per byte on text, and a look at what it writes.

Names are imported when first asked for, so that the options of the commands are read without the libraries of models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from geonorm.lazy import names_from

if TYPE_CHECKING:
    from geonorm.evaluation.generation import GenerationSettings, generate
    from geonorm.evaluation.tasks import evaluate_tasks
    from geonorm.evaluation.text import Perplexity, perplexity

__all__ = ["GenerationSettings", "Perplexity", "evaluate_tasks", "generate", "perplexity"]

_HOMES = {
    "GenerationSettings": "generation",
    "Perplexity": "text",
    "evaluate_tasks": "tasks",
    "generate": "generation",
    "perplexity": "text",
}

__getattr__ = names_from(__name__, _HOMES)
