"""A chain of axis passes in the spectral domain, with its own backward.

    y = T^-1 [ A_m G_m A_{m-1} ... G_1 A_0 (T x) ]

T transforms the spatial axes (see `transforms`), A_j are C x C channel matrices (A_0 = U_1^T, A_j = U_{j+1}^T U_j,
A_m = U_m: the bases of neighbouring passes merge) and G_j the pointwise gains. The backward keeps one tensor, T x, and
recomputes the rest; by Parseval every gradient, of matrices and gains too, is formed in the spectral domain.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from chasm.ops._cost import counted_as
from chasm.ops.kernels import too_small, traced, triton_runs
from chasm.ops.precision import full_precision
from chasm.ops.transforms import Transform


def mix(A: Tensor | None, X: Tensor) -> Tensor:
    """(C, C) on (B, C, N), always a new tensor; None is the identity.

    As a batched product: `matmul` would fold the batch into the rows, at the price of two transposed copies.
    """
    if A is None:
        return X.clone()
    return _kernel_product(A, X) if _kernel_fits(A, X) else torch.bmm(A.expand(X.shape[0], -1, -1), X)


def _kernel_fits(A: Tensor, X: Tensor) -> bool:
    """Whether kernels may multiply."""
    return _unseen(A, X) and _slow_in_a_library(X)


def _unseen(*tensors: Tensor) -> bool:
    """Whether neither a trace nor autograd wants to see what is done: kernels have no gradient of their own."""
    return not traced(tensors[-1]) and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def _kernels_take(X: Tensor) -> bool:
    """float32 on a GPU."""
    return X.is_cuda and X.dtype == torch.float32 and triton_runs()


def _slow_in_a_library(X: Tensor) -> bool:
    """That, where a library's product is slow or TF32."""
    # `mixing` keeps both parts of a matrix in shared memory; offsets in an image are 32 bits wide.
    few = X.shape[1] <= 128 and X.shape[1] * X.shape[2] < 2**31
    return few and _kernels_take(X) and too_small(X.device) is None


def _kernel_product(A: Tensor, X: Tensor, gain: Tensor | None = None, neighbours: int = 1) -> Tensor:
    from chasm.ops.kernels import mixing  # imports triton, which not everybody has

    with counted_as("matmul", macs=A.shape[0] * X.numel()):
        return mixing.product(A, X, gain, neighbours)


def _gram(G: Tensor, X: Tensor) -> Tensor:
    """Sum over batch and positions of G X^T, (C, C)."""
    if not (_unseen(G, X) and _kernels_take(X)):
        return torch.bmm(G, X.mT).sum(0)
    from chasm.ops.kernels import products

    with counted_as("matmul", macs=G.shape[1] * X.numel()):
        return products.gram(G, X)


def _mix_and_scale(A: Tensor | None, X: Tensor, g: Tensor, bins: Callable[[Tensor], Tensor]) -> Tensor:
    """`mix`, then the bins multiplied by g."""
    if A is not None and not g.is_complex() and _kernel_fits(A, X):
        return _kernel_product(A, X, g.flatten(1), _neighbours(X, g, bins))
    return _scaled(mix(A, X), g, bins)


