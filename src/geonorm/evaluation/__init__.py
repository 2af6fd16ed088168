"""What a model is worth: tasks of lm-eval, perplexity and bits per byte on text, and a look at what it writes."""

from geonorm.evaluation.generate import GenerationSettings, generate
from geonorm.evaluation.perplexity import Perplexity, perplexity
from geonorm.evaluation.tasks import evaluate_tasks

__all__ = ["GenerationSettings", "Perplexity", "evaluate_tasks", "generate", "perplexity"]
