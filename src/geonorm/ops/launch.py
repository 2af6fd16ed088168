"""Tensors in, tensors out: lays out rows and tiles for the kernels of ``ops/triton.py`` and starts them.

Import this only where triton is known to be there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from geonorm import geometry
from geonorm.errors import UserError
from geonorm.ops import triton as kernels

# Entries of the widest row that one program holds in registers; backward holds one more row of inputs.
FORWARD_LIMIT, BACKWARD_LIMIT = 16384, 8192
# Entries of a tile: narrow rows share a program, wide rows are walked in blocks of this size.
TILE, WALK = 4096, 4096
ENTRIES_PER_WARP = 512
# A block holds 1024 threads at most; a warp of AMD has 64.
MOST_WARPS = 16 if torch.version.hip else 32
_FLOAT32_MAX = torch.finfo(torch.float32).max


def as_rows(value: Tensor) -> Tensor:
    """View of shape [rows, d] with neighbouring entries in a row; a copy only where no such view exists."""
    rows = value.reshape(-1, value.shape[-1])
    return rows if rows.shape[-1] < 2 or rows.stride(-1) == 1 else rows.contiguous()


def _beside(alpha: Tensor | float, x: Tensor) -> Tensor:
    """What a kernel reads alpha from; any tensor where it is a number."""
    return alpha.to(x.device) if isinstance(alpha, Tensor) else x


def empty_like(like: Tensor) -> Tensor:
    """As torch's, but contiguous whatever the layout."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def tile_of(num_rows: int, dim: int, limit: int) -> dict[str, Any]:
    """What a kernel is compiled for: rows and entries of a tile, whether a row of more than ``limit`` is walked."""
    block = 1 << max(dim - 1, 0).bit_length()
    looped = block > limit
    if looped:
        block = WALK
    rows = 1 if looped else max(1, min(TILE // block, 1 << max(num_rows - 1, 0).bit_length()))
    warps = max(1, min(MOST_WARPS, block * rows // ENTRIES_PER_WARP))
    return {"LOOPED": looped, "ROWS": rows, "BLOCK": block, "num_warps": warps}


def start(kernel: Any, programs: int, like: Tensor, *arguments: Any, **constants: Any) -> None:
    """Start so many programs of a kernel on the device of a tensor.

    Raises:
        UserError: the tensor is on a CPU, and triton was imported without being asked to interpret.
    """
    if not like.is_cuda and not kernels.INTERPRETED:
        raise UserError("set TRITON_INTERPRET=1 before Python starts: triton is loaded and compiles for a GPU only")
    with torch.cuda.device(like.device) if like.is_cuda else contextlib.nullcontext():
        # Said aloud because its default differs between versions; a fused multiply-add rounds once less.
        kernel[(programs,)](*arguments, enable_fp_fusion=True, **constants)


def _options(
    like: Tensor, alpha: Tensor | float, p: float, max_angle: float | None, radius: float | None
) -> tuple[tuple, dict[str, Any]]:
    """Arguments of the step kernels that are not tensors of rows, and what they are compiled for."""
    limit = math.inf if max_angle is None else geometry.angle_limit(p, max_angle)
    clamp = limit < math.sqrt(_FLOAT32_MAX)
    cos_max, sin_max = (math.cos(max_angle), math.sin(max_angle)) if clamp and max_angle else (1.0, 0.0)
    kind = {math.inf: kernels.EXPONENTIAL, 1.0: kernels.PROJECTION, 2.0: kernels.CAYLEY}.get(p, kernels.GENERAL)
    has_alpha = isinstance(alpha, Tensor)
    numbers = (
        1.0 if has_alpha else float(alpha),
        p if kind is kernels.GENERAL else 1.0,
        cos_max,
        sin_max,
        limit * limit if clamp else 1.0,
        1.0 if radius is None else radius,
    )
    return numbers, {
        "HAS_ALPHA": has_alpha,
        "KIND": kind.value,
        "CLAMP": clamp,
        "RESIZE": radius is not None,
    }


def step_forward(
    x: Tensor, u: Tensor, alpha: Tensor | float, p: float, max_angle: float | None, radius: float | None
) -> Tensor:
    """Value of the step, contiguous, in x's dtype. Shapes ``[..., d]``; any of the 16 and 32 bit float dtypes."""
    y = empty_like(x)
    if x.numel() == 0:
        return y
    rows_x, rows_u = as_rows(x), as_rows(u)
    (num_rows, dim), (numbers, kinds) = rows_x.shape, _options(x, alpha, p, max_angle, radius)
    tile = tile_of(num_rows, dim, FORWARD_LIMIT)
    start(
        kernels.step_forward, -(-num_rows // tile["ROWS"]), x,
        rows_x, rows_u, y, _beside(alpha, x), num_rows, dim, rows_x.stride(0),
        rows_u.stride(0), *numbers, **kinds, **tile,
    )  # fmt: skip
    return y


def step_backward(
    g: Tensor,
    x: Tensor,
    u: Tensor,
    alpha: Tensor | float,
    p: float,
    max_angle: float | None,
    radius: float | None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients by x, u and alpha, contiguous, in their dtypes; None where ``needs`` is false."""
    need_alpha = isinstance(alpha, Tensor) and needs[2]
    grad_x, grad_u = (empty_like(like) if need else None for like, need in zip((x, u), needs[:2], strict=True))
    num_rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    per_row = x.new_empty(num_rows, dtype=torch.float32) if need_alpha else None
    if num_rows and (grad_x is not None or grad_u is not None or need_alpha):
        rows_g, rows_x, rows_u = as_rows(g), as_rows(x), as_rows(u)
        numbers, kinds = _options(x, alpha, p, max_angle, radius)
        tile = tile_of(num_rows, x.shape[-1], BACKWARD_LIMIT)
        outputs = (rows_x if value is None else value for value in (grad_x, grad_u, per_row))
        start(
            kernels.step_backward, -(-num_rows // tile["ROWS"]), x,
            rows_g, rows_x, rows_u, _beside(alpha, x), *outputs, num_rows, x.shape[-1],
            rows_g.stride(0), rows_x.stride(0), rows_u.stride(0), *numbers,
            NEED_X=grad_x is not None, NEED_U=grad_u is not None, NEED_ALPHA=need_alpha, **kinds, **tile,
        )  # fmt: skip
    grad_alpha = None
    if per_row is not None and isinstance(alpha, Tensor):
        grad_alpha = per_row.sum().to(alpha).reshape(alpha.shape)
    return grad_x, grad_u, grad_alpha
