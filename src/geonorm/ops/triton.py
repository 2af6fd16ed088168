"""The Triton kernels of the step. The only file of geonorm that imports triton.

A program handles a tile of ``ROWS x BLOCK`` entries. Where a row fits in a tile every input is read once; a wider row
(``LOOPED``, one row a program) is walked block by block, two or three times, and stays in the cache in between.
Arithmetic is float32. Formulas and names are those of ``ops/autograd.py``, derived in ``docs/math.md``.
"""

# Kernels are compiled by triton, not run by Python: names bound under one compile-time branch and used under the same
# branch further down are no fault there, nor are plain values for tl.constexpr; and triton may be absent.
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

# Annotations must stay objects, since triton reads tl.constexpr from them: no `from __future__ import annotations`.
import triton
import triton.language as tl

# Values of KIND: which retraction a kernel is compiled for.
EXPONENTIAL = tl.constexpr(0)
PROJECTION = tl.constexpr(1)
CAYLEY = tl.constexpr(2)
GENERAL = tl.constexpr(3)
# Exponent field of the smallest float32 power of two that a row is divided by.
ANY_SIZE = tl.constexpr(1)
# As in geometry.is_long.
PROJECT_AGAIN_ABOVE = tl.constexpr(4.0)


@triton.jit
def load(ptr, rows, row_stride, cols, mask):
    """Entries in float32. Offsets have 64 bits: rows x stride passes 2^31 in a batch of a few million tokens."""
    return tl.load(ptr + rows.to(tl.int64) * row_stride + cols, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(ptr, rows, row_stride, cols, value, mask):
    """As :func:`load`, in the dtype of the tensor."""
    tl.store(ptr + rows.to(tl.int64) * row_stride + cols, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_sum(x):
    """One number a row of the tile."""
    return tl.sum(x, axis=1, keep_dims=True)


@triton.jit
def divide(a, b):
    """Correctly rounded: the plain operator is an approximation on a GPU, and these are a few numbers a row."""
    return tl.math.div_rn(a + tl.zeros_like(b), b)


@triton.jit
def power_of_two(largest, LOWEST: tl.constexpr):
    """Power of two near ``largest``, 1 for zero, and its inverse. Products with either are exact."""
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, LOWEST << 23), 253 << 23)
    bits = tl.where(largest > 0, bits, 127 << 23)
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def _atan(z):
    """Arc tangent for z >= 0: reduced to |z| <= tan(pi/8), then the minimax polynomial of Cephes' atanf."""
    far, middle = z > 2.414213562373095, z > 0.4142135623730950
    reduced = tl.where(far, -divide(1.0, tl.where(far, z, 1.0)), tl.where(middle, divide(z - 1.0, z + 1.0), z))
    base = tl.where(far, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0))
    s = reduced * reduced
    series = ((8.05374449538e-2 * s - 1.38776856032e-1) * s + 1.99777106478e-1) * s - 3.33329491539e-1
    return base + (series * s * reduced + reduced)


@triton.jit
def _sinc_slope(q, cos, sinc):
    """Derivative of sinc(q) = sin(sqrt q) / sqrt q; the closed form cancels below 1."""
    z = tl.minimum(q, 1.0)
    series = 6.0 / 6227020800.0 - z * (7.0 / 1307674368000.0)
    series = series * z - 5.0 / 39916800.0
    series = series * z + 4.0 / 362880.0
    series = series * z - 3.0 / 5040.0
    series = series * z + 2.0 / 120.0
    series = series * z - 1.0 / 6.0
    return tl.where(q < 1.0, series, divide(cos - sinc, 2.0 * tl.maximum(q, 1.0)))


@triton.jit
def _atan_ratio_slope(rho, ratio, speed):
    """Derivative of A(rho) = atan(sqrt rho) / sqrt rho; the closed form cancels below about 0.2."""
    z = tl.minimum(rho, 0.2)
    series = 0.0 * z
    for i in tl.static_range(13):
        n = 13 - i
        series = series * z + (1 - 2 * (n % 2)) * n / (2 * n + 1)
    return tl.where(rho < 0.2, series, divide(speed - ratio, 2.0 * tl.maximum(rho, 0.2)))


