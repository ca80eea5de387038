"""Weights of CHASM mixers with other numbers of bins than the model has."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from chasm.mixers.chasm import CHASM
from chasm.ops.gains import interpolation_matrix


@torch.no_grad()
def resize_tables(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return weights whose CHASM tables have the bins of a model, for `model.load_state_dict`.

    Tables are read at the new bins as a mixer reads them at the frequencies of a map. On maps with as many frequencies
    as the new tables have bins the operator stays the same.

    Args:
        weights: a state dict of the same network, built for another size.
        model: the network that the weights are for.

    Returns:
        A new mapping. What is no table, or has the right size, is passed on as it is.

    Example:
        >>> small, large = CHASM(4, size=16), CHASM(4, size=32)
        >>> missing, unexpected = large.load_state_dict(resize_tables(small.state_dict(), large))
        >>> large.gain_table["ch"].shape
        torch.Size([17, 4])
    """
    resized = dict(weights)
    for prefix, module in model.named_modules():
        if not isinstance(module, CHASM):
            continue
        tables = {"gain_table": module.gain_table, "phase_table": module.phase_table}
        if module.basis == "untied":
            tables["theta"] = module.theta
        for name, parameters in tables.items():
            for axis, parameter in parameters.items():
                key = ".".join(filter(None, (prefix, name, axis)))
                if key in resized and len(resized[key]) != len(parameter):
                    resized[key] = _at_bins(resized[key], len(parameter))
    return resized


def _at_bins(table: Tensor, bins: int) -> Tensor:
    """Return a table (B, M) at another number of bins, end points aligned."""
    exact = table.double() if table.device.type != "mps" else table.float()
    W = interpolation_matrix(table.device, bins, len(table), exact.dtype)
    return (W @ exact).to(table.dtype)
