"""``geonorm plan``."""

import dataclasses
from typing import Annotated

import tyro

from geonorm.cli.option_types import Recipes, arg
from geonorm.console import results_are_printed


@dataclasses.dataclass(frozen=True)
class Plan:
    """Estimate what a recipe takes: parameters, tokens, operations, memory of a GPU, hours."""

    words: Annotated[tuple[str, ...], tyro.conf.Positional, arg("[RECIPE|KEY=VALUE ...]")] = ()
    """YAML recipes, later ones win, and values to change, such as data.seq_len=2048"""
    config: Recipes = ()
    """The same as a recipe among the words, as for train"""
    gpu: str = "h100"
    """Kind of GPU, such as h100 or a100"""
    num_gpus: int = 1
    """How many of them"""
    mfu: float = 0.4
    """Share of their peak to assume"""

    def run(self) -> int:
        """See :class:`Command`."""
        from geonorm.estimation.describe import plan_recipe

        results_are_printed()
        return plan_recipe(self.config, self.words, self.gpu, self.num_gpus, self.mfu)