@triton.jit
def _factors(q, p, cos_max, sin_max, q_max, KIND: tl.constexpr, CLAMP: tl.constexpr):
    """C = cos(theta) and S = sin(theta) / t, smooth at q = 0."""
    t = tl.math.sqrt_rn(q)
    far = tl.where(q > 0, t, 1.0)
    if KIND == PROJECTION:
        cos = divide(1.0, tl.math.sqrt_rn(1.0 + q))
        sinr = cos
    elif KIND == CAYLEY:
        sinr = divide(1.0, 1.0 + 0.25 * q)
        cos = 2.0 * sinr - 1.0
    else:
        theta = t
        if KIND == GENERAL:
            theta = p * _atan(divide(t, p + 0.0 * t))
        cos = tl.cos(theta)
        sinr = tl.where(q > 0, divide(tl.sin(theta), far), 1.0)
    if CLAMP:
        clamped = q > q_max
        cos = tl.where(clamped, cos_max, cos)
        sinr = tl.where(clamped, divide(sin_max, far), sinr)
    return cos, sinr


@triton.jit
def _slopes(q, cos, sinr, p, q_max, KIND: tl.constexpr, CLAMP: tl.constexpr):
    """dC/dq and dS/dq, given what ``_factors`` returned."""
    if KIND == PROJECTION:
        sin_slope = -0.5 * sinr * sinr * sinr
        cos_slope = sin_slope
    elif KIND == CAYLEY:
        sin_slope = -0.25 * sinr * sinr
        cos_slope = 2.0 * sin_slope
    elif KIND == EXPONENTIAL:
        cos_slope = -0.5 * sinr
        sin_slope = _sinc_slope(q, cos, sinr)
    else:
        z = divide(tl.math.sqrt_rn(q), p + 0.0 * q)
        ratio = tl.where(z > 0, divide(_atan(z), tl.where(z > 0, z, 1.0)), 1.0)
        speed = divide(1.0, 1.0 + z * z)
        theta = p * _atan(z)
        sinc = tl.where(theta > 0, divide(tl.sin(theta), tl.where(theta > 0, theta, 1.0)), 1.0)
        cos_slope = -0.5 * sinr * speed
        bend = divide(_atan_ratio_slope(z * z, ratio, speed) * sinc, p * p + 0.0 * q)
        sin_slope = bend + ratio * ratio * speed * _sinc_slope(theta * theta, tl.cos(theta), sinc)
    if CLAMP:
        clamped = q > q_max
        cos_slope = tl.where(clamped, 0.0, cos_slope)
        sin_slope = tl.where(clamped, divide(-0.5 * sinr, tl.where(clamped, q, 1.0)), sin_slope)
    return cos_slope, sin_slope


@triton.jit
def _safe_inverse(square):
    empty = square == 0.0
    return tl.where(empty, 0.0, divide(1.0, tl.where(empty, 1.0, square))), empty


@triton.jit
def _left_along(ratio, v_x, inverse_square):
    """What rounding has left of x in v where u had a long part along x, in units of x; elsewhere 0."""
    return tl.where(tl.abs(ratio) > PROJECT_AGAIN_ABOVE, v_x * inverse_square, 0.0)


@triton.jit
def _held(x_ptr, u_ptr, rows, x_stride, u_stride, cols, mask):
    """A row that fits in a tile: x and v, scaled, and the numbers that they come down to."""
    x = load(x_ptr, rows, x_stride, cols, mask)
    scale, inverse = power_of_two(tl.max(tl.abs(x), axis=1, keep_dims=True), ANY_SIZE)
    x = x * inverse
    u = load(u_ptr, rows, u_stride, cols, mask) * inverse
    inverse_square, empty = _safe_inverse(row_sum(x * x))
    ratio = row_sum(x * u) * inverse_square
    v = u - ratio * x
    rest = _left_along(ratio, row_sum(v * x), inverse_square)
    v = v - rest * x
    return x, v, scale, inverse, inverse_square, empty, ratio, rest, row_sum(v * v)


