"""A text that carries more than its characters."""

from __future__ import annotations

from collections.abc import Iterable

Spans = tuple[tuple[int, int], ...]


class Document(str):
    """A text that belongs to a group, or of which only parts are to be learned; everywhere else it is a string.

    Attributes:
        group: documents of one group, such as an author or a repository, stand on one side of a split.
        labelled: begin and end of the stretches of characters whose tokens have a label, in order; what lies outside is
            context, which is read and not predicted. None for all of the text.
        special: the spellings of special tokens stand for these tokens; in other texts they are plain text.
    """

    group: str | None
    labelled: Spans | None
    special: bool

    def __new__(
        cls,
        text: str,
        group: str | None = None,
        labelled: Iterable[Iterable[int]] | None = None,
        special: bool = False,
    ) -> Document:
        """Make a document."""
        document = super().__new__(cls, text)
        document.group, document.special = group, special
        document.labelled = None if labelled is None else tuple((first, last) for first, last in labelled)
        return document

    def __getnewargs__(self) -> tuple[str, str | None, Spans | None, bool]:  # type: ignore[override]
        return str(self), self.group, self.labelled, self.special

    def piece(self, start: int, stop: int) -> Document:
        """Characters ``start`` to ``stop - 1`` with what belongs to them."""
        spans = self.labelled
        if spans is not None:
            cut = [(max(first, start) - start, min(last, stop) - start) for first, last in spans]
            spans = [(first, last) for first, last in cut if first < last]
        return Document(self[start:stop], self.group, spans, self.special)


def grouped(text: str, group: str) -> Document:
    """The text as one of a group."""
    if isinstance(text, Document):
        return Document(text, group, text.labelled, text.special)
    return Document(text, group)


def group_of(text: str) -> str | None:
    """The group of a text, if it has one."""
    return text.group if isinstance(text, Document) else None


def labelled_of(text: str) -> Spans | None:
    """The labelled stretches of a text, None for all of it."""
    return text.labelled if isinstance(text, Document) else None
