"""Draw what CHASM learned in a run, from its weights: the bases U, the gains over frequency, and their spread."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chasm import ops
from chasm.data.files import reading
from chasm.studies.report.figures import CHASM_COLOUR, INK, axis_style, new_figure, source

_KEY = re.compile(r"^slots\.(\d+)\.((?:.*\.)?)(theta|gain_table|phase_table)\.(\w+)$")
AXES = {"ch": "height", "cw": "width"}
MAX_SLOTS_DRAWN = 3  # the table has all


@dataclass
class Learned:
    """One axis of one slot."""

    slot: int
    axis: str
    basis: np.ndarray | None  # (C, C), or None where it is fixed or untied
    gains: np.ndarray  # (B, C), magnitudes

    @property
    def rotation(self) -> float | None:
        """Mean angle in degrees between a channel and the direction that started on it: 0 for U = I."""
        if self.basis is None:
            return None
        return float(np.degrees(np.arccos(np.clip(np.diag(self.basis), -1, 1))).mean())

    @property
    def over_frequency(self) -> float:
        """How much the gain of a direction changes with frequency: standard deviation, mean over directions."""
        return float(self.gains.std(0).mean())

    @property
    def over_directions(self) -> float:
        """How much the directions differ at a frequency: standard deviation, mean over frequencies."""
        return float(self.gains.std(1).mean())


def read(weights: Path, gain: str = "positive") -> list[Learned]:
    """Return every slot and axis of the CHASM mixers in a run's weights, in the order of the slots."""
    with reading(weights, "weights"):
        return _read(weights, gain)


def _read(weights: Path, gain: str) -> list[Learned]:
    from safetensors.torch import load_file

    by_axis: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    stored = load_file(weights)
    for key, value in stored.items():
        if match := _KEY.match(key):
            slot, prefix, name, axis = match.groups()
            scale = stored[f"slots.{slot}.{prefix}stored_step_scale"]
            by_axis.setdefault((int(slot), axis), {})[name] = scale * value
    learned = []
    for (slot, axis), tensors in sorted(by_axis.items()):
        if "gain_table" not in tensors:
            continue
        offset, theta = tensors["gain_table"].float(), tensors.get("theta")
        gains = 1 + offset if gain == "signed" else torch.nn.functional.softplus(ops.UNIT_GAIN + offset)
        basis = ops.orthogonal_basis(theta).numpy() if theta is not None and theta.ndim == 1 else None
        learned.append(Learned(slot, axis, basis, gains.numpy()))
    return learned


def figure(learned: list[Learned], gain: str = "positive") -> str:
    """Draw U and the gains over frequency of each axis for the first slots, and mean and spread of the gains.

    Positive gains are coloured on a logarithmic scale, signed ones on a linear one.
    """
    slots = list(dict.fromkeys(x.slot for x in learned))[:MAX_SLOTS_DRAWN]
    axes_used = list(dict.fromkeys(x.axis for x in learned))
    fig = new_figure(2.35 * (2 * len(axes_used) + 1), 2.45 * len(slots))
    grid = fig.subplots(len(slots), 2 * len(axes_used) + 1, squeeze=False)
    norm = gain_colours([x.gains for x in learned if x.slot in slots], is_log=gain != "signed")
    for row, slot in zip(grid, slots, strict=True):
        members = {x.axis: x for x in learned if x.slot == slot}
        for i, axis in enumerate(axes_used):
            left, right = row[2 * i : 2 * i + 2]
            if axis in members:
                _basis(left, members[axis])
                image = _gains(right, members[axis], norm)
            else:
                left.set_axis_off()
                right.set_axis_off()
        _spread(row[-1], list(members.values()))
    bar = fig.colorbar(image, ax=grid[:, :-1].ravel().tolist(), shrink=0.6, pad=0.01, aspect=30)
    bar.ax.tick_params(labelsize=8)
    bar.set_label("gain", fontsize=8.5)
    if gain != "signed":
        ticks = np.geomspace(norm.vmin, norm.vmax, 5).tolist()
        bar.set_ticks(ticks, labels=[f"{tick:.3g}" for tick in ticks])
        bar.minorticks_off()
    return source(fig)


def gain_colours(gains: list[np.ndarray], *, is_log: bool) -> Any:
    """Return a colour scale on which gain 1 has the middle colour.

    With `is_log`, g and 1 / g are equally far from the middle, and gains must be positive. Else 1 + d and 1 - d are.
    """
    from matplotlib.colors import LogNorm, Normalize

    values = np.concatenate([g.ravel() for g in gains])
    if is_log:
        reach = max(float(np.exp(np.abs(np.log(np.maximum(values, 1e-6))).max())), 1.001)
        return LogNorm(1 / reach, reach)
    reach = max(float(np.abs(values - 1).max()), 1e-3)
    return Normalize(1 - reach, 1 + reach)


def _basis(ax: Any, x: Learned) -> None:
    title = f"slot {x.slot}, {AXES.get(x.axis, x.axis)}: $U$"
    if x.basis is None:
        ax.set_axis_off()
        ax.text(0.5, 0.5, "no shared\nlearned basis", ha="center", va="center", fontsize=8.5, transform=ax.transAxes)
    else:
        ax.imshow(x.basis, cmap="PuOr_r", vmin=-1, vmax=1, interpolation="nearest")
        ax.set_xlabel("direction", fontsize=8.5)
        ax.set_ylabel("channel", fontsize=8.5)
        ax.tick_params(labelsize=8)
        ax.locator_params(nbins=4, integer=True)
    ax.set_title(title, fontsize=9, color=INK)


def _gains(ax: Any, x: Learned, norm: Any) -> Any:
    """Draw the gains, with directions sorted by the gain at high frequencies minus that at low ones."""
    lean = x.gains[len(x.gains) // 2 :].mean(0) - x.gains[: max(len(x.gains) // 2, 1)].mean(0)
    image = ax.imshow(
        x.gains[:, np.argsort(lean)].T,
        aspect="auto",
        cmap="RdBu_r",
        norm=norm,
        extent=(0, 1, x.gains.shape[1], 0),
        interpolation="nearest",
    )
    ax.set_title(f"slot {x.slot}, {AXES.get(x.axis, x.axis)}: gains", fontsize=9, color=INK)
    ax.set_xlabel("frequency / Nyquist", fontsize=8.5)
    ax.set_ylabel("direction, sorted", fontsize=8.5)
    ax.tick_params(labelsize=8)
    return image


def _spread(ax: Any, members: list[Learned]) -> None:
    for x, colour in zip(members, (CHASM_COLOUR, "#1b8a9e", "#d1662b"), strict=False):
        f = np.linspace(0, 1, len(x.gains))
        mean, std = x.gains.mean(1), x.gains.std(1)
        ax.plot(f, mean, color=colour, lw=1.8, label=AXES.get(x.axis, x.axis))
        ax.fill_between(f, mean - std, mean + std, color=colour, alpha=0.18, lw=0)
    ax.axhline(1, color=INK, lw=0.8, ls=(0, (3, 2)))
    ax.set_title("gain: mean ± std", fontsize=9, color=INK)
    ax.set_xlabel("frequency / Nyquist", fontsize=8.5)
    ax.legend(fontsize=8, frameon=False)
    axis_style(ax)
