"""Views of a weight by role: fused matrices split, matrices stored as ``[in, out]`` turned."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from geonorm.placements.base import Role


@dataclasses.dataclass(frozen=True)
class WeightView:
    """What of a weight has one role.

    Attributes:
        role: what it does.
        view: a view of the parameter in whatever layout it is stored.
        shape: ``(out, in)`` as a linear map, or the shape of what is none.
        label: tells the views of a fused weight apart; empty where the parameter has one role.
        transposed: whether the view is stored as ``[in, out]``.
    """

    role: Role
    view: Tensor
    shape: tuple[int, ...]
    label: str = ""
    transposed: bool = False


def unsplit(weight: Tensor, role: Role, *, transposed: bool = False) -> list[WeightView]:
    """A weight with one role, stored as ``[out, in]``, or ``[in, out]`` if ``transposed``."""
    shape = tuple(reversed(weight.shape)) if transposed else tuple(weight.shape)
    return [WeightView(role, weight, shape, transposed=transposed)]


def split(
    weight: Tensor, sizes: Sequence[tuple[Role, int]], labels: Sequence[str] = (), *, transposed: bool = False
) -> list[WeightView]:
    """A weight whose outputs are split in order; labels are the roles unless given. Stored as for :func:`unsplit`."""
    views = weight.split([size for _, size in sizes], dim=1 if transposed else 0)
    names = labels or [role for role, _ in sizes]
    return [
        WeightView(role, view, tuple(reversed(view.shape)) if transposed else tuple(view.shape), name, transposed)
        for (role, _), view, name in zip(sizes, views, names, strict=True)
    ]


def interleaved(weight: Tensor, num_heads: int, roles: tuple[Role, ...]) -> list[WeightView]:
    """A weight stored as ``[heads * len(roles) * head size, in]``: head by head, one slice a role."""
    out, width = weight.shape
    heads = weight.view(num_heads, len(roles), out // (num_heads * len(roles)), width)
    return [WeightView(role, heads[:, index], (out // len(roles), width), role) for index, role in enumerate(roles)]


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor in full; every rank has to ask for one that is cut over them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
