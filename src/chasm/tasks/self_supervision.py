"""Training on undersampled data alone (SSDU, Yaman et al., Magnetic Resonance in Medicine 2020).

The measured lines are split at random. The network gets one part as input and for data consistency. Its output is
compared with the other part, which it does not see:

    error(lines) = |A x - y|_2 / |y|_2 + |A x - y|_1 / |y|_1 over these lines;   loss = error(held out) + error(kept)

Several splits of a slice in one step, whose losses are averaged, are the multi-mask variant (Yaman et al., NMR in
Biomedicine 2022).

Readings: whole lines are held out, drawn anew in every step, where the papers draw points once. The lines in the middle
always stay in the input. Sensitivities come from all measured lines. The paper's network keeps the lines of its input
by data consistency; VarNet need not, nor a U-Net without it, hence the second error.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from chasm.mri import Operator, fft2c, to_channels, to_complex
from chasm.tasks.base import TaskBatch

CENTER_LINES = 4  # around the zero frequency; they hold most of the energy and are never held out
SPLIT_STRIDE = 2_654_435_761  # between the seeds of the splits of one slice; odd, as only the low 32 bits count


def hold_out(batch: TaskBatch, fraction: float, seeds: Sequence[int], splits: int = 1) -> TaskBatch:
    """Move a part of the measured lines of every slice from the input to `held_out` and `held_out_kspace`.

    Args:
        batch: batch of a reconstruction, with all lines that were measured.
        fraction: fraction of these lines to hold out.
        seeds: one for each slice, which draws its lines.
        splits: number of copies of each slice in the result, each with other lines held out.
    """
    batch = _repeated(batch, splits)
    assert batch.mask is not None
    if batch.mask.shape[-2] > 1:
        raise ValueError("self_supervised holds out lines: choose a kind of mask that keeps whole columns")
    rows = batch.mask.expand(len(batch.input), -1, -1, -1)[:, 0, 0].cpu()
    drawn = [seed + i * SPLIT_STRIDE for seed in seeds for i in range(splits)]
    held_out = torch.stack([_drawn_lines(row, fraction, seed) for row, seed in zip(rows, drawn, strict=True)])
    held_out = held_out[:, None, None].to(batch.input.device, non_blocking=True)
    kspace = batch.mask * fft2c(to_complex(batch.input)) if batch.measured is None else batch.measured
    mask = batch.mask - held_out
    return replace(
        batch,
        input=to_channels(Operator(mask, batch.maps).adjoint(kspace)),
        mask=mask,
        measured=None if batch.measured is None else mask * kspace,
        held_out=held_out,
        held_out_kspace=held_out * kspace,
    )


def _repeated(batch: TaskBatch, times: int) -> TaskBatch:
    """Return the batch with every slice several times in a row."""
    if times == 1:
        return batch
    size = len(batch.input)
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    tensors = {k: v for k, v in values.items() if isinstance(v, Tensor) and len(v) == size}
    case = [name for name in batch.case for _ in range(times)]
    return replace(batch, case=case, **{k: v.repeat_interleave(times, 0) for k, v in tensors.items()})


def _drawn_lines(measured: Tensor, fraction: float, seed: int) -> Tensor:
    """Return ones for the lines (W,) that are held out of those that were measured."""
    middle = len(measured) // 2
    lines = measured.nonzero().flatten()
    lines = lines[(lines < middle - CENTER_LINES // 2) | (lines >= middle + CENTER_LINES // 2)]
    count = round(fraction * len(lines))
    if not 0 < count < len(lines):
        problem = f"self_supervised={fraction:g} holds out {count} of {len(lines)} lines outside the centre"
        raise ValueError(f"{problem}: expected at least one to hold out and one to keep")
    held_out = torch.zeros(len(measured))
    held_out[lines[torch.randperm(len(lines), generator=torch.Generator().manual_seed(seed))[:count]]] = 1
    return held_out


def held_out_lines(output: Tensor, batch: TaskBatch) -> Tensor:
    """Return the held-out lines of an output (B, 2 M, H, W): complex k-space, zero elsewhere."""
    assert batch.held_out is not None
    return Operator(batch.held_out, batch.maps).forward(to_complex(output))


def self_supervised_loss(output: Tensor, batch: TaskBatch) -> Tensor:
    """Return the relative error of the held-out lines plus that of the kept ones, mean over slices."""
    assert batch.held_out_kspace is not None
    assert batch.mask is not None
    measured = batch.mask * fft2c(to_complex(batch.input)) if batch.measured is None else batch.measured
    lines = Operator(batch.mask, batch.maps).forward(to_complex(output))
    held_out = _relative_error(held_out_lines(output, batch), batch.held_out_kspace)
    return (held_out + _relative_error(lines, measured)).mean()


def _relative_error(output: Tensor, expected: Tensor) -> Tensor:
    """Return |output - expected| / |expected| in the norms l1 and l2, added: (B,), and 0 where nothing is expected."""
    error, expected = (output - expected).flatten(1), expected.flatten(1)
    total = torch.zeros(len(error), device=error.device)
    for order in (1, 2):
        size = torch.linalg.vector_norm(expected, order, dim=1)
        ratio = torch.linalg.vector_norm(error, order, dim=1) / torch.where(size > 0, size, 1)
        total = total + torch.where(size > 0, ratio, 0)
    return total
