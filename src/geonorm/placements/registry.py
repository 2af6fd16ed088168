"""The table of placements. A new one is a file in this folder and a row here."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import typing
from typing import Any

from geonorm.errors import UserError, plain, unknown
from geonorm.placements.attnres import AttentionResiduals
from geonorm.placements.base import Placement
from geonorm.placements.deepnorm import DeepNorm
from geonorm.placements.geonorm import GeoNorm
from geonorm.placements.hybrid import HybridNorm
from geonorm.placements.hyper import Hyper
from geonorm.placements.keel import Keel
from geonorm.placements.lns import LayerNormScaling
from geonorm.placements.mhc import ManifoldHyper
from geonorm.placements.mix import Mix
from geonorm.placements.nag import NAG
from geonorm.placements.ngpt import NGPT
from geonorm.placements.output import OutputNorm
from geonorm.placements.parallel import Parallel
from geonorm.placements.post import PostNorm
from geonorm.placements.pre import PreNorm
from geonorm.placements.resi_dual import ResiDual
from geonorm.placements.sandwich import SandwichNorm
from geonorm.placements.scaled_sandwich import ScaledSandwich
from geonorm.placements.siamese import SiameseNorm
from geonorm.placements.slerp import Slerp
from geonorm.placements.spheret import SpheretNorm

REGISTRY: dict[str, type[Placement]] = {
    placement.name: placement
    for placement in (
        GeoNorm,
        PreNorm,
        PostNorm,
        DeepNorm,
        SandwichNorm,
        OutputNorm,
        Parallel,
        LayerNormScaling,
        ScaledSandwich,
        Keel,
        HybridNorm,
        Mix,
        ResiDual,
        SiameseNorm,
        Hyper,
        ManifoldHyper,
        AttentionResiduals,
        NGPT,
        Slerp,
        SpheretNorm,
        NAG,
    )
}


def available() -> list[str]:
    """Names of all placements."""
    return list(REGISTRY)


def create(placement: str | Placement, **options: Any) -> Placement:
    """Make a placement from its name and options.

    Args:
        placement: a name from :func:`available`, or a placement, which comes back with ``options`` changed.
        options: fields of the placement, see its docstring. Numbers of numpy and tensors without an axis become
            Python's own, lists of numbers may be arrays, and whole numbers count as floating-point ones.

    Raises:
        UserError: unknown name (lists the known, suggests the nearest), unknown option, or a value out of range.
    """
    if isinstance(placement, Placement):
        kind, options = type(placement), {**placement.options(), **options}
    elif isinstance(placement, str) and placement in REGISTRY:
        kind = REGISTRY[placement]
    else:
        raise unknown("placement", placement, REGISTRY)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in options:
        if name not in fields:
            raise unknown(f"option of placement {kind.name!r}", name, fields)
    # Here, where every option comes in: what cannot be saved must not show when a trained model is.
    hints = typing.get_type_hints(kind)
    return kind(**{name: _plain_option(name, hints[name], value) for name, value in options.items()})


def _plain_option(name: str, hint: Any, value: object) -> Any:
    value = plain(name, value)
    if not _has(hint, float):
        return value
    return [_float(item) for item in value] if isinstance(value, list) else _float(value)


def _has(hint: Any, kind: type) -> bool:
    """Whether a type occurs in another, such as float in ``Sequence[float] | None``."""
    return hint is kind or any(_has(part, kind) for part in typing.get_args(hint))


def _float(value: Any) -> Any:
    # A whole number that no float holds is left to the check of its range.
    return float(value) if type(value) is int and abs(value) <= sys.float_info.max else value


def parse(text: str) -> Placement:
    """Make a placement from ``name`` or ``name:option=value,option=value``, as the command line writes it.

    Values are read as true, false, none (where the option takes None), a number, or else a name.

    Raises:
        UserError: what :func:`create` raises, an option without a value, or one that is given twice.
    """
    name, _, rest = text.partition(":")
    name = name.strip()
    hints = typing.get_type_hints(REGISTRY[name]) if name in REGISTRY else {}
    # `decay=none` names a law; `max_angle=none` means that there is no limit.
    takes_none = {key for key, hint in hints.items() if type(None) in typing.get_args(hint)}
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals or not value:
            raise UserError(f"option {item!r} of placement {name!r} has no value; write it as {key}=VALUE")
        key = key.strip()
        if key in options:
            raise UserError(f"option {key!r} of placement {name!r} is given twice; keep one")
        options[key] = _value(value.strip(), key in takes_none, _has(hints.get(key), int))
    return create(name, **options)


def _value(text: str, takes_none: bool, whole: bool) -> Any:
    words = {"true": True, "false": False, **({"none": None} if takes_none else {})}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float) if whole else (float,):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
