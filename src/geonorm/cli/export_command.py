"""``geonorm export``."""

import dataclasses
from pathlib import Path

import tyro

from geonorm import signals


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a run's model and tokenizer as a Hugging Face folder."""

    folder: tyro.conf.Positional[Path]
    """Folder of the run"""
    out: Path
    """Folder to write"""
    step: int | None = None
    """Checkpoint to take; the newest good one if left out"""

    def run(self) -> int:
        """See :class:`Command`."""
        from geonorm.training.export import export

        signals.begin()
        export(self.folder, self.out, step=self.step, say=print)
        return 0
