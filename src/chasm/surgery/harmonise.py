"""The best shared basis of a mixer that was trained with one basis per frequency.

An untied CHASM has M(k) = U_k diag(lambda_k) U_k^T along each axis. `harmonise` looks for the one orthogonal V that
makes all V^T M(k) V as diagonal as possible, and keeps the diagonals as gains. This is the operator with this basis
that is nearest to M in the Frobenius norm. V comes from Jacobi sweeps over several matrices at once (Cardoso and
Souloumiac, SIAM J. Matrix Anal. Appl. 17, 1996). Everything is computed in float64 on the CPU.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from chasm.mixers._options import AXES
from chasm.mixers.chasm import CHASM

MAX_SWEEPS = 100
LEAST_PROGRESS = 1e-6  # share of the off-diagonal energy that a sweep must remove for another one to follow
MIN_GAIN = 1e-12  # a positive gain below this is rounding


class FrequencyOperators(NamedTuple):
    """The channel matrices of one axis at its B frequencies, real or complex."""

    matrices: Tensor  # M(k), (B, C, C)
    bases: Tensor  # (B, C, C), the eigenvectors of M(k) as columns of unit length


def harmonise(mixer: nn.Module) -> CHASM:
    """Return the shared-basis CHASM nearest to an untied one.

    The gains of the result are positive where those of the mixer are. Convolutions, axes, table sizes, step scale,
    dtype and device are those of the mixer, which stays as it is. If all M(k) of an axis commute, nothing is lost.

    Args:
        mixer: a `chasm.CHASM` with ``basis="untied"``, any axes.

    Returns:
        A new mixer with ``basis="shared"``.

    Raises:
        TypeError: if `mixer` is not a CHASM.
        ValueError: if the mixer has no untied basis.

    Example:
        >>> import torch, chasm
        >>> untied = chasm.CHASM(8, size=16, basis="untied")
        >>> with torch.no_grad():
        ...     for theta in untied.theta.values():
        ...         _ = theta.normal_(std=0.01)
        >>> chasm.harmonise(untied).basis
        'shared'
    """
    untied = _checked(mixer)
    example = next(iter(untied.gain_table.values()))
    shared = CHASM(
        untied.channels,
        bins=tuple(len(untied.gain_table[a]) if a in untied.gain_table else 1 for a in AXES[untied.ndim]),
        axes=untied.axes,
        gain=untied.gain,
        residual=untied.residual,
        local=False,
        ndim=untied.ndim,
        step_scale=untied.step_scale,
        form=untied.form,
        device=example.device,
        dtype=example.dtype,
    )
    shared.refine, shared.fuse = copy.deepcopy(untied.refine), copy.deepcopy(untied.fuse)
    for axis, (M, _) in frequency_operators(untied).items():
        V = nearest_rotation(joint_basis(M, multiplicities(len(M))))
        diagonals = torch.einsum("ij,kil,lj->kj", V, M, V)
        if untied.gain == "positive":
            positive = diagonals.clamp(min=MIN_GAIN)
            diagonals = positive + torch.log(-torch.expm1(-positive))  # the inverse of softplus
        with torch.no_grad():
            start = shared.axis_parameters(axis).gain_table  # all parameters are still zero
            shared.gain_table[axis].copy_((diagonals - start.double().cpu()) / shared.step_scale)
            shared.theta[axis].copy_(_lower(logarithm(V)) / shared.step_scale)
    return shared.train(untied.training)


def frequency_operators(mixer: CHASM) -> dict[str, FrequencyOperators]:
    """Return what a CHASM mixer does at every bin of every axis in use, in float64 on the CPU.

    The bins are those of the gain tables, as for maps of the size that the tables were made for.

    Args:
        mixer: a CHASM; without a spectral core (``basis=None``) there are no axes.
    """
    if mixer.basis is None:
        return {}
    bins = [len(mixer.gain_table[axis]) if axis in mixer.gain_table else 1 for axis in AXES[mixer.ndim]]
    by_axis = {}
    with torch.no_grad():
        exact = copy.deepcopy(mixer).cpu().double()
        for axis, op in exact.operators(*(max(2 * (B - 1), 1) for B in bins)).items():
            U = torch.eye(mixer.channels, dtype=torch.float64) if op.U is None else op.U
            U = U.expand(len(op.gains), -1, -1).to(op.gains.dtype)
            by_axis[axis] = FrequencyOperators((U * op.gains[:, None]) @ U.mT, U)
    return by_axis


def multiplicities(bins: int) -> Tensor:
    """Return how many of n frequencies (n even) each bin of a real transform stands for: 2, but 1 for DC and Nyquist.

    >>> multiplicities(4)
    tensor([1., 2., 2., 1.], dtype=torch.float64)
    """
    weights = torch.full((bins,), 2.0, dtype=torch.float64)
    weights[0] = weights[-1] = 1
    return weights


def joint_basis(operators: Tensor, weights: Tensor, max_sweeps: int = MAX_SWEEPS) -> Tensor:
    """Return the basis V (C, C) in which a family of matrices has the least energy off its diagonals, in float64.

    V minimises sum_k w_k ||off(V^H M_k V)||^2 by plane rotations, each the best one for its pair of directions, so that
    no sweep raises that sum. It starts at the identity, where trained bases start too. The minimum is zero for normal
    matrices that commute, and else the one that the sweeps lead to.

    Args:
        operators: M_k (K, C, C). A real family gets an orthogonal V, a complex one a unitary V.
        weights: w_k (K,), not negative.
        max_sweeps: the sweeps end after this many, or when they no longer make a difference.
    """
    M = operators.to(torch.complex128 if operators.is_complex() else torch.float64)
    M = (weights.sqrt()[:, None, None] * M).permute(1, 2, 0).contiguous()  # (C, C, K)
    V = torch.eye(len(M), dtype=M.dtype)
    rounds = list(_disjoint_pairs(len(M)))
    left, rounding = _off_energy(M), 1e-28 * float(M.abs().square().sum())
    for _ in range(max_sweeps):
        if left <= rounding:
            break
        for p, q in rounds:
            _rotate(M, V, p, q)
        before, left = left, _off_energy(M)
        if before - left <= LEAST_PROGRESS * before:
            break
    return V


def _rotate(M: Tensor, V: Tensor, p: Tensor, q: Tensor) -> None:
    """Rotate the planes (p_i, q_i), which share no direction, each by the angle that is best for it; in place.

    With h = (M_pp - M_qq, M_pq + M_qp, i (M_qp - M_pq)), a rotation changes the energy of the diagonals only by the
    sum of |h^T r|^2, where r is a unit vector that stands for the rotation. So the best r is an eigenvector; (1, 0, 0)
    turns nothing.
    """
    pq, qp = M[p, q], M[q, p]  # (planes, K)
    h = [M[p, p] - M[q, q], pq + qp, *([1j * (qp - pq)] if M.is_complex() else [])]
    H = torch.stack(h, 1)  # (planes, 2 or 3, K)
    G = (H @ H.mH).real
    energy, directions = torch.linalg.eigh(G)
    r = directions[..., -1]
    r = r * torch.where(r[:, :1] < 0, -1.0, 1.0)  # the smaller of the two angles
    # If all r are as good as (1, 0, 0), the eigenvector is arbitrary, so the plane stays as it is.
    least = 1e-12 * energy.sum(-1)
    flat = (energy[:, -1] - energy[:, -2] <= least) & (energy[:, -1] - G[:, 0, 0] <= least)
    r = torch.where(flat[:, None], torch.eye(r.shape[1], dtype=r.dtype)[0], r)
    cosine = ((1 + r[:, 0]) / 2).sqrt()
    sine = (torch.complex(r[:, 1], -r[:, 2]) if M.is_complex() else r[:, 1]) / (2 * cosine)
    c, s = cosine.to(M.dtype)[:, None], sine[:, None]
    a, b = V[:, p], V[:, q]
    V[:, p], V[:, q] = a * c[:, 0] + b * s[:, 0], b * c[:, 0] - a * s[:, 0].conj()
    a, b = M[:, p], M[:, q]
    M[:, p], M[:, q] = a * c + b * s, b * c - a * s.conj()
    c, s = c[..., None], s[..., None]
    a, b = M[p], M[q]
    M[p], M[q] = a * c + b * s.conj(), b * c - a * s


def _disjoint_pairs(C: int) -> Iterator[Tensor]:
    """Return all pairs p < q of C directions in rounds (2, pairs) of disjoint pairs: a round-robin tournament."""
    n = C + C % 2  # with an odd number, one sits out
    ring = list(range(1, n))
    for _ in range(n - 1):
        order = [0, *ring]
        pairs = [sorted((order[i], order[n - 1 - i])) for i in range(n // 2)]
        yield torch.tensor([pair for pair in pairs if pair[1] < C], dtype=torch.long).reshape(-1, 2).T
        ring = [ring[-1], *ring[:-1]]


def _off_energy(M: Tensor) -> float:
    """Return the energy off the diagonals of K matrices, (C, C, K)."""
    energy = M.abs().square().sum(-1)
    return float(energy.fill_diagonal_(0).sum())


def nearest_rotation(V: Tensor) -> Tensor:
    """Return an orthogonal V (C, C) with its columns reordered and negated, so that it is a rotation near the identity.

    Order and signs of the columns of a basis mean nothing to U diag(lambda) U^T. The result has determinant 1 and no
    eigenvalue -1 or near it, so that its logarithm is unique.
    """
    C = len(V)
    left, order = V.abs().clone(), torch.zeros(C, dtype=torch.long)
    for _ in range(C):  # the largest entry goes to the diagonal, then the largest of the rest
        row, column = divmod(int(left.argmax()), C)
        order[row] = column
        left[row], left[:, column] = -1, -1
    V = V[:, order]
    V = V * torch.where(V.diagonal() < 0, -1.0, 1.0)
    # Negating columns i and j multiplies det(I + V) by the square of Q_ij, where Q = (I + V)^-1 (I - V) is skew. At the
    # largest determinant no |Q_ij| exceeds 1, and no eigenvalue of V is near -1. Where one is -1 (as with determinant
    # -1), Q is huge; its largest entry is then on the diagonal, and one column is negated.
    eye = torch.eye(C, dtype=V.dtype)
    while True:
        Q = torch.linalg.solve((1 + 1e-12) * eye + V, eye - V).abs()
        i, j = divmod(int(Q.argmax()), C)
        if Q[i, j] <= 1 + 1e-6:
            return V
        V[:, [i, j]] *= -1


def logarithm(V: Tensor) -> Tensor:
    """Return the skew-symmetric A with exp(A) = V, for a rotation V without eigenvalue -1, in float64.

    By the Cayley transform: Q = (I + V)^-1 (I - V) is skew and has eigenvalues -i tan(phi / 2) where V has e^{i phi}.
    """
    eye = torch.eye(len(V), dtype=V.dtype)
    Q = torch.linalg.solve(eye + V, eye - V)
    tangents, Z = torch.linalg.eigh(0.5j * (Q - Q.mT))
    A = ((Z * (2j * torch.atan(tangents))) @ Z.mH).real
    return (A - A.mT) / 2


def _lower(A: Tensor) -> Tensor:
    """Return the entries of a skew matrix in the order of theta."""
    row, column = torch.tril_indices(len(A), len(A), -1)
    return A[row, column]


def _checked(mixer: nn.Module) -> CHASM:
    if not isinstance(mixer, CHASM):
        inside = [name for name, m in mixer.named_modules() if isinstance(m, CHASM) and m.basis == "untied"]
        hint = f"pass its {inside[0]!r}" if inside else "no other mixer has a basis per frequency to share"
        raise TypeError(f"harmonise() expected a CHASM mixer with basis='untied', got {type(mixer).__name__}: {hint}")
    if mixer.basis != "untied":
        why = {"shared": "it has one already", "identity": "it has one already"}.get(str(mixer.basis), "it has none")
        raise ValueError(f"harmonise() makes basis='untied' shared, got basis={mixer.basis!r}: {why}")
    return mixer
