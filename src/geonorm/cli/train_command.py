"""``geonorm train``."""

import dataclasses
from pathlib import Path
from typing import Annotated

from geonorm.cli.option_types import FROM_RECIPE, Data, Overrides, Recipes, arg
from geonorm.cli.text import data_overrides
from geonorm.console import results_are_printed


@dataclasses.dataclass(frozen=True)
class Train:
    """Train one model: a recipe, resumable, on one or many GPUs."""

    overrides: Overrides = ()
    """Values of the recipe to change, such as optimizer.lr=1e-3; --show lists all of them"""
    config: Recipes = ()
    """YAML recipe; given more than once, later ones win"""
    data: Data = ()
    """In place of the recipe's text: a folder made by geonorm prepare, or what that command takes"""
    out: Path = Path("runs/train")
    """Folder for checkpoints, metrics and result"""
    resume: bool = False
    """Go on with what the folder holds; starts anew where it holds nothing"""
    overwrite: bool = False
    """Replace the run that the folder holds; files that it did not write stay"""
    parallel: Annotated[str | None, arg("ddp|fsdp", FROM_RECIPE)] = None
    """Over the ranks that torchrun started; short for parallel=..."""
    show: bool = False
    """Print the resolved recipe and stop"""

    def run(self) -> int:
        """See :class:`Command`."""
        from geonorm.training.folder import read_config
        from geonorm.training.recipe import dump

        words = [*self.overrides, *([f"parallel={self.parallel}"] if self.parallel else [])]
        words += data_overrides(self.data, words)
        resolved = read_config(self.out, self.config, words, resume=self.resume)
        if self.show:
            results_are_printed()
            print(dump(resolved), end="")
            return 0
        from geonorm.training.run import run

        return run(resolved, self.out, resume=self.resume, overwrite=self.overwrite)
