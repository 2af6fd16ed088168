"""``geonorm report``."""

import dataclasses
from pathlib import Path

import tyro

from geonorm import signals


@dataclasses.dataclass(frozen=True)
class Report:
    """Write the report of a finished comparison again."""

    out: tyro.conf.Positional[Path]
    """Folder of the comparison"""

    def run(self) -> int:
        """See :class:`Command`."""
        from geonorm.report import write_report

        signals.begin()
        print(f"report: {write_report(self.out)}")
        return 0
