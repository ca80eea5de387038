"""How far the channel operators of a mixer share one basis over the frequencies.

The operators M(k), complex or real C x C matrices, one per frequency k:

CHASM  U_k diag(lambda_k) U_k^T at the bins of each axis. A shared basis is one U for all k: every measure is zero.
FNO-D  The dense complex matrix of the mode (k, 0) along height and (0, k) along width. On real maps the mode (k, 0)
       acts as the mean of its own matrix and the conjugate of the matrix of (-k, 0), so this mean is measured. Modes
       off the two axes, modes that maps of its size do not have, the deformation before the layer and the
       convolutions around it are not measured.

A matrix near the identity commutes with anything, so a core that has hardly moved looks harmonious. Two of the measures
are therefore also taken of the mixing part M(k) - tr(M(k)) / C: the operator without its mean gain.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from chasm.mixers.chasm import CHASM
from chasm.mixers.fno_d import FNOD
from chasm.surgery.harmonise import FrequencyOperators, frequency_operators, joint_basis, multiplicities

# More sweeps lower the energy off the diagonals by only a few per cent, and each takes minutes with many channels. The
# second limit leaves one sweep for complex matrices of 512 channels.
MAX_SWEEPS, MAX_PRODUCTS = 12, 1.5e10


@dataclass(frozen=True)
class Harmony:
    """How far the operators of one axis of one mixer share a basis."""

    commutators: Tensor  # (B, B): of every pair of frequencies
    commutator: float  # mean over pairs of different frequencies
    mixing_commutator: float  # mean over pairs, for the mixing parts
    neighbour_angle: float  # degrees, mean over pairs k, k + 1
    distant_angle: float  # degrees, mean over pairs half the band apart
    unrelated_angle: float  # degrees, between two random bases
    off_diagonal: float  # share of the energy of all M(k) that the best shared basis leaves off the diagonals
    mixing_off_diagonal: float  # that energy as a share of the energy of the mixing parts

    def texts(self) -> list[str]:
        """Return all measures but the matrix as they are printed, in the order of the fields."""
        angles = self.neighbour_angle, self.distant_angle, self.unrelated_angle
        shares = self.off_diagonal, self.mixing_off_diagonal
        return [
            *(f"{value:.4f}" for value in (self.commutator, self.mixing_commutator)),
            *(f"{angle:.1f}°" for angle in angles),
            *(f"{100 * share:.2f} %" for share in shares),
        ]


def measure_harmony(mixer: nn.Module) -> dict[str, Harmony]:
    """Measure the operators of a mixer, axis by axis.

    Args:
        mixer: a CHASM of any variant, an FNO-D, or a module with one of them inside (a slot).

    Returns:
        Axis ("ch", "cw", ..) to what was found; nothing for a CHASM without a spectral core.

    Raises:
        ValueError: if there is no mixer inside that has channel operators per frequency.

    Example:
        >>> import chasm
        >>> found = measure_harmony(chasm.CHASM(4, size=(8, 8)))
        >>> list(found), found["ch"].commutator
        (['ch', 'cw'], 0.0)
    """
    return {axis: _measure(operators) for axis, operators in axis_operators(mixer).items()}


def axis_operators(mixer: nn.Module) -> dict[str, FrequencyOperators]:
    """Return the operators of a CHASM or FNO-D mixer, or of the one inside a module, in double precision."""
    for module in mixer.modules():
        if isinstance(module, CHASM):
            return frequency_operators(module)
        if isinstance(module, FNOD):
            return _mode_operators(module)
    name = type(getattr(mixer, "mixer", mixer)).__name__  # a slot that adds a residual holds its mixer
    raise ValueError(f"expected CHASM or FNO-D, which have a channel operator per frequency, got {name}, without one")


def commutators(operators: Tensor) -> Tensor:
    """Return ||M_k M_l - M_l M_k|| / (||M_k|| ||M_l||) of operators (K, C, C) in the Frobenius norm, at most sqrt(2).

    Returns:
        A symmetric matrix (K, K); zero where an operator is zero.
    """
    return _relative(_commutator_norms(operators), operators)


def _commutator_norms(operators: Tensor) -> Tensor:
    norms = torch.zeros(len(operators), len(operators), dtype=torch.float64)
    for k, M in enumerate(operators):
        others = operators[k + 1 :]
        norms[k, k + 1 :] = norms[k + 1 :, k] = torch.linalg.matrix_norm(M @ others - others @ M)
    return norms


def _relative(norms: Tensor, operators: Tensor) -> Tensor:
    """Return norms (K, K) divided by those of the two operators."""
    own = torch.linalg.matrix_norm(operators).double()
    both = torch.outer(own, own)
    return torch.where(both > 0, norms / both, 0)


def mixing_parts(operators: Tensor) -> Tensor:
    """Return M(k) - tr(M(k)) / C, the operators without their mean gain; zero where only rounding is left."""
    mean = operators.diagonal(dim1=-2, dim2=-1).mean(-1)
    parts = operators - mean[:, None, None] * torch.eye(operators.shape[-1], dtype=operators.dtype)
    is_rounding = torch.linalg.matrix_norm(parts) <= 1e-10 * torch.linalg.matrix_norm(operators)
    return parts.masked_fill(is_rounding[:, None, None], 0)


def basis_angles(bases: Tensor) -> Tensor:
    """Return the angle between every pair of eigenbases (K, C, C), whose columns have unit length, in degrees.

    The order of eigenvectors means nothing, so each one is compared with the nearest of the other frequency (the
    principal angle of two lines). The angle of two bases is the mean over all eigenvectors of both. Eigenvectors of
    equal gains are arbitrary: the angle says little where the gains of a frequency hardly differ.
    """
    angles = []
    for U in bases:
        cosines = (U.mH @ bases).abs().clamp(max=1)
        nearest = [cosines.amax(dim).arccos().mean(-1) for dim in (-1, -2)]
        angles.append(torch.rad2deg(sum(nearest) / 2))
    return torch.stack(angles)


def unrelated_angle(channels: int) -> float:
    """Return the angle of `basis_angles` between two random orthonormal bases."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, channels, channels, generator=generator, dtype=torch.float64)
    return float(basis_angles(torch.linalg.qr(noise)[0])[0, 1])