@triton.jit
def _walked(
    g_ptr, x_ptr, u_ptr, rows, inside, dim, g_stride, x_stride, u_stride, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """The numbers of a wider row, in two walks; with GRADIENT also the sums of g's products with x and with v.

    The first walk takes scale, <x,x> and <x,u>: the sums are rescaled whenever a larger entry turns up.
    """
    cols = tl.arange(0, BLOCK)[None, :]
    largest = tl.zeros_like(rows).to(tl.float32)
    square, dot = largest, largest
    scale, inverse = power_of_two(largest, ANY_SIZE)
    for start in range(0, dim, BLOCK):
        mask = inside & (start + cols < dim)
        x = load(x_ptr, rows, x_stride, start + cols, mask)
        u = load(u_ptr, rows, u_stride, start + cols, mask)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1, keep_dims=True))
        new_scale, inverse = power_of_two(largest, ANY_SIZE)
        change = scale * inverse
        scale = new_scale
        x = x * inverse
        square = square * change * change + row_sum(x * x)
        dot = dot * change * change + row_sum(x * (u * inverse))
    inverse_square, empty = _safe_inverse(square)
    ratio = dot * inverse_square
    v_square = tl.zeros_like(square)
    v_x = tl.zeros_like(square)
    g_x = tl.zeros_like(square)
    g_v = tl.zeros_like(square)
    for start in range(0, dim, BLOCK):
        mask = inside & (start + cols < dim)
        x = load(x_ptr, rows, x_stride, start + cols, mask) * inverse
        v = load(u_ptr, rows, u_stride, start + cols, mask) * inverse - ratio * x
        v_square += row_sum(v * v)
        v_x += row_sum(v * x)
        if GRADIENT:
            g = load(g_ptr, rows, g_stride, start + cols, mask)
            g_x += row_sum(g * x)
            g_v += row_sum(g * v)
    rest = _left_along(ratio, v_x, inverse_square)
    v_square = tl.maximum(v_square - rest * rest * square, 0.0)
    return scale, inverse, inverse_square, empty, ratio, rest, v_square, g_x, g_v - rest * g_x


