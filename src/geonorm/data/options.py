"""Options of ``geonorm prepare``. Imports none of the data libraries, so that help appears soon."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from geonorm.data import VOCAB_SIZE
from geonorm.ranges import Count, Number

_Count = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all documents)")]
_Workers = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all cores)")]
_Name = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: train a BPE)")]
_Group = Annotated[str | None, tyro.conf.arg(metavar="COLUMN", help_behavior_hint="(default: each document)")]
_Dedup = Annotated[
    Literal["exact", "near"] | None,
    tyro.conf.arg(metavar="exact|near", help_behavior_hint="(default: keep all; exact with --group-by)"),
]
_Eos = Annotated[str | None, tyro.conf.arg(metavar="TOKEN", help_behavior_hint="(default: what the tokenizer says)")]
_Out = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: a folder in the cache)")]
_Sources = Annotated[
    tuple[str, ...],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="[SOURCE ...]", help_behavior_hint="(default: the standard-library corpus)"),
]


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """Turn text into packed token files, split by document, ready for --data of train and compare.

    The same command again opens what is there; after an interruption it goes on from the finished shards. The result
    does not depend on --workers. Formats and guarantees: docs/data.md.
    """

    sources: _Sources = ()
    """Text, jsonl, json or parquet files (text and json also as .gz, .xz, .zst), folders of them, quoted patterns such
    as 'texts/**/*.jsonl', or Hub datasets as hf://OWNER/NAME[:CONFIG][@SPLIT][#COLUMN]"""
    out: _Out = None
    """Folder for the corpus"""
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

    def arguments(self) -> dict[str, Any]:
        """What `prepare` is to be called with, the sources apart."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "sources"}
