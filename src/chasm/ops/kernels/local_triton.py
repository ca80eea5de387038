"""The kernels of `ops.local`: float32 inside, deterministic (sums over programs go through memory, no atomics).

    forward    _activate_kernel      z -> a = gelu(u), u = the depthwise 3x3 of z
               products.product      y = x + W a + bias
    backward   products.product      h = W^T g (cuBLAS in half precision)
               _activate_kernel      z, h -> a again, and h gelu'(u) in place of h
               products.gram_and_sum g a^T, and the sum of g
               _spread_kernel        the adjoint of the depthwise 3x3 on h, and parts of its weights' gradients

A program of a depthwise kernel goes down ROWS rows of a strip of BLOCK_C channels by BLOCK_W columns. A row is loaded
once, at three shifts, and added to the three output rows it touches; only two partly summed rows are carried along.
Sizes come as units * UNIT, so that the compiler knows how rows are aligned: 170 columns load as pairs.
"""

# mypy: disable-error-code="no-untyped-def"
# (triton.jit functions have no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

from chasm.ops.kernels import products
from chasm.ops.kernels.launch import alignment, cdiv, launch, power_of_2
from chasm.ops.library import is_fake

TILE = 256  # numbers in a row of a strip, BLOCK_C * BLOCK_W
FORWARD_ROWS, BACKWARD_ROWS = 16, 32  # of a strip