@triton.jit
def step_forward(
    x_ptr, u_ptr, y_ptr, alpha_ptr, num_rows, dim, x_stride, u_stride, alpha, p, cos_max, sin_max, q_max, radius,
    HAS_ALPHA: tl.constexpr, KIND: tl.constexpr, CLAMP: tl.constexpr, RESIZE: tl.constexpr, LOOPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y from x and u."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = rows < num_rows
    cols = tl.arange(0, BLOCK)[None, :]
    mask = inside & (cols < dim)
    if HAS_ALPHA:
        alpha = tl.load(alpha_ptr).to(tl.float32)
    if LOOPED:
        scale, inverse, inverse_square, empty, ratio, rest, v_square, _, _ = _walked(
            x_ptr, x_ptr, u_ptr, rows, inside, dim, x_stride, x_stride, u_stride, False, BLOCK
        )
    else:
        x, v, scale, inverse, inverse_square, empty, ratio, rest, v_square = _held(
            x_ptr, u_ptr, rows, x_stride, u_stride, cols, mask
        )
    q = tl.where(empty, 0.0, alpha * alpha * v_square * inverse_square)
    cos, sinr = _factors(q, p, cos_max, sin_max, q_max, KIND, CLAMP)
    resize = scale
    if RESIZE:
        resize = radius * tl.math.sqrt_rn(inverse_square)
    cos = tl.where(empty, 0.0, cos)
    gain = tl.where(empty, 0.0, alpha * sinr)
    if LOOPED:
        for start in range(0, dim, BLOCK):
            mask = inside & (start + cols < dim)
            x = load(x_ptr, rows, x_stride, start + cols, mask) * inverse
            v = load(u_ptr, rows, u_stride, start + cols, mask) * inverse - ratio * x - rest * x
            store(y_ptr, rows, dim, start + cols, (cos * x + gain * v) * resize, mask)
    else:
        store(y_ptr, rows, dim, cols, (cos * x + gain * v) * resize, mask)


@triton.jit
def step_backward(
    g_ptr, x_ptr, u_ptr, alpha_ptr, grad_x_ptr, grad_u_ptr, grad_alpha_ptr, num_rows, dim, g_stride, x_stride,
    u_stride, alpha, p, cos_max, sin_max, q_max, radius,
    HAS_ALPHA: tl.constexpr, NEED_X: tl.constexpr, NEED_U: tl.constexpr, NEED_ALPHA: tl.constexpr,
    KIND: tl.constexpr, CLAMP: tl.constexpr, RESIZE: tl.constexpr, LOOPED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients by x and u, and one number a row whose sum is the gradient by alpha."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = rows < num_rows
    cols = tl.arange(0, BLOCK)[None, :]
    mask = inside & (cols < dim)
    if HAS_ALPHA:
        alpha = tl.load(alpha_ptr).to(tl.float32)
    if LOOPED:
        scale, inverse, inverse_square, empty, ratio, rest, v_square, g_x, g_v = _walked(
            g_ptr, x_ptr, u_ptr, rows, inside, dim, g_stride, x_stride, u_stride, True, BLOCK
        )
    else:
        # First, so that it is on its way while the sums are taken.
        g = load(g_ptr, rows, g_stride, cols, mask)
        x, v, scale, inverse, inverse_square, empty, ratio, rest, v_square = _held(
            x_ptr, u_ptr, rows, x_stride, u_stride, cols, mask
        )
        g_x = row_sum(g * x)
        g_v = row_sum(g * v)
    q = tl.where(empty, 0.0, alpha * alpha * v_square * inverse_square)
    cos, sinr = _factors(q, p, cos_max, sin_max, q_max, KIND, CLAMP)
    cos_slope, sin_slope = _slopes(q, cos, sinr, p, q_max, KIND, CLAMP)
    cos = tl.where(empty, 0.0, cos)
    sinr = tl.where(empty, 0.0, sinr)
    resize = tl.full(g_x.shape, 1.0, tl.float32)
    if RESIZE:
        resize = radius * tl.math.sqrt_rn(inverse_square) * inverse
    g_x = tl.where(empty, 0.0, g_x * resize)
    g_v = tl.where(empty, 0.0, g_v * resize)
    slope = cos_slope * g_x + alpha * sin_slope * g_v
    gain = alpha * sinr
    along = gain * g_x * inverse_square
    across = 2.0 * alpha * alpha * slope * inverse_square
    outward = 2.0 * slope * q
    if RESIZE:
        outward += cos * g_x + gain * g_v
    outward *= inverse_square
    if NEED_ALPHA:
        per_row = (sinr * g_v + 2.0 * alpha * slope * tl.where(empty, 0.0, v_square) * inverse_square) * scale
        tl.store(grad_alpha_ptr + rows, per_row, mask=inside)
    if LOOPED:
        for start in range(0, dim, BLOCK):
            mask = inside & (start + cols < dim)
            g = load(g_ptr, rows, g_stride, start + cols, mask) * resize
            x = load(x_ptr, rows, x_stride, start + cols, mask) * inverse
            v = load(u_ptr, rows, u_stride, start + cols, mask) * inverse - ratio * x - rest * x
            grad_u = gain * g + across * v - along * x
            if NEED_U:
                store(grad_u_ptr, rows, dim, start + cols, grad_u, mask)
            if NEED_X:
                grad_x = cos * g - (ratio + rest) * grad_u - along * v - outward * x
                store(grad_x_ptr, rows, dim, start + cols, grad_x, mask)
    else:
        g = g * resize
        grad_u = gain * g + across * v - along * x
        if NEED_U:
            store(grad_u_ptr, rows, dim, cols, grad_u, mask)
        if NEED_X:
            store(grad_x_ptr, rows, dim, cols, cos * g - (ratio + rest) * grad_u - along * v - outward * x, mask)


# Decided by TRITON_INTERPRET, for triton's own functions when it was first imported, for these when this file was.
INTERPRETED = not isinstance(step_forward, triton.JITFunction) and not isinstance(tl.sum, triton.JITFunction)
