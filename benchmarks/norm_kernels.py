"""Triton kernels of add and RMSNorm, laid out as those of the step; ``norms.py`` makes operations of them.

Import this only where triton is known to be there.
"""

# As in geonorm/ops/triton.py: no `from __future__ import annotations`, since triton reads tl.constexpr from them.
import torch
import triton
import triton.language as tl
from torch import Tensor

from geonorm.ops import launch
from geonorm.ops.triton import divide, load, power_of_two, row_sum, store

# Exponent field of the smallest float32 power of two that a row is divided by: eps bounds a norm from below, and eps
# over its square must not overflow.
NORM_SIZE = tl.constexpr(127 - 40)


@triton.jit
def _stream(x_ptr, u_ptr, rows, x_stride, u_stride, cols, mask, alpha, y_ptr, ADD: tl.constexpr, ROUND: tl.constexpr):
    """What is normalised: ``alpha x + u``, or x where it holds the sum already; rounded as it is stored."""
    z = load(x_ptr, rows, x_stride, cols, mask)
    if ADD:
        z = alpha * z + load(u_ptr, rows, u_stride, cols, mask)
    if ROUND:
        z = z.to(y_ptr.dtype.element_ty).to(tl.float32)
    return z


@triton.jit
def norm_forward(
    x_ptr, u_ptr, weight_ptr, sum_ptr, y_ptr, num_rows, dim, x_stride, u_stride, alpha, eps,
    SUM: tl.constexpr, LOOPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RMSNorm of ``alpha x + u`` with a gain; stores the sum as well where SUM is set."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = rows < num_rows
    cols = tl.arange(0, BLOCK)[None, :]
    if LOOPED:
        largest = tl.zeros_like(rows).to(tl.float32)
        square = largest
        scale, inverse = power_of_two(largest, NORM_SIZE)
        for start in range(0, dim, BLOCK):
            mask = inside & (start + cols < dim)
            z = _stream(x_ptr, u_ptr, rows, x_stride, u_stride, start + cols, mask, alpha, y_ptr, True, SUM)
            largest = tl.maximum(largest, tl.max(tl.abs(z), axis=1, keep_dims=True))
            new_scale, inverse = power_of_two(largest, NORM_SIZE)
            change = scale * inverse
            scale = new_scale
            z = z * inverse
            square = square * change * change + row_sum(z * z)
    else:
        mask = inside & (cols < dim)
        z = _stream(x_ptr, u_ptr, rows, x_stride, u_stride, cols, mask, alpha, y_ptr, True, SUM)
        scale, inverse = power_of_two(tl.max(tl.abs(z), axis=1, keep_dims=True), NORM_SIZE)
        square = row_sum(z * inverse * (z * inverse))
    size = divide(square, dim + tl.zeros_like(square)) + eps * inverse * inverse
    factor = divide(1.0, tl.math.sqrt_rn(size)) * inverse
    for start in range(0, dim, BLOCK):
        now = start + cols
        mask = inside & (now < dim)
        if LOOPED:
            z = _stream(x_ptr, u_ptr, rows, x_stride, u_stride, now, mask, alpha, y_ptr, True, SUM)
        if SUM:
            store(sum_ptr, rows, dim, now, z, mask)
        weight = tl.load(weight_ptr + now, mask=now < dim, other=0.0).to(tl.float32)
        store(y_ptr, rows, dim, now, z * factor * weight, mask)


@triton.jit
def norm_backward(
    g_ptr, g_sum_ptr, x_ptr, u_ptr, weight_ptr, grad_ptr, scaled_ptr, partial_ptr, num_rows, num_tiles, dim, g_stride,
    g_sum_stride, x_stride, u_stride, alpha, eps,
    ADD: tl.constexpr, SUM: tl.constexpr, SCALED: tl.constexpr, WEIGHT: tl.constexpr, LOOPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient by the sum, alpha times it where SCALED is set, and one part a program of the gradient by the gain."""
    cols = tl.arange(0, BLOCK)[None, :]
    program = tl.program_id(0)
    gain_sum = tl.zeros([1, BLOCK], tl.float32)
    for tile in range(program, num_tiles, tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = rows < num_rows
        if LOOPED:
            largest = tl.zeros_like(rows).to(tl.float32)
            square, dot = largest, largest
            scale, inverse = power_of_two(largest, NORM_SIZE)
            for start in range(0, dim, BLOCK):
                now = start + cols
                mask = inside & (now < dim)
                z = _stream(x_ptr, u_ptr, rows, x_stride, u_stride, now, mask, alpha, g_ptr, ADD, False)
                weight = tl.load(weight_ptr + now, mask=now < dim, other=0.0).to(tl.float32)
                g = load(g_ptr, rows, g_stride, now, mask)
                largest = tl.maximum(largest, tl.max(tl.abs(z), axis=1, keep_dims=True))
                new_scale, inverse = power_of_two(largest, NORM_SIZE)
                change = scale * inverse
                scale = new_scale
                square = square * change * change + row_sum(z * inverse * (z * inverse))
                dot = dot * change + row_sum(g * weight * (z * inverse))
        else:
            mask = inside & (cols < dim)
            z = _stream(x_ptr, u_ptr, rows, x_stride, u_stride, cols, mask, alpha, g_ptr, ADD, False)
            weight = tl.load(weight_ptr + cols, mask=cols < dim, other=0.0).to(tl.float32)
            g = load(g_ptr, rows, g_stride, cols, mask)
            scale, inverse = power_of_two(tl.max(tl.abs(z), axis=1, keep_dims=True), NORM_SIZE)
            square = row_sum(z * inverse * (z * inverse))
            dot = row_sum(g * weight * (z * inverse))
        size = divide(square, dim + tl.zeros_like(square)) + eps * inverse * inverse
        root = divide(1.0, tl.math.sqrt_rn(size))
        dot = divide(dot * root, dim + tl.zeros_like(square))
        for start in range(0, dim, BLOCK):
            now = start + cols
            mask = inside & (now < dim)
            if LOOPED:
                z = _stream(x_ptr, u_ptr, rows, x_stride, u_stride, now, mask, alpha, g_ptr, ADD, False)
                weight = tl.load(weight_ptr + now, mask=now < dim, other=0.0).to(tl.float32)
                g = load(g_ptr, rows, g_stride, now, mask)
            normed = z * inverse * root
            grad = (g * weight - normed * dot) * (root * inverse)
            if SUM:
                grad += load(g_sum_ptr, rows, g_sum_stride, now, mask)
            store(grad_ptr, rows, dim, now, grad, mask)
            if SCALED:
                store(scaled_ptr, rows, dim, now, alpha * grad, mask)
            if WEIGHT:
                part = tl.sum(tl.where(mask, g * normed, 0.0), axis=0, keep_dims=True)
                if LOOPED:
                    place = partial_ptr + program.to(tl.int64) * dim + now
                    tl.store(place, tl.load(place, mask=now < dim, other=0.0) + part, mask=now < dim)
                    tl.debug_barrier()
                else:
                    gain_sum += part
    if WEIGHT and not LOOPED:
        tl.store(partial_ptr + program.to(tl.int64) * dim + cols, gain_sum, mask=cols < dim)


def launch_forward(
    x: Tensor, u: Tensor, weight: Tensor, alpha: float, eps: float, with_sum: bool
) -> tuple[Tensor | None, Tensor]:
    """RMSNorm of ``alpha x + u`` with a gain, and the sum (rounded to x's dtype, then normalised) where asked for."""
    y, total = launch.empty_like(x), launch.empty_like(x) if with_sum else None
    if x.numel() == 0:
        return total, y
    rows_x, rows_u = launch.as_rows(x), launch.as_rows(u)
    num_rows, dim = rows_x.shape
    tile = launch.tile_of(num_rows, dim, launch.FORWARD_LIMIT)
    launch.start(
        norm_forward, -(-num_rows // tile["ROWS"]), x,
        rows_x, rows_u, weight.contiguous(), y if total is None else total, y, num_rows, dim, rows_x.stride(0),
        rows_u.stride(0), float(alpha), float(eps), SUM=with_sum, **tile,
    )  # fmt: skip
    return total, y


def launch_backward(
    g: Tensor,
    g_sum: Tensor | None,
    x: Tensor,
    u: Tensor | None,
    weight: Tensor,
    alpha: float,
    eps: float,
    apart: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients by x, by u and by the gain (summed in float32); x holds the sum itself where u is None.

    The first two are the same tensor, in u's dtype, unless they are told ``apart``, which needs u.
    """
    grad_u = launch.empty_like(x if u is None else u)
    grad_x = launch.empty_like(x) if apart else grad_u
    if x.numel() == 0:
        return grad_x, grad_u, torch.zeros_like(weight) if need_weight else None
    rows_g, rows_x = launch.as_rows(g), launch.as_rows(x)
    rows_u = rows_x if u is None else launch.as_rows(u)
    rows_g_sum = rows_g if g_sum is None else launch.as_rows(g_sum)
    num_rows, dim = rows_x.shape
    tile = launch.tile_of(num_rows, dim, launch.BACKWARD_LIMIT)
    num_tiles = -(-num_rows // tile["ROWS"])
    wide = 4 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
    programs = min(num_tiles, wide)
    partial = x.new_zeros((programs, dim) if need_weight else (1,), dtype=torch.float32)
    launch.start(
        norm_backward, programs, x,
        rows_g, rows_g_sum, rows_x, rows_u, weight.contiguous(), grad_u, grad_x, partial, num_rows, num_tiles, dim,
        rows_g.stride(0), rows_g_sum.stride(0), rows_x.stride(0), rows_u.stride(0), float(alpha), float(eps),
        ADD=u is not None, SUM=g_sum is not None, SCALED=apart, WEIGHT=need_weight, **tile,
    )  # fmt: skip
    return grad_x, grad_u, partial.sum(0).to(weight.dtype).reshape(weight.shape) if need_weight else None
