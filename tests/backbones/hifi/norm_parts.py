"""A kernel that stores where the parts of the kernels of the norm begin and end."""

import triton
import triton.language as tl

from chasm.backbones.hifi.kernels.norm_triton import _part


@triton.jit
def store_parts(ends_ptr, P, parts, ROWS: tl.constexpr):
    """Grid (parts,): ends (parts, 2)."""
    _, first, end = _part(P, parts, ROWS)
    tl.store(ends_ptr + 2 * tl.program_id(0), first)
    tl.store(ends_ptr + 2 * tl.program_id(0) + 1, end)
