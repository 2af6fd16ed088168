"""A text that carries more than its characters."""

from __future__ import annotations


class Document(str):
    """A text that belongs to a group, such as its author or repository; everywhere else it is a string.

    Attributes:
        group: documents of one group stand on one side of a split.
    """

    group: str

    def __new__(cls, text: str, group: str) -> Document:
        """Make a document."""
        document = super().__new__(cls, text)
        document.group = group
        return document

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.group


def group_of(text: str) -> str | None:
    """The group of a text, if it has one."""
    return text.group if isinstance(text, Document) else None
