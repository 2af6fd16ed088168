"""How figures look: one colour a placement, one style, one way to save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
from matplotlib.figure import Figure

# Hues follow Okabe and Ito, so that the common colour-vision deficiencies keep them apart. Each has at least 4.5:1
# contrast to the paper, and so has what the page's dark scheme makes of it, because names are written in it.
PLACEMENTS = {
    "geonorm": ("#c2410c", "o"),
    "pre": ("#0b66a8", "s"),
    "post": ("#00795a", "D"),
    "deepnorm": ("#a33b7b", "^"),
    "sandwich": ("#806300", "v"),
}
OTHERS = (("#5b4bb5", "P"), ("#4f5d6b", "X"), ("#8f2f36", "h"))
COLOURS, MARKERS = zip(*PLACEMENTS.values(), *OTHERS, strict=True)
DASHES: tuple[tuple[int, tuple[float, ...]], ...] = ((0, ()), (0, (5, 2)), (0, (1.5, 1.8)), (0, (6, 2, 1.5, 2)))
# These stand in style.css too.
INK, MUTED, GRID, PAPER = "#22211f", "#6a6761", "#e3e0d9", "#fdfdfb"

FONT_SIZE = 10.5
RC = {
    "font.size": FONT_SIZE,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "axes.titlelocation": "left",
    "axes.titlesize": FONT_SIZE + 0.5,
    "axes.titleweight": "bold",
    "axes.titlepad": 12,
    "figure.dpi": 72,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.labelcolor": "linecolor",
    "legend.handlelength": 1.6,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "pdf.fonttype": 42,
    # The same figure gives the same bytes, and text the same outlines on every machine.
    "svg.fonttype": "path",
    "svg.hashsalt": "geonorm",
    "text.color": INK,
    # Names are the user's: a dollar sign is no formula.
    "text.parse_math": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}


@dataclass(frozen=True)
class Look:
    """How one row is drawn: colour, marker and dashes, as matplotlib takes them."""

    colour: str
    marker: str
    dashes: tuple[int, tuple[float, ...]] = DASHES[0]

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of matplotlib's ``plot``."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dashes}


def look(index: int) -> Look:
    """One of a sequence of looks: colours turn first, then dashes, then markers; 256 differ, 32 without markers."""
    turn, colour = divmod(index, len(COLOURS))
    marker = MARKERS[(index + turn // len(DASHES)) % len(MARKERS)]
    return Look(COLOURS[colour], marker, DASHES[turn % len(DASHES)])


def looks(placements: Sequence[str]) -> list[Look]:
    """One look a row, each its own: colour and marker by placement as far as its dashes reach, else by number."""
    ranks: Counter[str] = Counter()
    by_placement = []
    for placement in placements:
        # Placements without a colour of their own share the other ones, by name.
        own = PLACEMENTS.get(placement, OTHERS[sum(map(ord, placement)) % len(OTHERS)])
        by_placement.append(Look(*own, DASHES[ranks[placement] % len(DASHES)]))
        ranks[placement] += 1
    if len({(one.colour, one.dashes) for one in by_placement}) == len(by_placement):
        return by_placement
    return [look(index) for index in range(len(placements))]


def context():
    """The style that every figure is made and saved under, whatever the user's own matplotlib settings are."""
    return matplotlib.style.context(["default", RC])


def save_files(figure: Figure, stem: Path) -> bytes:
    """Write ``stem.svg`` and ``stem.pdf`` for a paper, and return the former; the same figure gives the same bytes."""
    # Not with_suffix: the name of a variant can hold dots.
    svg = stem.with_name(f"{stem.name}.svg")
    figure.savefig(svg, metadata={"Date": None, "Creator": None})
    figure.savefig(
        stem.with_name(f"{stem.name}.pdf"), metadata={"CreationDate": None, "Creator": None, "Producer": None}
    )
    return svg.read_bytes()
