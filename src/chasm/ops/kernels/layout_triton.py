"""The kernel of `layout`."""

# mypy: disable-error-code="no-untyped-def"
# (triton.jit functions have no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

from chasm.ops.kernels.launch import cdiv, launch
from chasm.ops.library import is_fake

BLOCK = 64  # rows and columns of a tile


@triton.jit
def _transpose_kernel(x_ptr, y_ptr, R, S, BLOCK: tl.constexpr):
    """Grid (batch x blocks of R x blocks of S,): (R, S) -> (S, R)."""
    rows, columns, block = tl.cdiv(R, BLOCK), tl.cdiv(S, BLOCK), tl.program_id(0)
    r = block // columns % rows * BLOCK + tl.arange(0, BLOCK)
    s = block % columns * BLOCK + tl.arange(0, BLOCK)
    image = (block // (rows * columns)).to(tl.int64) * R * S
    x = tl.load(x_ptr + image + r[:, None] * S + s[None, :], mask=(r < R)[:, None] & (s < S)[None, :])
    tl.store(y_ptr + image + s[:, None] * R + r[None, :], tl.trans(x), mask=(s < S)[:, None] & (r < R)[None, :])


def copied(x: Tensor, to_last: bool) -> Tensor:
    """Return a copy of x (B, C, H, W) as channels last if `to_last`, else as NCHW."""
    y = torch.empty_like(x, memory_format=torch.channels_last if to_last else torch.contiguous_format)
    if is_fake(x):
        return y
    B, C, positions = x.shape[0], x.shape[1], x.shape[2:].numel()
    rows, columns = (C, positions) if to_last else (positions, C)
    grid = (B * cdiv(rows, BLOCK) * cdiv(columns, BLOCK),)
    launch(_transpose_kernel, grid, x, y, rows, columns, BLOCK=BLOCK, num_warps=4)
    return y