@triton.jit
def _strip(pid, C, H, W, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return number, start, channels, first row and columns of this program's strip, and the offsets of a tile."""
    columns, strips, groups = tl.cdiv(W, BLOCK_W), tl.cdiv(H, ROWS), tl.cdiv(C, BLOCK_C)
    w0 = pid % columns * BLOCK_W
    h0 = pid // columns % strips * ROWS
    c0 = pid // (columns * strips) % groups * BLOCK_C
    b = pid // (columns * strips * groups)
    part = b * columns * strips + pid % (columns * strips)
    c = tl.arange(0, BLOCK_C)
    w = w0 + tl.arange(0, BLOCK_W)
    start = (tl.cast(b, tl.int64) * C + c0) * H * W
    return part, start, c0 + c, h0, w[None, :], c[:, None] * (H * W) + w[None, :]


@triton.jit
def _width(row, first, end, W):
    """Return the number of columns of this row: 0 outside first <= row < end."""
    return tl.where((row >= first) & (row < end), W, 0)


@triton.jit
def _load_row(ptr, row, end, W, w, live):
    """Return a row at columns w - 1, w, w + 1; zeros outside the image, and from row `end` on."""
    width = _width(row, 0, end, W)
    at = ptr + row * W
    left = tl.load(at - 1, mask=live & (w >= 1) & (w < width), other=0.0)
    centre = tl.load(at, mask=live & (w < width), other=0.0)
    right = tl.load(at + 1, mask=live & (w + 1 < width), other=0.0)
    return left.to(tl.float32), centre.to(tl.float32), right.to(tl.float32)


@triton.jit
def _load_own(ptr, row, first, end, W, w, live):
    """Return a row; zeros unless it belongs to the strip, first <= row < end."""
    return tl.load(ptr + row * W, mask=live & (w < _width(row, first, end, W)), other=0.0).to(tl.float32)


@triton.jit
def _load_weights(w_ptr, c, C, FLIP: tl.constexpr):
    """Return the 3x3 weights of every channel, or those of its adjoint, as nine columns."""
    at = w_ptr + c[:, None] * 9
    step = 1
    if FLIP:
        at += 8
        step = -1
    live = (c < C)[:, None]
    k00 = tl.load(at, mask=live, other=0.0).to(tl.float32)
    k01 = tl.load(at + step, mask=live, other=0.0).to(tl.float32)
    k02 = tl.load(at + 2 * step, mask=live, other=0.0).to(tl.float32)
    k10 = tl.load(at + 3 * step, mask=live, other=0.0).to(tl.float32)
    k11 = tl.load(at + 4 * step, mask=live, other=0.0).to(tl.float32)
    k12 = tl.load(at + 5 * step, mask=live, other=0.0).to(tl.float32)
    k20 = tl.load(at + 6 * step, mask=live, other=0.0).to(tl.float32)
    k21 = tl.load(at + 7 * step, mask=live, other=0.0).to(tl.float32)
    k22 = tl.load(at + 8 * step, mask=live, other=0.0).to(tl.float32)
    return k00, k01, k02, k10, k11, k12, k20, k21, k22


@triton.jit
def _normal(u):
    """Return the density phi(u) and the distribution function Phi(u) of the standard normal: gelu(u) = u Phi(u).

    Phi(-|u|) = e^{-u^2/2} (a_1 t + ... + a_5 t^5) with t = 1 / (1 + p |u|), to 7.5e-8 (Abramowitz and Stegun 7.1.26).
    This takes half the instructions of erf, and shares its exponential with the density.
    """
    e = tl.exp2(u * u * -0.7213475204444817)
    t = tl.rsqrt(1.0 + 0.23164189 * tl.abs(u))  # squared below: a division takes six more instructions
    t = t * t
    tail = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
    tail = tail * t * e
    return 0.3989422804014327 * e, tl.where(u > 0.0, 1.0 - tail, tail)


@triton.jit
def _activate_kernel(
    z_ptr, w_ptr, bias_ptr, a_ptr, h_ptr, C, H, W_units,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """a = gelu(u), u = the 3x3 of z; BACKWARD: also h *= gelu'(u), in place."""
    W = W_units * UNIT
    _, start, c, h0, w, tile = _strip(tl.program_id(0), C, H, W, ROWS, BLOCK_C, BLOCK_W)
    live = (c < C)[:, None]
    k00, k01, k02, k10, k11, k12, k20, k21, k22 = _load_weights(w_ptr, c, C, False)
    bias = tl.load(bias_ptr + c, mask=c < C, other=0.0).to(tl.float32)[:, None]
    z, end = z_ptr + start + tile, tl.minimum(H, h0 + ROWS + 1)
    left, mid, right = _load_row(z, h0 - 1, end, W, w, live)
    below = bias + k00 * left + k01 * mid + k02 * right  # output row h0, summed so far
    left, mid, right = _load_row(z, h0, end, W, w, live)
    here = below + k10 * left + k11 * mid + k12 * right
    below = bias + k00 * left + k01 * mid + k02 * right
    left, mid, right = _load_row(z, h0 + 1, end, W, w, live)
    for row in range(h0, h0 + ROWS):
        u = here + k20 * left + k21 * mid + k22 * right
        here = below + k10 * left + k11 * mid + k12 * right
        below = bias + k00 * left + k01 * mid + k02 * right
        left, mid, right = _load_row(z, row + 2, end, W, w, live)  # a row ahead
        out = start + row * W + tile
        inside = live & (w < _width(row, 0, H, W))
        density, half = _normal(u)
        if BACKWARD:
            h = tl.load(h_ptr + out, mask=inside, other=0.0).to(tl.float32)
            tl.store(h_ptr + out, (h * (half + u * density)).to(h_ptr.dtype.element_ty), mask=inside)
        tl.store(a_ptr + out, (u * half).to(a_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _spread_kernel(
    h_ptr, z_ptr, w_ptr, gz_ptr, parts_ptr, C, H, W_units,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """gz[i, j] = sum of k[s, t] h[i+1-s, j+1-t], and with the same values gk[s, t] = sum of z[i, j] h[i+1-s, j+1-t]."""
    W = W_units * UNIT
    part, start, c, h0, w, tile = _strip(tl.program_id(0), C, H, W, ROWS, BLOCK_C, BLOCK_W)
    live = (c < C)[:, None]
    # The adjoint is the 3x3 with the flipped weights: k00 here is what the forward calls k22.
    k00, k01, k02, k10, k11, k12, k20, k21, k22 = _load_weights(w_ptr, c, C, True)
    h, z = h_ptr + start + tile, z_ptr + start + tile
    h_end, z_end = tl.minimum(H, h0 + ROWS + 1), tl.minimum(H, h0 + ROWS)
    zero = tl.zeros([BLOCK_C, BLOCK_W], tl.float32)
    here, below = zero, zero
    g00, g01, g02, g10, g11, g12, g20, g21, g22, total = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
    for row in range(h0 - 1, h0 + ROWS + 1):
        left, mid, right = _load_row(h, row, h_end, W, w, live)
        above_z = _load_own(z, row - 1, h0, z_end, W, w, live)
        here_z = _load_own(z, row, h0, z_end, W, w, live)
        below_z = _load_own(z, row + 1, h0, z_end, W, w, live)
        done = here + k20 * left + k21 * mid + k22 * right
        here = below + k10 * left + k11 * mid + k12 * right
        below = k00 * left + k01 * mid + k02 * right
        g00 += above_z * right  # the forward's indices: z[row-1+s, j] with h[row, j+1-t]
        g01 += above_z * mid
        g02 += above_z * left
        g10 += here_z * right
        g11 += here_z * mid
        g12 += here_z * left
        g20 += below_z * right
        g21 += below_z * mid
        g22 += below_z * left
        total += tl.where(w < _width(row, h0, z_end, W), mid, 0.0)
        inside = live & (w < _width(row - 1, h0, z_end, W))
        tl.store(gz_ptr + start + (row - 1) * W + tile, done.to(gz_ptr.dtype.element_ty), mask=inside)
    at, live = parts_ptr + tl.cast(part, tl.int64) * 10 * C + c, c < C  # (parts, 10, C)
    tl.store(at, tl.sum(g00, 1), mask=live)
    tl.store(at + C, tl.sum(g01, 1), mask=live)
    tl.store(at + 2 * C, tl.sum(g02, 1), mask=live)
    tl.store(at + 3 * C, tl.sum(g10, 1), mask=live)
    tl.store(at + 4 * C, tl.sum(g11, 1), mask=live)
    tl.store(at + 5 * C, tl.sum(g12, 1), mask=live)
    tl.store(at + 6 * C, tl.sum(g20, 1), mask=live)
    tl.store(at + 7 * C, tl.sum(g21, 1), mask=live)
    tl.store(at + 8 * C, tl.sum(g22, 1), mask=live)
    tl.store(at + 9 * C, tl.sum(total, 1), mask=live)


def forward(
    z: Tensor, x: Tensor | None, dw_weight: Tensor, dw_bias: Tensor, pw_weight: Tensor, pw_bias: Tensor
) -> Tensor:
    """Return x + P(gelu(L(z))) in the dtype of x + z: L is the depthwise 3x3, P the 1x1 convolution.

    Args:
        z: contiguous (B, C, H, W).
        x: contiguous (B, C, H, W), or None to add nothing.
        dw_weight: of L, (C, 1, 3, 3).
        dw_bias: of L, (C,).
        pw_weight: of P, (C, C, 1, 1).
        pw_bias: of P, (C,).
    """
    a = torch.empty_like(z)
    y = torch.empty_like(z, dtype=z.dtype if x is None else torch.promote_types(x.dtype, z.dtype))
    _activate(z, dw_weight, dw_bias, a)
    return products.product(pw_weight.flatten(1).to(z.dtype), a, pw_bias, x, out=y)


def backward(
    g: Tensor, z: Tensor, dw_weight: Tensor, dw_bias: Tensor, pw_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of z, dw_weight, dw_bias, pw_weight and pw_bias; those of parameters in float32.

    Args:
        g: gradient of the result, in the dtype of z.
        z: as in `forward`.
        dw_weight: as in `forward`.
        dw_bias: as in `forward`.
        pw_weight: as in `forward`.
    """
    h, a = torch.empty_like(z), torch.empty_like(z)
    W = pw_weight.flatten(1).to(z.dtype).t()
    if z.dtype == torch.float32 or z.shape[2:].numel() % 8:
        products.product(W, g, out=h)
    else:  # nothing to add, and rows are aligned: cuBLAS is faster
        torch.bmm(W.expand(len(z), -1, -1), g.flatten(2), out=h.flatten(2))
    _activate(z, dw_weight, dw_bias, a, h)
    gW, gb = products.gram_and_sum(g, a)
    return *_depthwise_backward(h, z, dw_weight), gW.reshape(pw_weight.shape), gb


def _depthwise_backward(g: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of z, weight and bias, for g in the dtype of z; those of parameters in float32."""
    gz, C = torch.empty_like(z), z.shape[1]
    if is_fake(z):
        taps_and_bias = z.new_empty(10, C, dtype=torch.float32)
    else:
        strips, sizes, blocks = _strips(z, BACKWARD_ROWS)
        parts = torch.empty(strips, 10, C, device=z.device, dtype=torch.float32)
        grid = (strips * cdiv(C, blocks["BLOCK_C"]),)
        launch(_spread_kernel, grid, g, z, weight.contiguous(), gz, parts, *sizes, **blocks, num_warps=2)
        taps_and_bias = parts.sum(0)
    return gz, taps_and_bias[:9].t().reshape(weight.shape), taps_and_bias[9]


def _activate(z: Tensor, weight: Tensor, bias: Tensor, a: Tensor, h: Tensor | None = None) -> None:
    """Write gelu of the 3x3 of z to a. Also multiply h, if given, by the derivative of gelu."""
    if is_fake(z):
        return
    strips, sizes, blocks = _strips(z, FORWARD_ROWS)
    launch(
        _activate_kernel, (strips * cdiv(z.shape[1], blocks["BLOCK_C"]),),
        *(z, weight.contiguous(), bias.contiguous(), a, a if h is None else h, *sizes),
        **blocks, BACKWARD=h is not None, num_warps=1,
    )  # fmt: skip


def _strips(z: Tensor, rows: int) -> tuple[int, tuple[int, int, int], dict[str, int]]:
    """Return the strips of a channel, the size arguments and the block sizes of a depthwise kernel."""
    batch, C, H, W = z.shape
    widths = [256, 128, 64, 32] if W >= 32 else [power_of_2(W)]
    block_w = min(widths, key=lambda width: cdiv(W, width) * width)  # the least padding, then the widest
    block_w = min(block_w, TILE)
    block_c, unit = min(TILE // block_w, power_of_2(C)), alignment(W)
    strips = batch * cdiv(H, rows) * cdiv(W, block_w)
    return strips, (C, H, W // unit), {"UNIT": unit, "ROWS": rows, "BLOCK_C": block_c, "BLOCK_W": block_w}
