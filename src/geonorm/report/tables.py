"""Tables as data, which the page and the terminal show in their own ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

# What a column of words needs at least, in characters.
_WORDS = 9


@dataclass(frozen=True)
class Strip:
    """A small plot in a cell of the page: a dot with its interval and a vertical line, in percent of the width.

    Attributes:
        label: the same in words.
        beyond: the dot lies off the scale.
    """

    label: str
    at: float
    ends: tuple[float, float] | None
    line: float | None
    beyond: bool


@dataclass(frozen=True)
class Cell:
    """A cell: its text, smaller lines and remarks under it, and how the page shows it."""

    text: str = ""
    under: Sequence[str] = ()
    remarks: Sequence[str] = ()
    colour: str = ""
    strong: bool = False
    quiet: bool = False
    strip: Strip | None = None

    @property
    def lines(self) -> list[str]:
        """All its text."""
        return [self.text, *self.under, *self.remarks]


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row names it. On a terminal, print it with rich.

    Attributes:
        headings: one a column; a pair stands at the two ends of its column.
        rows: cells, plain text where it needs nothing else.
        left: columns that are words and not numbers.
        kind: class of style.css.
        title: over it, where a section of the page has several.
        caption: under it on a terminal.
    """

    headings: Sequence[str | tuple[str, str]]
    rows: Sequence[Sequence[Cell | str]]
    left: Sequence[int] = (0,)
    kind: str = ""
    title: str = ""
    caption: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield columns where they fit, else the first column and all others line by line; no number is ever broken."""
        names = [str(heading).lower() for heading in self.headings]
        rows = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]
        numbers = [index for index in range(len(names)) if index not in self.left]
        widths = [max(len(line) for row in rows for line in (names[index], *row[index].lines)) for index in numbers]
        words = [max(len(line) for row in rows for line in (names[index], *row[index].lines)) for index in self.left]
        needed = sum(widths) + sum(min(width, _WORDS) for width in words) + 2
        gap = next((gap for gap in (1, 0) if needed + (1 + gap) * (len(names) - 1) <= options.max_width), None)
        # Text, not str: rich reads square brackets in a string as markup.
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap or 0, 0, 0), title_justify="left")
        table.caption_justify = "left"
        table.title = Text(self.title, style="bold") if self.title else None
        table.caption = Text(self.caption) if self.caption else None
        if gap is None:
            table.show_lines = True
            table.add_column(names[0], overflow="fold")
            table.add_column("values", overflow="fold")
            for row in rows:
                others = (Text(f"{name} ").append(_text(cell)) for name, cell in zip(names[1:], row[1:], strict=True))
                table.add_row(_text(row[0]), Text("\n").join(others))
        else:
            for index, name in enumerate(names):
                right = index in numbers
                table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
            for row in rows:
                table.add_row(*map(_text, row))
        yield table


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print a line as it is: names and paths are the user's, so no markup, and no line break that a copy would keep."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def _text(cell: Cell) -> Text:
    text = Text(cell.text, style="bold" if cell.strong else "")
    for line in cell.lines[1:]:
        text.append(f"\n{line}", style="not bold dim")
    return text
