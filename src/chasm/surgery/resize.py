"""Fit weights of mixers to a model whose tables have another size."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from chasm.mixers.chasm import CHASM
from chasm.mixers.free_operator import FreeOperator
from chasm.mixers.gfnet import GFNet, resize_filter
from chasm.ops.gains import interpolation_matrix


@torch.no_grad()
def resize_tables(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return weights whose tables over frequency have the bins of a model, for `model.load_state_dict`.

    Tables of CHASM and of free operators, and filters of GFNet, are read at the new bins as the mixer reads them at the
    frequencies of a map. On maps with as many frequencies as the new tables have bins the operator stays the same.

    Args:
        weights: a state dict of the same network, built for another size.
        model: the network that the weights are for.

    Returns:
        A new mapping. Other tensors, and tables of the right size, are passed on as they are.

    Example:
        >>> small, large = CHASM(4, size=16), CHASM(4, size=32)
        >>> missing, unexpected = large.load_state_dict(resize_tables(small.state_dict(), large))
        >>> large.gain_table["ch"].shape
        torch.Size([17, 4])
    """
    resized = dict(weights)
    for prefix, module in model.named_modules():
        for name, table in _tables(module).items():
            key = ".".join(filter(None, (prefix, name)))
            if key not in resized or resized[key].shape == table.shape:
                continue
            if isinstance(module, GFNet):
                height, width = table.shape[:2]
                resized[key] = resize_filter(resized[key], (height, width), module.resize_mode)
            else:
                resized[key] = _at_bins(resized[key], len(table))
    return resized


def _tables(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a mixer that have an entry for every frequency, by name."""
    if isinstance(module, GFNet):
        return {"filter": module.filter}
    if isinstance(module, FreeOperator):
        return {f"table.{axis}": table for axis, table in enumerate(module.table)}
    if not isinstance(module, CHASM):
        return {}
    groups = {"gain_table": module.gain_table, "phase_table": module.phase_table}
    if module.basis == "untied":
        groups["theta"] = module.theta
    return {f"{name}.{axis}": table for name, tables in groups.items() for axis, table in tables.items()}


def _at_bins(table: Tensor, bins: int) -> Tensor:
    """Return a table (B, M) at another number of bins, end points aligned."""
    exact = table.double() if table.device.type != "mps" else table.float()
    W = interpolation_matrix(table.device, bins, len(table), exact.dtype)
    return (W @ exact).to(table.dtype)
