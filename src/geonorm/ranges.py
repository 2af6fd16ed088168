"""Ranges of options, said where the option is declared: ``steps: Annotated[int, Count(1)] = 500``."""

from __future__ import annotations

import dataclasses
import math
import numbers
import typing
from collections.abc import Iterator
from typing import Any

from geonorm.errors import MAX_COUNT, MAX_SEED, UserError, check_count, check_positive, unknown


@dataclasses.dataclass(frozen=True)
class Count:
    """Whole numbers from ``low`` to ``high``."""

    low: int = 1
    high: int = MAX_COUNT

    def check(self, name: str, value: Any) -> None:
        """Raise a UserError that names the option, unless the value is one of them."""
        check_count(name, value, self.low, self.high)


@dataclasses.dataclass(frozen=True)
class Number:
    """Finite numbers from ``low`` to ``high``, without the end that ``above`` or ``below`` excludes."""

    low: float
    high: float
    above: bool = False
    below: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise a UserError that names the option, unless the value is one of them."""
        if self.low == 0 and self.above:
            check_positive(name, value)
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
        # Comparisons with NaN are false.
        high = number < self.high if self.below else number <= self.high
        low = number > self.low if self.above else number >= self.low
        if not (low and high):
            ends = f"{'(' if self.above else '['}{self.low:g}, {self.high:g}{')' if self.below else ']'}"
            raise UserError(f"`{name}` must be a number in {ends}, got {value!r}")


POSITIVE = Number(0, 1e30, above=True)
FACTOR = Number(0, 1e6, above=True)
SEED = Count(0, MAX_SEED)


def ranges(kind: Any) -> dict[str, Count | Number]:
    """The range of every field of a dataclass that has one."""
    found = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, (Count, Number)):
                found[name] = mark
    return found


def check_ranges(config: Any, section: str = "") -> None:
    """Check every field of a dataclass against its range or choices (``Literal``), each item of several; None is good.

    Args:
        config: the dataclass.
        section: what stands before the names of its fields in an error, such as ``"model."``.

    Raises:
        UserError: a value outside its range, or none of its choices.
    """
    for name, hint in typing.get_type_hints(type(config)).items():
        known, value = _choices(hint), getattr(config, name)
        for item in value if isinstance(value, tuple) else (value,):
            if known and item is not None and item not in known:
                raise unknown(f"{section}{name}", item, known)
    for name, allowed in ranges(type(config)).items():
        for place, item in _items(f"{section}{name}", getattr(config, name)):
            allowed.check(place, item)


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every number in a field, with its name for an error; those of a mapping by their keys."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _items(f"{name}.{key}", item)
    elif value is not None:
        yield from ((name, item) for item in (value if isinstance(value, tuple) else (value,)) if item is not None)


def _choices(hint: Any) -> tuple[str, ...]:
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return next((found for part in typing.get_args(hint) if (found := _choices(part))), ())
