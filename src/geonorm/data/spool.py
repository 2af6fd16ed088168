"""What a stream gave so far, kept on disk: compressed parts, each with the place at which to go on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from geonorm.data.document import Document
from geonorm.storage import write_json

PART_CHARACTERS = 8_000_000


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a spool.

    Attributes:
        texts: documents.
        num_rows: rows of the stream read up to the end of this part.
        skipped: rows left out within this part, by reason.
        state: where the stream goes on after this part; JSON-able.
        ended: the stream has nothing after this part.
    """

    texts: list[str]
    num_rows: int
    skipped: dict[str, int]
    state: dict[str, Any] | None
    ended: bool


class Spool:
    """Parts in a folder, numbered from 0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def parts(self) -> Iterator[Part]:
        """Yield the parts in order up to the first that is missing or damaged."""
        number = 0
        while (part := self._read(number)) is not None:
            yield part
            number += 1

    def write(self, number: int, part: Part) -> None:
        """Keep a part; it is there once its JSON file is."""
        import zstandard

        lines = "\n".join(
            json.dumps(text.__getnewargs__() if isinstance(text, Document) else text) for text in part.texts
        )
        data = zstandard.ZstdCompressor(level=3).compress(lines.encode("utf-8"))
        beside = self._path(number, "json")
        beside.unlink(missing_ok=True)
        with self._path(number, "zst").open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        facts = {**dataclasses.asdict(part), "sha256": hashlib.sha256(data).hexdigest()}
        del facts["texts"]
        write_json(beside, facts)

    def _read(self, number: int) -> Part | None:
        import zstandard

        try:
            facts = json.loads(self._path(number, "json").read_text(encoding="utf-8"))
            data = self._path(number, "zst").read_bytes()
            if hashlib.sha256(data).hexdigest() != facts.pop("sha256"):
                return None
            lines = zstandard.ZstdDecompressor().decompress(data).decode("utf-8")
            return Part(texts=[_text(json.loads(line)) for line in lines.split("\n") if line], **facts)
        except (OSError, ValueError, KeyError, TypeError, zstandard.ZstdError):
            return None

    def _path(self, number: int, suffix: str) -> Path:
        return self.folder / f"{number:06d}.{suffix}"


def _text(found: str | list[Any]) -> str:
    return found if isinstance(found, str) else Document(*found)
