"""Datasets of the Hugging Face Hub, streamed through `datasets` and kept on disk while a corpus is being made."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from geonorm.data import raw
from geonorm.data.given_tokenizer import ChatTemplate
from geonorm.data.records import Columns, Document
from geonorm.data.sources import Source
from geonorm.errors import UserError, check_unicode, first_line

PREFIX = "hf://"
# Of text in one file of what was read; after an interruption the stream goes on behind the last of them.
KEPT_CHARACTERS = 8_000_000
_JSON_FILE = re.compile(r"[^:]*(://)?[^:]*\.(json|jsonl|ndjson)(\.gz|\.xz|\.zst)?", re.IGNORECASE)
_SPEC = re.compile(r"(?P<name>[^:@#]+)(?::(?P<config>[^:@#]+))?(?:@(?P<split>[^:@#]+))?(?:#(?P<column>[^#]+))?")


def is_hub(given: str | os.PathLike[str]) -> bool:
    """Whether a source names a dataset and not a file; a Path has made ``hf:/`` of ``hf://``."""
    return bool(re.match("hf:/", os.fspath(given)))


class HubSource(Source):
    """Documents of one dataset, ``hf://OWNER/NAME[:CONFIG][@SPLIT][#COLUMN]``.

    In place of ``OWNER/NAME`` an absolute folder may stand, a copy of such a dataset on this machine. The dataset
    is streamed, never downloaded as a whole, and no code of it is run. Each row is read from the network once: what
    was read lies compressed in `folder`, and an interrupted stream goes on behind it. So every pass gives what the
    first one kept, and `check_unchanged` checks nothing.
    """

    def __init__(
        self,
        given: str | os.PathLike[str],
        text_column: str = "text",
        group_by: str | None = None,
        chat: ChatTemplate | None = None,
    ) -> None:
        """Take the name apart.

        Raises:
            UserError: not of the form above.
        """
        super().__init__()
        spec = re.sub("^hf:/+", lambda found: "" if len(found[0]) < 6 else "/", os.fspath(given))
        match = _SPEC.fullmatch(spec)
        for name, value in (("data", spec), ("text_column", text_column), ("group_by", group_by)):
            check_unicode(name, value)
        if match is None:
            raise UserError(f"{given} is not of the form hf://OWNER/NAME[:CONFIG][@SPLIT][#COLUMN]; mend the name")
        self.name, self.config = match["name"], match["config"]
        self.split = match["split"] or "train"
        self.column = match["column"] or text_column
        self.group_by, self.chat = group_by, chat
        self._revision = ""

    @property
    def names(self) -> list[str]:
        """The name in its full form."""
        config = f":{self.config}" if self.config else ""
        group = "" if self.group_by is None else f" by {self.group_by}"
        return [f"{PREFIX}{self.name}{config}@{self.split}#{self.column}{group}"]

    def fingerprint(self) -> str:
        """SHA-256 over name and revision; for a local folder over names, sizes and times of its files.

        Raises:
            UserError: the dataset does not exist or cannot be reached.
        """
        with self._rows(self._columns()):
            pass
        found = [self.names[0], self._revision]
        if Path(self.name).is_absolute():
            for path in sorted(Path(self.name).rglob("*")):
                if path.is_file():
                    facts = path.stat()
                    found.append(f"{path.relative_to(self.name).as_posix()} {facts.st_size} {facts.st_mtime_ns}")
        return hashlib.sha256("\n".join(found).encode()).hexdigest()

    def documents(self, skipped: Counter[str]) -> Generator[str, None, None]:
        """Yield the texts in the order of the stream; null texts are skipped and counted.

        Raises:
            UserError: the stream broke off, or a text is not a string.
        """
        assert self.folder is not None, "the folder for what was read is not set"
        self.folder.mkdir(parents=True, exist_ok=True)
        kept: dict[str, Any] = {"num_rows": 0, "state": None, "ended": False}
        number = 0
        while (found := _read_kept(self._kept(number))) is not None:
            kept, number = found, number + 1
            skipped.update(kept["skipped"])
            yield from (Document(*text) if isinstance(text, list) else text for text in kept["texts"])
        if not kept["ended"]:
            yield from self._stream(number, kept["num_rows"], kept["state"], skipped)

    def _kept(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{number:06d}.json.gz"

    def _columns(self) -> Columns:
        return Columns(self.names[0], self.column, Counter(), self.group_by, self.chat)

    def _stream(self, number: int, num_rows: int, state: dict[str, Any] | None, skipped: Counter[str]) -> Iterator[str]:
        columns, name = self._columns(), self.names[0]
        texts: list[str] = []
        size = 0

        def keep(ended: bool) -> None:
            nonlocal size, number
            facts = {"num_rows": num_rows, "state": None if ended else rows.state_dict(), "ended": ended}
            _write_kept(self._kept(number), texts, {**facts, "skipped": columns.skipped})
            skipped.update(columns.skipped)
            columns.skipped.clear()
            texts.clear()
            size, number = 0, number + 1

        with self._rows(columns) as rows:
            if state is not None:
                rows.load_state_dict(state)
            iterator = iter(rows)
            try:
                while True:
                    try:
                        row = next(iterator, None)
                    except Exception as error:  # whatever the library and the network below it raise
                        reason = first_line(error, with_class=True)
                        raise UserError(
                            f"the stream of {name} broke off after {num_rows} rows ({reason});"
                            " run the same command again to go on from what was kept"
                        ) from error
                    if row is None:
                        break
                    num_rows += 1
                    for text in columns.take(row, f"{name}, row {num_rows}"):
                        texts.append(text)
                        size += len(text)
                        if size >= KEPT_CHARACTERS:
                            keep(ended=False)
                        yield text
                columns.finish()
                keep(ended=True)
            except GeneratorExit:
                # Enough was read; what waits is kept, so that the next pass needs no network either.
                if texts:
                    keep(ended=False)
                raise
            finally:
                del iterator

    @contextlib.contextmanager
    def _rows(self, columns: Columns) -> Iterator[Any]:
        import datasets

        with quiet(), tempfile.TemporaryDirectory(prefix="geonorm-") as cache:
            try:
                builder = datasets.load_dataset_builder(self.name, self.config, cache_dir=cache)
                rows: Any = self._json_rows(builder) or builder.as_streaming_dataset(split=self.split)
            except UserError:
                raise
            except Exception as error:
                reason = first_line(error, with_class=True)
                raise UserError(
                    f"cannot open the dataset {self.names[0]} ({reason}); check its name, configuration and"
                    " split, and the network"
                ) from error
            self._revision = str(builder.hash)
            if rows.column_names is not None:
                columns.names.update(rows.column_names)
                columns.require()
                rows = rows.select_columns(columns.wanted(rows.column_names))
            yield rows

    def _json_rows(self, builder: Any) -> _JsonRows | None:
        """Rows of a dataset of JSON files, which `datasets` would not give as they are; None for another dataset.

        Its reader drops a lone surrogate and what is beside it, and writes numbers and objects as text.

        Raises:
            UserError: no such split, or files that are read here in no other way.
        """
        from datasets.packaged_modules.csv.csv import CsvConfig
        from datasets.packaged_modules.json.json import JsonConfig

        if isinstance(builder.config, CsvConfig):
            # Else the texts "null", "None" and "NA" are nulls.
            builder.config.na_filter = False
        if not isinstance(builder.config, JsonConfig):
            return None
        files = builder.config.data_files or {}
        if self.split not in files:
            raise UserError(f"{self.names[0]} has no split `{self.split}`; its splits are: {', '.join(sorted(files))}")
        odd = next((name for name in files[self.split] if not _JSON_FILE.fullmatch(name)), None)
        if odd is not None or builder.config.field is not None:
            what = odd or f"JSON with its records in the field `{builder.config.field}`"
            raise UserError(
                f"{self.names[0]} is made of {what}, which is not read as a stream; fetch it and give .json or .jsonl"
                " files, as .gz, .xz or .zst too"
            )
        return _JsonRows(list(files[self.split]))


class _JsonRows:
    """Records of JSON files, wherever they lie, with a place to go on from as streams of `datasets` have it."""

    column_names = None

    def __init__(self, files: list[str]) -> None:
        self.files = files
        self._place = (0, 0)

    def state_dict(self) -> dict[str, int]:
        """Number of the file and of the records that it has given."""
        return dict(zip(("file", "records"), self._place, strict=True))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there; the file is read from its start again."""
        self._place = (state["file"], state["records"])

    def __iter__(self) -> Iterator[Any]:
        from datasets.utils.file_utils import xopen

        first, done = self._place
        for number, name in enumerate(self.files[first:], start=first):
            path, suffix = Path(name), os.path.splitext(name)[1].lower()
            # Tries again where the network fails.
            with cast(BinaryIO, xopen(name, "rb")) as file:
                for records, (_, record) in enumerate(raw.json_records(path, file, suffix), start=1):
                    if records > done:
                        self._place = (number, records)
                        yield record
            self._place, done = (number + 1, 0), 0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep `datasets` from drawing bars and from logging what it raises anyway."""
    import datasets
    from datasets.utils import logging

    hidden, verbosity = datasets.are_progress_bars_disabled(), logging.get_verbosity()
    datasets.disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if not hidden:
            datasets.enable_progress_bars()


def _write_kept(path: Path, texts: list[str], facts: dict[str, Any]) -> None:
    rows = [[text, text.group, text.labelled, text.special] if isinstance(text, Document) else text for text in texts]
    partial = path.with_suffix(".partial")
    with gzip.open(partial, "wt", compresslevel=1, encoding="ascii") as file:
        json.dump({**facts, "texts": rows}, file)
    partial.replace(path)


def _read_kept(path: Path) -> dict[str, Any] | None:
    """What `_write_kept` wrote; None if it is missing or damaged, which its checksum tells."""
    try:
        with gzip.open(path) as file:
            return json.load(file)
    except (OSError, EOFError, ValueError, zlib.error):
        return None
