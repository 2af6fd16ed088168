"""How figures look: one colour a placement, and the same drawing as a file and inside the page."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Light and dark shades. Hues follow Okabe and Ito, so that the common colour-vision deficiencies keep them apart;
# each shade has at least 4.5:1 contrast to the paper, because the direct labels are text.
PALETTE = {
    "geonorm": ("#c2410c", "#ff8f4d"),
    "pre": ("#0b66a8", "#62b3f2"),
    "post": ("#00795a", "#35c99a"),
    "deepnorm": ("#a33b7b", "#ec94c8"),
    "sandwich": ("#806300", "#dcc04a"),
    "other1": ("#5b4bb5", "#aea2ff"),
    "other2": ("#4f5d6b", "#a9b7c6"),
    "other3": ("#8f2f36", "#f08d92"),
}
INK = ("#22211f", "#e8e5de")
MUTED = ("#6a6761", "#a39e94")
GRID = ("#e3e0d9", "#33312d")
PAPER = ("#fdfdfb", "#161615")
CSS_COLOURS = {"ink": INK, "muted": MUTED, "grid": GRID, "paper": PAPER, **PALETTE}

MARKERS = {"geonorm": "o", "pre": "s", "post": "D", "deepnorm": "^", "sandwich": "v"}
OTHER_MARKERS = ("P", "X", "h")
DASHES: tuple[tuple[int, tuple[float, ...]], ...] = ((0, ()), (0, (5, 2)), (0, (1.5, 1.8)), (0, (6, 2, 1.5, 2)))

FONT_SIZE = 10.5
RC = {
    "font.size": FONT_SIZE,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "axes.edgecolor": MUTED[0],
    "axes.labelcolor": MUTED[0],
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID[0],
    "grid.linewidth": 0.8,
    "text.color": INK[0],
    "xtick.color": MUTED[0],
    "ytick.color": MUTED[0],
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "figure.dpi": 72,
    "pdf.fonttype": 42,
    "svg.hashsalt": "geonorm",
}


@dataclass(frozen=True)
class Look:
    """How one row is drawn: the key of its colour in the palette, the marker, the dashes."""

    colour: str
    marker: str
    dashes: tuple[int, tuple[float, ...]]

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of matplotlib's ``plot``."""
        return {"color": PALETTE[self.colour][0], "marker": self.marker, "linestyle": self.dashes}


def look(index: int) -> Look:
    """One of a sequence of looks: colours turn first, then dashes, then markers; 256 differ, 32 without markers."""
    colours, markers = tuple(PALETTE), (*MARKERS.values(), *OTHER_MARKERS)
    turn = index // len(colours)
    marker = markers[(index + turn // len(DASHES)) % len(markers)]
    return Look(colours[index % len(colours)], marker, DASHES[turn % len(DASHES)])


def looks(placements: Sequence[str]) -> list[Look]:
    """One look a row, each its own: colour and marker by placement as far as its dashes reach, else by number."""
    ranks: Counter[str] = Counter()
    by_placement = []
    for placement in placements:
        dashes = DASHES[ranks[placement] % len(DASHES)]
        ranks[placement] += 1
        # Placements without a colour of their own share the other ones, by name.
        other = sum(map(ord, placement)) % len(OTHER_MARKERS)
        colour = placement if placement in MARKERS else f"other{other + 1}"
        by_placement.append(Look(colour, MARKERS.get(placement, OTHER_MARKERS[other]), dashes))
    if len({(one.colour, one.dashes) for one in by_placement}) == len(by_placement):
        return by_placement
    return [look(index) for index in range(len(placements))]


def context():
    """The style that every figure is made and saved under, whatever the user's own matplotlib settings are."""
    return matplotlib.style.context(["default", RC])


def measure(figure: Figure) -> None:
    """Lay out the figure once, so that text extents can be asked for."""
    FigureCanvasAgg(figure).draw()


def save_files(figure: Figure, stem: Path) -> None:
    """Write ``stem.svg`` (text as outlines) and ``stem.pdf`` for a paper; the same figure gives the same bytes."""
    with matplotlib.rc_context({"svg.fonttype": "path"}):
        FigureCanvasSVG(figure).print_svg(stem.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
    with open(stem.with_suffix(".pdf"), "wb") as file:
        FigureCanvasPdf(figure).print_pdf(file, metadata={"CreationDate": None, "Creator": None, "Producer": None})


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """The figure as an ``<svg>`` element for an HTML page.

    Colours become CSS variables, so that they follow the page's light or dark scheme; text stays text; every id
    starts with ``name``, so that several figures on a page do not share one.

    Args:
        figure: the drawing.
        name: unique on the page; letters, digits and hyphens.
        label: what a screen reader says, already escaped for an attribute.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # matplotlib's style element would apply to the whole page.
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('xlink:href="#', f'href="#{name}-')
    for variable, (light, _) in CSS_COLOURS.items():
        svg = svg.replace(light, f"var(--{variable})")
    # A hundredth of a unit is far below a pixel; the digits that matplotlib writes beyond it double the page.
    svg = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), svg)
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None
    return re.sub(r"<svg[^>]*>", f'<svg class="plot" role="img" aria-label="{label}" {view_box.group()}>', svg, count=1)
