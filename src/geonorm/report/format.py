"""How numbers, options and names are written in the table, the figures and the prose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geonorm.report.results import Row

MISSING = "-"
PROSE_NAMES = {
    "geonorm": "GeoNorm",
    "pre": "Pre-Norm",
    "post": "Post-Norm",
    "deepnorm": "DeepNorm",
    "sandwich": "SandwichNorm",
    "output": "OutputNorm",
    "parallel": "Parallel",
}
ENTRY_PHRASES = {True: " with a normalised entry", False: " without a normalised entry"}


def number(value: float | None, digits: int) -> str:
    """``value`` with a fixed number of decimals, or a dash where there is none."""
    return MISSING if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int) -> str:
    """As `number`, with its sign unless it rounds to zero."""
    if value is None:
        return MISSING
    text = f"{value:+.{digits}f}"
    return text if float(text) else text[1:]


def interval(bounds: Sequence[float] | None, digits: int, *, sign: bool = False) -> str:
    """An interval as ``[low, high]``, or a dash where there is none."""
    if bounds is None:
        return MISSING
    write = signed if sign else number
    return f"[{write(bounds[0], digits)}, {write(bounds[1], digits)}]"


def learning_rate(value: float | None) -> str:
    """A learning rate with the digits that it was given with."""
    return MISSING if value is None else f"{value:.6g}"


def scaled(value: float | None, unit: str = "") -> str:
    """A count in thousands, millions or thousand millions with three significant digits: ``1.02 M``."""
    if value is None:
        return MISSING
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{_three_digits(value / factor)} {prefix}{unit}"
    return f"{value:.0f} {unit}".strip()


def grouped(value: float | None) -> str:
    """A whole number with commas between the thousands."""
    return MISSING if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """A time in the two largest units that it fills: ``3 min 30 s``."""
    if seconds is None:
        return MISSING
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def setting(value: Any) -> str:
    """Any value of the configuration as a reader would type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}={setting(entry)}" for key, entry in value.items()) or "none"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(setting(entry) for entry in value) or "none"
    return str(value)


def options_text(options: dict[str, Any]) -> str:
    """Placement options as ``key=value, key=value``."""
    return ", ".join(f"{key}={value if isinstance(value, bool) else setting(value)}" for key, value in options.items())


def prose_name(row: Row, rows: Sequence[Row] | None = None) -> str:
    """The name of a placement in a sentence.

    Args:
        row: the summary row.
        rows: when given, the options are left out unless another row has the same placement. The entry stays: it moves
            a loss as much as a placement does.
    """
    name = PROSE_NAMES.get(row.placement, row.placement)
    alone = rows is not None and sum(other.placement == row.placement for other in rows) == 1
    options = dict(row.options)
    phrase = ENTRY_PHRASES.get(options.pop("normalize_entry", None), "")
    if alone:
        return f"{name}{phrase}"
    return f"{name}{f' ({options_text(options)})' if options else ''}{phrase}"


def short_labels(rows: Sequence[Row]) -> list[str]:
    """One label a row: the placement, and only those options in which rows of that placement differ."""
    labels = []
    for row in rows:
        family = [other.options for other in rows if other.placement == row.placement]
        keys = sorted({key for options in family for key in options})
        differing = [key for key in keys if any(o.get(key) != family[0].get(key) for o in family)]
        words = [_option_word(key, row.options[key]) for key in differing if key in row.options]
        labels.append(" ".join([row.placement, ", ".join(words)]).strip())
    return labels


def loss_digits(rows: Iterable[Row]) -> int:
    """Decimals for losses: 3, or more where rounding would hide on which side of zero an interval lies."""
    differences = [row.difference for row in rows if row.difference]
    bounds = [bound for one in differences for bound in one.ci_corrected or () if bound]
    digits = 3
    while digits < 5 and any(float(f"{bound:.{digits}f}") == 0 for bound in bounds):
        digits += 1
    return digits


def listing(words: Sequence[str]) -> str:
    """Words joined as in a sentence: ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def percent(value: float) -> str:
    """A share as a percentage with two significant digits or whole."""
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"


def counted(count: int, noun: str) -> str:
    """A count with its noun: ``1 seed``, ``2 seeds``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def rows_counted(rows: Sequence[Row]) -> str:
    """How many rows there are, as placements unless one of them has several rows."""
    repeated = len({row.placement for row in rows}) < len(rows)
    return counted(len(rows), "row" if repeated else "placement")


def minus(text: str) -> str:
    """Hyphens as minus signs."""
    return text.replace("-", "\N{MINUS SIGN}")


def _option_word(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return key if value else f"no {key}"
    return value if isinstance(value, str) else f"{key}={setting(value)}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