def _neighbours(X: Tensor, g: Tensor, bins: Callable[[Tensor], Tensor]) -> int:
    """How many numbers of X, one after the other, a gain multiplies: what g is broadcast over, and pairs."""
    axis = max(range(1, g.ndim), key=lambda i: g.shape[i])  # the one g is not broadcast over
    return bins(X).shape[axis + 2 :].numel() * (X.shape[2] // bins(X)[0, 0].numel())


def _scaled(X: Tensor, g: Tensor, bins: Callable[[Tensor], Tensor]) -> Tensor:
    """X with its bins multiplied by g, in place."""
    bins(X).mul_(g)
    return X


def _gain_gradient(P: Tensor, G: Tensor, g: Tensor) -> Tensor:
    """Gradient of the gains g in P -> g P, summed over what g is broadcast over."""
    parts = []
    for p, h, like in zip(P.chunk(4, 1), G.chunk(4, 1), g.chunk(4, 0), strict=True):  # a quarter-size temporary
        if p.is_complex() and not g.is_complex():  # Re(conj(p) h), as products of real pairs
            product = torch.view_as_real(p) * torch.view_as_real(h)
            parts.append(product.sum_to_size(1, *like.shape, 1)[0, ..., 0])
        else:
            parts.append((p.conj() * h).sum_to_size(1, *like.shape)[0])
    return torch.cat(parts)


def _through_gains(
    P: Tensor, H: Tensor, g: Tensor, bins: Callable[[Tensor], Tensor], wanted: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """g P, conj(g) H, and if wanted the gradient of g, for the gradient H of g P. Writes to P and H."""
    if wanted and not g.is_complex() and _unseen(P, H) and _kernels_take(P):
        from chasm.ops.kernels import spectrum

        return P, H, spectrum.scale_both(P, H, g.flatten(1), _neighbours(P, g, bins)).view(g.shape)
    gradient = _gain_gradient(bins(P), bins(H), g) if wanted else None
    return _scaled(P, g, bins), _scaled(H, g.conj(), bins), gradient


def _last(mats: Sequence[Tensor | None], transform: Transform) -> Tensor | None:
    """A_m, times what the inverse leaves out."""
    A = mats[-1]
    return A if A is None or transform.scale == 1 else A * transform.scale


def _forward(x: Tensor, gains: list[Tensor], mats: list[Tensor | None], transform: Transform) -> tuple[Tensor, Tensor]:
    X = transform.forward(x)
    bins = lambda t: transform.bins(t, x.shape)  # noqa: E731
    P = _mix_and_scale(mats[0], X, gains[0], bins)
    for A, g in zip(mats[1:-1], gains[1:], strict=True):
        P = _scaled(P, g, bins) if A is None else _mix_and_scale(A, P, g, bins)
    P = P if mats[-1] is None else mix(_last(mats, transform), P)
    return transform.inverse(P, x.shape), X


class Once(torch.autograd.Function):
    """Hands n gradients on, tied to all they were made from: a second derivative is then an error, never a zero.

    torch's `once_differentiable` loses the tie: `torch.autograd.grad(loss + penalty, params)` drops the penalty.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(n: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if t is None else t.clone() for t in tensors[:n])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("this form has no second derivative: use form='reference' or 'circulant'")


class _Chain(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, transform: Transform, m: int, *params: Tensor | None) -> tuple[Tensor, Tensor]:
        gains = [g for g in params[:m] if g is not None]
        with full_precision(x):
            return _forward(x, gains, list(params[m:]), transform)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.transform, ctx.m, *params = inputs
        ctx.shape = x.shape
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1], *params)

    @staticmethod
    def backward(ctx: Any, gy: Tensor | None, _: Any) -> Any:
        if gy is None:
            return (None,) * (3 + 2 * ctx.m + 1)
        saved = ctx.saved_tensors  # once: checkpointing makes them again, but only once
        with torch.no_grad(), full_precision(gy):
            grads = _Chain._backward(ctx, saved, gy)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True, torch.func
            return Once.apply(len(grads), *grads, gy, *saved)
        return grads

    @staticmethod
    def _backward(ctx: Any, saved: tuple[Tensor, ...], gy: Tensor) -> Any:
        m, transform, shape = ctx.m, ctx.transform, ctx.shape
        X, *params = saved
        gains, mats = params[:m], params[m:]
        need_x, need_gain, need_mat = (
            ctx.needs_input_grad[0],
            ctx.needs_input_grad[3 : 3 + m],
            ctx.needs_input_grad[3 + m :],
        )
        bins = lambda t: transform.bins(t, shape)  # noqa: E731

        def before_gain(j: int) -> Tensor:
            """What gain j multiplies, made again from X: an extra product is cheaper than one more tensor kept."""
            P = X
            for g, A in zip(gains[: j - 1], mats[: j - 1], strict=True):
                P = _mix_and_scale(A, P, g, bins)
            return mix(mats[j - 1], P)

        G = transform.inverse_adjoint(gy.contiguous())
        grad_gain: list[Tensor | None] = [None] * m
        grad_mat: list[Tensor | None] = [None] * (m + 1)
        for j in range(m, 0, -1):
            A, scale = (_last(mats, transform), transform.scale) if j == m else (mats[j], 1.0)
            P, H = before_gain(j), mix(None if A is None else A.mT, G)
            P, H, of_gain = _through_gains(P, H, gains[j - 1], bins, need_gain[j - 1])
            if of_gain is not None:
                grad_gain[j - 1] = of_gain * transform.weight
            if need_mat[j]:
                grad_mat[j] = _gram(G, P) * (transform.weight * scale)
            G = H
            del P, H
        if need_mat[0]:
            grad_mat[0] = _gram(G, X) * transform.weight
        if need_x and mats[0] is not None:
            G = mix(mats[0].mT, G)
        gx = transform.forward_adjoint(G, shape) if need_x else None
        return (gx, None, None, *grad_gain, *grad_mat)


def chain(x: Tensor, gains: list[Tensor], mats: list[Tensor | None], transform: Transform) -> Tensor:
    """Apply the chain to contiguous x (B, C, .., transformed axes last)."""
    by_parts = not torch.compiler.is_compiling() and forward_ad._current_level >= 0  # forward mode, Hessians
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *gains, *mats))
    if wanted and not by_parts:
        y: Tensor = _Chain.apply(x, transform, len(gains), *gains, *mats)[0]
        return y
    with full_precision(x):
        return _forward(x, gains, mats, transform)[0]
