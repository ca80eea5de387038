"""A chain of axis passes in the spectral domain, with its own backward.

    y = T^-1 [ A_m G_m A_{m-1} ... G_1 A_0 (T x) ]

T transforms the spatial axes (see `transforms`), A_j are C x C channel matrices (A_0 = U_1^T, A_j = U_{j+1}^T U_j,
A_m = U_m: the bases of neighbouring passes merge) and G_j the pointwise gains. The backward keeps one tensor, T x, and
recomputes the rest; by Parseval every gradient, of matrices and gains too, is formed in the spectral domain.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from chasm.ops.transforms import Transform


def _mix(A: Tensor | None, X: Tensor) -> Tensor:
    """(C, C) on (B, C, N); None is the identity."""
    return X.clone() if A is None else torch.matmul(A, X)


def _gain_gradient(P: Tensor, G: Tensor, g: Tensor) -> Tensor:
    """Gradient of the gains g in P -> g P, summed over what g is broadcast over. Overwrites P."""
    if P.is_complex() and not g.is_complex():  # Re(conj(P) G), as products of real pairs
        P, G = torch.view_as_real(P), torch.view_as_real(G)
        return P.mul_(G).sum(-1).sum_to_size(1, *g.shape)[0]
    return (P.conj() * G).sum_to_size(1, *g.shape)[0]


def _forward(x: Tensor, gains: list[Tensor], mats: list[Tensor | None], transform: Transform) -> tuple[Tensor, Tensor]:
    X = transform.forward(x)
    P = _mix(mats[0], X)
    for g, A in zip(gains, mats[1:], strict=True):
        transform.bins(P, x.shape).mul_(g)
        P = P if A is None else torch.matmul(A, P)
    return transform.inverse(P, x.shape), X


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, transform: Transform, m: int, *params: Tensor | None) -> tuple[Tensor, Tensor]:
        gains = [g for g in params[:m] if g is not None]
        with torch.autocast(x.device.type, enabled=False):
            return _forward(x, gains, list(params[m:]), transform)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.transform, ctx.m, *params = inputs
        ctx.shape = x.shape
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1], *params)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor | None, _: Any) -> Any:
        if gy is None:
            return (None,) * (3 + 2 * ctx.m + 1)
        with torch.autocast(gy.device.type, enabled=False):
            return _Chain._backward(ctx, gy)

    @staticmethod
    def _backward(ctx: Any, gy: Tensor) -> Any:
        m, transform, shape = ctx.m, ctx.transform, ctx.shape
        X, *params = ctx.saved_tensors
        gains, mats = params[:m], params[m:]
        need_x, need_gain, need_mat = (
            ctx.needs_input_grad[0],
            ctx.needs_input_grad[3 : 3 + m],
            ctx.needs_input_grad[3 + m :],
        )
        bins = lambda t: transform.bins(t, shape)  # noqa: E731

        # before[j]: what gain j+1 multiplies; after[j]: what matrix A_j is applied to.
        after, before = [X], []
        for g, A in zip(gains, mats[:-1], strict=True):
            before.append(_mix(A, after[-1]))
            after.append(before[-1].clone())
            bins(after[-1]).mul_(g)

        G = transform.inverse_adjoint(gy.contiguous())
        grad_gain: list[Tensor | None] = [None] * m
        grad_mat: list[Tensor | None] = [None] * (m + 1)
        for j in range(m, -1, -1):  # popping frees each tensor as soon as it has been used
            Q = after.pop()
            if need_mat[j]:
                grad_mat[j] = torch.matmul(G, Q.mT).sum(0) * transform.weight
            del Q
            if mats[j] is not None and (j > 0 or need_x):
                G = torch.matmul(mats[j].mT, G)
            if j > 0:
                P, g = before.pop(), gains[j - 1]
                if need_gain[j - 1]:
                    grad_gain[j - 1] = _gain_gradient(bins(P), bins(G), g) * transform.weight
                bins(G).mul_(g.conj())
        gx = transform.forward_adjoint(G, shape) if need_x else None
        return (gx, None, None, *grad_gain, *grad_mat)


def chain(x: Tensor, gains: list[Tensor], mats: list[Tensor | None], transform: Transform) -> Tensor:
    """Apply the chain to contiguous x (B, C, .., transformed axes last)."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *gains, *mats)):
        y: Tensor = _Chain.apply(x, transform, len(gains), *gains, *mats)[0]
        return y
    with torch.autocast(x.device.type, enabled=False):
        return _forward(x, gains, mats, transform)[0]
