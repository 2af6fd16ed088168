"""Types of options that several commands have.

The modules of this room import neither torch's neighbours nor the data libraries before a command runs, so that help
appears soon.
"""

from pathlib import Path
from typing import Annotated, Protocol

import tyro

FROM_RECIPE = "as the recipe says"


def arg(metavar: str, default: str = "") -> object:
    """How help shows an option's value, and its default in words."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


Model = Annotated[str, tyro.conf.Positional, arg("MODEL")]
Paths = Annotated[tuple[Path, ...], arg("PATH [PATH ...]")]
Dtype = Annotated[str | None, arg("NAME", "as saved")]
Overrides = Annotated[tuple[str, ...], tyro.conf.Positional, arg("[KEY=VALUE ...]")]
Recipes = Annotated[tuple[Path, ...], tyro.conf.UseAppendAction]
Data = Annotated[tuple[str, ...], arg("SOURCE [SOURCE ...]", FROM_RECIPE)]


class Command(Protocol):
    """A command: a frozen dataclass whose fields are its options and whose docstring is its help."""

    def run(self) -> int:
        """Do it; returns the exit code. Ranges of the options are checked before."""
        ...
