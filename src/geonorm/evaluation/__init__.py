"""How good a model is: tasks of lm-eval, perplexity and bits per byte on text, and text that it generates."""

from geonorm.evaluation.generation import GenerationSettings, generate
from geonorm.evaluation.score_text import Perplexity, perplexity
from geonorm.evaluation.tasks import evaluate_tasks

__all__ = ["GenerationSettings", "Perplexity", "evaluate_tasks", "generate", "perplexity"]
