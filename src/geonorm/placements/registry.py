"""The table of placements. A new one is a file in this folder and a row here."""

from __future__ import annotations

import dataclasses
from typing import Any

from geonorm.errors import UserError, unknown
from geonorm.placements.base import Placement
from geonorm.placements.deepnorm import DeepNorm
from geonorm.placements.geonorm import GeoNorm
from geonorm.placements.post import PostNorm
from geonorm.placements.pre import PreNorm
from geonorm.placements.sandwich import SandwichNorm

REGISTRY: dict[str, type[Placement]] = {
    placement.name: placement
    for placement in (
        GeoNorm,
        PreNorm,
        PostNorm,
        DeepNorm,
        SandwichNorm,
    )
}


def available() -> list[str]:
    """Names of all placements."""
    return list(REGISTRY)


def create(placement: str | Placement, **options: Any) -> Placement:
    """Make a placement from its name and options.

    Args:
        placement: a name from :func:`available`, or a placement, which comes back with ``options`` changed.
        options: fields of the placement, see its docstring.

    Raises:
        UserError: unknown name (lists the known, suggests the nearest), unknown option, or a value out of range.
    """
    if isinstance(placement, Placement):
        kind, options = type(placement), {**placement.options(), **options}
    elif placement in REGISTRY:
        kind = REGISTRY[placement]
    else:
        raise unknown("placement", placement, REGISTRY)
    names = [field.name for field in dataclasses.fields(kind)]
    for name in options:
        if name not in names:
            raise unknown(f"option of placement {kind.name!r}", name, names)
    return kind(**options)


def parse(text: str) -> Placement:
    """Make a placement from ``name`` or ``name:option=value,option=value``, as the command line writes it.

    Values are read as true, false, none, a number, or else a name.

    Raises:
        UserError: what :func:`create` raises, or an option without a value.
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals or not value:
            raise UserError(f"option {item!r} of placement {name!r} has no value; write it as {key}=VALUE")
        options[key.strip()] = _value(value.strip())
    return create(name.strip(), **options)


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text
