"""The page of a report, whatever it reports on: one HTML file that needs nothing beside it, and the figures."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from geonorm.errors import UserError
from geonorm.report import style
from geonorm.report.format import minus, setting
from geonorm.report.plots import Panel
from geonorm.report.tables import Table
from geonorm.storage import write_json, write_text

# Beside the figures, which of them are ours.
FIGURES = "figures.json"


@dataclass(frozen=True)
class Section:
    """A part of the page under its heading; what it has of these stands in this order.

    Attributes:
        level: of the heading; 1 begins a part of the page, such as a variant.
        columns: lists of terms and values by title.
    """

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    panels: Sequence[Panel] = ()
    caption: str = ""
    bullets: Sequence[str] = ()
    code: str = ""
    columns: Mapping[str, Mapping[str, Any]] | None = None
    note: str = ""
    level: int = 2


@dataclass(frozen=True)
class Page:
    """A page: what it is about, the finding, the facts as terms and values, and its sections."""

    eyebrow: str
    subject: str
    date: str
    headline: str
    lead: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]


def write_page(path: Path, make: Callable[[], Page]) -> Path:
    """Write a page, and every panel of it as SVG and PDF into ``figures/`` beside it.

    The page has no scripts and no references to anything outside it; the same content gives the same bytes. Figures of
    a page that was here before and are not on this one are removed.

    Args:
        path: the file.
        make: builds the page; it is called under the style of the figures.

    Raises:
        UserError: the folder cannot be written to.
    """
    folder = path.parent / "figures"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with style.context():
            page = make()
            panels = [panel for section in page.sections for panel in section.panels]
            drawn = {panel.name: style.save_files(panel.figure, folder / panel.name) for panel in panels}
        images = {name: base64.b64encode(svg).decode() for name, svg in drawn.items()}
        write_text(path, _templates().get_template("page.html.j2").render(page=page, images=images))
        _remove_others(folder, list(drawn))
    except OSError as error:
        raise UserError(f"cannot write the report into {path.parent}: {error}") from None
    return path


def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"minus": minus, "setting": setting}
    return environment


def _remove_others(folder: Path, names: list[str]) -> None:
    """Remove figures of an earlier page, which has a list of them; any other file is the user's."""
    record = folder / FIGURES
    try:
        before = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = []
    for name in before if isinstance(before, list) else []:
        # A name, and no way out of the folder.
        if name not in names and Path(str(name)).name == name:
            for suffix in (".svg", ".pdf"):
                (folder / f"{name}{suffix}").unlink(missing_ok=True)
    write_json(record, names)
