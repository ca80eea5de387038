"""One pass over two float32 spectra on the way back through gains, as a Triton kernel."""

# mypy: disable-error-code="no-untyped-def"
# (what triton.jit compiles has no Python types)

import torch
import triton
import triton.language as tl
from torch import Tensor

from chasm.ops.kernels import cdiv

TILE = 2048
PROGRAMS = 1056  # eight for every multiprocessor of an H200


@triton.jit
def _scale_kernel(
    p_ptr, h_ptr, gain_ptr, parts_ptr, C, S, BINS, NEIGHBOURS, ROWS, ROUNDS,
    BLOCK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of a round, C, splits). A round passes all bins once; ROUNDS of them are one of ROWS / ROUNDS maps.

    p and h times their gains; and parts (splits, C, round) of the sums of p h over rows.
    """
    c, split, splits = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    length = BINS * NEIGHBOURS
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = place < length
    gain = tl.load(gain_ptr + c * BINS + place // NEIGHBOURS, mask=live, other=0.0)[None, :]
    total = tl.zeros([R, BLOCK], tl.float32)
    for first in range(split * R, ROWS, splits * R):
        row = first + tl.arange(0, R)
        start = ((row // ROUNDS).to(tl.int64) * C + c) * S + row % ROUNDS * length
        at, inside = start[:, None] + place[None, :], (row < ROWS)[:, None] & live[None, :]
        p = tl.load(p_ptr + at, mask=inside, other=0.0)
        h = tl.load(h_ptr + at, mask=inside, other=0.0)
        total += p * h
        tl.store(p_ptr + at, p * gain, mask=inside)
        tl.store(h_ptr + at, h * gain, mask=inside)
    tl.store(parts_ptr + (split * C + c) * length + place, tl.sum(total, 0), mask=live)


def scale_both(P: Tensor, H: Tensor, gain: Tensor, neighbours: int) -> Tensor:
    """Contiguous float32 P and H (B, C, S) times gain (C, n), of bin (s // neighbours) % n at position s, in place.

    Returns the sum of P H, as they were, over batch and the positions of a bin: (C, n).
    """
    B, C, S = P.shape
    length = gain.shape[1] * neighbours
    rounds = S // length
    block = 128 if length < 1024 else 1024
    rows, blocks = TILE // block, cdiv(length, block)
    splits = min(cdiv(B * rounds, rows), max(1, PROGRAMS // (C * blocks)))
    parts = torch.empty(splits, C, gain.shape[1], neighbours, dtype=torch.float32, device=P.device)
    with torch.cuda.device_of(P):
        _scale_kernel[blocks, C, splits](
            *(P, H, gain.contiguous(), parts, C, S, gain.shape[1], neighbours, B * rounds, rounds),
            BLOCK=block, R=rows, num_warps=4,
        )  # fmt: skip
    return parts.sum((0, 3))