def off_diagonal_energy(operators: Tensor, basis: Tensor, weights: Tensor) -> float:
    """Return the energy that a shared basis (C, C) leaves off the diagonals of all operators (K, C, C).

    The weights (K,) are the numbers of frequencies that each operator stands for.
    """
    rotated = basis.mH @ operators @ basis
    return _energy(rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1)), weights)


def _measure(operators: FrequencyOperators) -> Harmony:
    M, bases = operators
    mixing, weights = mixing_parts(M), multiplicities(len(M))
    norms, angles = _commutator_norms(M), basis_angles(bases)  # the mixing parts have the same commutators
    pairs = _relative(norms, M)
    is_shared = torch.equal(bases, bases[:1].expand_as(bases))
    V = bases[0] if is_shared else joint_basis(M, weights, _sweeps(M))
    left = off_diagonal_energy(M, V, weights)
    return Harmony(
        commutators=pairs,
        commutator=_mean_over_pairs(pairs),
        mixing_commutator=_mean_over_pairs(_relative(norms, mixing)),
        neighbour_angle=float(angles.diagonal(1).mean()),
        distant_angle=float(angles.diagonal(max(len(M) // 2, 1)).mean()),
        unrelated_angle=unrelated_angle(M.shape[-1]),
        off_diagonal=_share(left, _energy(M, weights)),
        mixing_off_diagonal=_share(left, _energy(mixing, weights)),
    )


def _sweeps(operators: Tensor) -> int:
    products = operators.numel() * operators.shape[-1] * (8 if operators.is_complex() else 1)
    return max(1, min(MAX_SWEEPS, int(MAX_PRODUCTS / products)))


def _energy(operators: Tensor, weights: Tensor) -> float:
    return float((weights * operators.abs().square().sum((1, 2))).sum())


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _mean_over_pairs(values: Tensor) -> float:
    first, second = torch.triu_indices(len(values), len(values), offset=1)
    return float(values[first, second].mean())


@torch.no_grad()
def _mode_operators(mixer: FNOD) -> dict[str, FrequencyOperators]:
    """Return the modes of an FNO layer on the frequency axes that maps of its size have; real at DC and Nyquist."""
    # Stored as (in, out, rows, columns, 2); M maps channels in to channels out.
    stored = (torch.view_as_complex(r.double().cpu()) for r in (mixer.spectral.r_pos, mixer.spectral.r_neg))
    positive, negative = (R.permute(2, 3, 1, 0) for R in stored)
    below = negative[:, 0].flip(0)  # rows -1, -2, ..
    height = (positive[:, 0] + torch.cat([positive[:1, 0], below[:-1]]).conj()) / 2
    width = torch.cat([height[:1], positive[0, 1:]])
    if mixer.size is not None:
        H, W = mixer.size
        height, width = height[: (H + 1) // 2], width[: W // 2 + 1]
        if 2 * (len(width) - 1) == W:
            width[-1] = width[-1].real
    return {axis: FrequencyOperators(M, torch.linalg.eig(M)[1]) for axis, M in (("ch", height), ("cw", width))}
