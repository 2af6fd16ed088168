"""``geonorm prepare``."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from geonorm import signals
from geonorm.cli.option_types import arg
from geonorm.data import VOCAB_SIZE
from geonorm.ranges import Count, Number

_Count = Annotated[int | None, arg("INT", "all documents")]
_Workers = Annotated[int | None, arg("INT", "all cores")]
_Name = Annotated[str | None, arg("NAME", "train a BPE")]
_Group = Annotated[str | None, arg("COLUMN", "each document")]
_Dedup = Annotated[
    Literal["exact", "near"] | None,
    arg("exact|near", "keep all; exact with --group-by"),
]
_Eos = Annotated[str | None, arg("TOKEN", "what the tokenizer says")]
_Out = Annotated[Path | None, arg("FOLDER", "a folder in the cache")]
_Sources = Annotated[
    tuple[str, ...],
    tyro.conf.Positional,
    arg("[SOURCE ...]", "the standard-library corpus"),
]


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Turn text into packed token files, split by document, ready for --data of train and compare."""

    sources: _Sources = ()
    """Text, jsonl, json or parquet files (text and json also as .gz, .xz, .zst), folders of them, quoted patterns such
    as 'texts/**/*.jsonl', or Hub datasets as hf://OWNER/NAME[:CONFIG][@SPLIT][#COLUMN]"""
    out: _Out = None
    """Folder for the corpus; the same command again opens what is there, or goes on after an interruption"""
    tokenizer: _Name = None
    """A tokenizer.json, a folder with one, or a name on the Hub"""
    eos: _Eos = None
    """Its end-of-text token"""
    vocab_size: Annotated[int, Count(257)] = VOCAB_SIZE
    """Size of the BPE trained on the text if no tokenizer is given; 257 means bytes"""
    val_fraction: Annotated[float, Number(0, 1, above=True)] = 0.05
    """Share of the text held out to choose on, whole documents"""
    test_fraction: Annotated[float, Number(0, 1, above=True)] = 0.05
    """Share of the text held out to report on, whole documents"""
    min_documents: Annotated[int, Count()] = 8
    """Fewest documents or groups of a held-out side; with 1, a corpus of one document is cut"""
    max_share: Annotated[float, Number(0, 1, above=True)] = 0.25
    """Largest share of a held-out side's bytes that one document or group may have"""
    group_by: _Group = None
    """Field or column that names a group (author, repository, site), which is never on two sides"""
    dedup: _Dedup = None
    """Leave out copies (exact: blanks and case make no difference) or near-duplicates as well (near)"""
    text_column: str = "text"
    """Field of JSON and column of Parquet that holds the text; where there is no 'text', a 'prompt' without labels and
    the 'completion' to learn are read, or 'messages' of which those of the assistant are learned"""
    max_documents: Annotated[_Count, Count()] = None
    """Read only the first so many documents"""
    skip_unreadable: bool = False
    """Leave a damaged file at its first fault, name it and go on, instead of stopping"""
    workers: Annotated[_Workers, Count()] = None
    """Processes that encode"""

    def run(self) -> int:
        """See :class:`Command`."""
        from rich.console import Console

        from geonorm.data import prepare
        from geonorm.progress_bar import ProgressBar

        signals.begin()
        arguments = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        sources = list(arguments.pop("sources")) or None
        with ProgressBar(Console()) as bar:
            prepare(sources, report=bar.say, progress=bar, **arguments)
        return 0
