"""Views of a weight by role: fused matrices split, matrices stored as ``[in, out]`` turned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from geonorm.placements.base import Role


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a weight that has one role.

    Attributes:
        role: what the part does.
        view: the part, a view of the parameter in whatever layout it is stored.
        shape: ``(out, in)`` as a linear map, or the shape of what is none.
        label: tells the parts of a fused weight apart; empty where the parameter has one part.
    """

    role: Role
    view: Tensor
    shape: tuple[int, ...]
    label: str = ""


def whole(weight: Tensor, role: Role) -> list[Part]:
    """A weight with one role, stored as ``[out, in]``."""
    return [Part(role, weight, tuple(weight.shape))]


def transposed(weight: Tensor, role: Role) -> list[Part]:
    """A weight with one role, stored as ``[in, out]``."""
    return [Part(role, weight, tuple(reversed(weight.shape)))]


def columns(weight: Tensor, sizes: Sequence[tuple[Role, int]]) -> list[Part]:
    """A weight stored as ``[in, out]`` whose outputs are split in order."""
    views = weight.split([size for _, size in sizes], dim=1)
    return [
        Part(role, view, (view.shape[1], view.shape[0]), role) for (role, _), view in zip(sizes, views, strict=True)
    ]


def rows(weight: Tensor, sizes: Sequence[tuple[Role, int]], labels: Sequence[str] = ()) -> list[Part]:
    """A weight stored as ``[out, in]`` whose outputs are split in order; labels are the roles unless given."""
    views = weight.split([size for _, size in sizes], dim=0)
    names = labels or [role for role, _ in sizes]
    parts = zip(sizes, views, names, strict=True)
    return [Part(role, view, tuple(view.shape), label) for (role, _), view, label in parts]


def interleaved(weight: Tensor, num_heads: int, roles: tuple[Role, ...]) -> list[Part]:
    """A weight stored as ``[heads * len(roles) * head size, in]``: head by head, one slice a role."""
    out, width = weight.shape
    heads = weight.view(num_heads, len(roles), out // (num_heads * len(roles)), width)
    return [Part(role, heads[:, index], (out // len(roles), width), role) for index, role in enumerate(roles)]
