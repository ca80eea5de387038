"""The selective scan by its definition, one time step after the other: the oracle of the other forms."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ScanInputs(NamedTuple):
    """The arguments of a scan of D channels with N states each, over L time steps."""

    u: Tensor  # input, (B, D, L)
    delta: Tensor  # step sizes before bias and softplus, (B, D, L)
    A: Tensor  # negative, (D, N)
    B: Tensor  # (B, N, L)
    C: Tensor  # (B, N, L)
    D: Tensor | None  # weights of u in the output, (D,)
    bias: Tensor | None  # added to delta, (D,)
    softplus: bool  # whether to apply softplus to the step sizes


def sequential_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
) -> Tensor:
    """Run the scan step by step. Autograd computes the gradients.

    Args:
        u: input, (B, D, L).
        delta: step sizes before bias and softplus, (B, D, L).
        A: negative, (D, N).
        B: (B, N, L).
        C: (B, N, L).
        D: weights of u in the output, (D,), or None.
        delta_bias: added to delta, (D,), or None.
        delta_softplus: apply softplus to the step sizes.

    Returns:
        y, (B, D, L).
    """
    if delta_bias is not None:
        delta = delta + delta_bias[:, None]
    if delta_softplus:
        delta = F.softplus(delta)
    state = u.new_zeros(*u.shape[:2], A.shape[1])  # (B, D, N)
    outputs = []
    # unbind instead of indexing, because the gradient of x[..., t] would be a tensor of full length for every t.
    for u_t, delta_t, B_t, C_t in zip(*(x.unbind(-1) for x in (u, delta, B, C)), strict=True):
        decay = torch.exp(delta_t[..., None] * A)
        state = decay * state + (delta_t * u_t)[..., None] * B_t[:, None]
        outputs.append((state * C_t[:, None]).sum(-1))  # (B, D)
    y = torch.stack(outputs, -1) if outputs else torch.zeros_like(u)
    return y if D is None else y + D[:, None] * u
