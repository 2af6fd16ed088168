"""What the command line calls data: any mix of files, folders, patterns and Hub datasets as one source."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path

from geonorm.data.embedded import EmbeddedSource
from geonorm.data.hub import HubSource, is_hub
from geonorm.data.sources import FileSource, Source
from geonorm.data.turns import ChatTemplate
from geonorm.errors import UserError


class JoinedSource:
    """Several sources one after another."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts = parts
        self.folder: Path | None = None

    @property
    def names(self) -> list[str]:
        """Names of all parts."""
        return [name for part in self.parts for name in part.names]

    def fingerprint(self) -> str:
        """Digest of the fingerprints."""
        return hashlib.sha256("\n".join(part.fingerprint() for part in self.parts).encode()).hexdigest()

    def documents(self, skipped: Counter[str]) -> Generator[str, None, None]:
        """Yield the documents of each part in turn."""
        for number, part in enumerate(self.parts):
            part.folder = None if self.folder is None else self.folder / str(number)
            yield from part.documents(skipped)

    def check_unchanged(self) -> None:
        """Check each part."""
        for part in self.parts:
            part.check_unchanged()

    def notes(self) -> list[str]:
        """Notes of all parts."""
        return [note for part in self.parts for note in part.notes()]


def open_sources(
    paths: Sequence[str | os.PathLike[str]] | None,
    text_column: str = "text",
    skip_unreadable: bool = False,
    group_by: str | None = None,
    chat: ChatTemplate | None = None,
) -> Source:
    """Make one source of what a user named: files first, then Hub datasets in the order given.

    Args:
        paths: what `FileSource` takes and names that `HubSource` takes; None for the embedded corpus.
        text_column: the column that holds the text, for files and for datasets that name no other.
        skip_unreadable, group_by, chat: see `FileSource`.

    Raises:
        UserError: something that cannot be found or understood.
    """
    if paths is None:
        if group_by is not None:
            raise UserError(
                "`group_by` names a column; the embedded corpus is grouped by package already, leave it out"
            )
        return EmbeddedSource()
    hub: list[Source] = [HubSource(path, text_column, group_by, chat) for path in paths if is_hub(path)]
    files = [path for path in paths if not is_hub(path)]
    if files or not hub:
        hub.insert(0, FileSource(files, text_column, skip_unreadable, group_by, chat))
    return hub[0] if len(hub) == 1 else JoinedSource(hub)
