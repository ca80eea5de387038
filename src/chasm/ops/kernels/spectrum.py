"""The backward pass through gains: two float32 spectra are scaled and their products summed, in one Triton kernel."""

# mypy: disable-error-code="no-untyped-def"
# (triton.jit functions have no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

from chasm.ops.kernels.launch import cdiv, launch, power_of_2
from chasm.ops.library import is_fake

BLOCK = 512  # positions of a block
MAX_IMAGES = 4  # that a program takes at once


@triton.jit
def _scale_kernel(
    p_ptr, h_ptr, gain_ptr, sums_ptr, B, C, S, BINS, NEIGHBOURS, BLOCK: tl.constexpr, IMAGES: tl.constexpr
):  # fmt: skip
    """Grid (channels x blocks of S,): p and h times their gains, for all images, and sums of p h over the images."""
    blocks = tl.cdiv(S, BLOCK)
    c = (tl.program_id(0) // blocks).to(tl.int64)
    s = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    gain = tl.load(gain_ptr + c * BINS + s // NEIGHBOURS % BINS)[None, :]
    total = tl.zeros([IMAGES, BLOCK], tl.float32)
    for first in range(0, B, IMAGES):
        b = first + tl.arange(0, IMAGES)
        at, inside = (b.to(tl.int64)[:, None] * C + c) * S + s[None, :], (b < B)[:, None] & (s < S)[None, :]
        p = tl.load(p_ptr + at, mask=inside, other=0.0)
        h = tl.load(h_ptr + at, mask=inside, other=0.0)
        total += p * h
        tl.store(p_ptr + at, p * gain, mask=inside)
        tl.store(h_ptr + at, h * gain, mask=inside)
    tl.store(sums_ptr + c * S + s, tl.sum(total, 0), mask=s < S)


def scale_both(P: Tensor, H: Tensor, gain: Tensor, neighbours: int) -> Tensor:
    """Multiply P and H by their gains in place, and return the sums of P H (as they came) over each bin: (C, n).

    Args:
        P: contiguous float32 (B, C, S).
        H: contiguous float32 (B, C, S).
        gain: (C, n). Position s has the gain of bin (s // neighbours) % n.
        neighbours: positions in a row that share a bin.
    """
    (B, C, S), n, gain = P.shape, gain.shape[1], gain.contiguous()
    bin_sums = torch.empty(C, n, dtype=torch.float32, device=P.device)
    if is_fake(P):
        return bin_sums
    # The sums are as large as one image. With few images, only some channels are taken at once, to save memory.
    step = C if B >= MAX_IMAGES else cdiv(C, MAX_IMAGES)
    for first in range(0, C, step):
        p, h, g, out = P[:, first:], H[:, first:], gain[first:], bin_sums[first : first + step]
        sums = torch.empty(len(out), S, dtype=torch.float32, device=P.device)
        launch(
            _scale_kernel, (len(out) * cdiv(S, BLOCK),), p, h, g, sums, B, C, S, n, neighbours,
            BLOCK=BLOCK, IMAGES=min(MAX_IMAGES, power_of_2(B)), num_warps=4,
        )  # fmt: skip
        torch.sum(sums.view(len(out), -1, n, neighbours), (1, 3), out=out)
    return bin_sums
