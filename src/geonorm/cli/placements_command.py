"""``geonorm placements``."""

import dataclasses
import inspect

from geonorm.console import results_are_printed


@dataclasses.dataclass(frozen=True)
class Placements:
    """List the placements with their options and defaults."""

    def run(self) -> int:
        """See :class:`Command`."""
        from geonorm.placements import REGISTRY

        results_are_printed()
        for name, kind in REGISTRY.items():
            options = ", ".join(f"{field.name}={field.default}" for field in dataclasses.fields(kind)) or "no options"
            summary = (inspect.getdoc(kind) or "").split("\n")[0].replace("``", "")
            print(f"{name}: {summary}\n    {options}")
        return 0
