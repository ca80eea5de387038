"""A model whose gains can be scaled in bands of frequencies while it runs, to see what each band does."""

from typing import Any

from torch import Tensor, nn

from chasm.surgery.free_size import _AxisGains, free_size


class _Factors:
    """Holds the factors of the bands during one call."""

    values: Tensor


class _BandedGains(_AxisGains):
    """The gains of one axis, times the factor of the band that each frequency lies in."""

    def __init__(self, plain: _AxisGains, factors: _Factors) -> None:
        super().__init__(plain.table, plain.dim, plain.is_positive)
        self.factors = factors

    def _at(self, frequency: Tensor, highest: Tensor) -> Tensor:
        values = self.factors.values
        band = frequency * values.shape[0] // (highest + 1)
        return super()._at(frequency, highest) * values[band][:, None]


class Banded(nn.Module):
    """A copy of a model, in eval mode, that takes factors of frequency bands before its own arguments.

    The frequencies of every axis, from zero to the highest, are cut into as many equal bands as there are factors, and
    the gains of all CHASM mixers in a band are multiplied by its factor. With ones it equals the model to rounding.

    Args:
        model: a model that `chasm.surgery.free_size.free_size` takes; it runs at any size.

    Example:
        >>> import chasm, torch
        >>> mixer, x = chasm.CHASM(4, size=(8, 8)).eval(), torch.randn(1, 4, 8, 8)
        >>> torch.allclose(Banded(mixer)(torch.ones(5), x), mixer(x), atol=1e-5)
        True
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.factors = free_size(model), _Factors()
        for parent in list(self.model.modules()):
            for name, child in parent.named_children():
                if isinstance(child, _AxisGains):
                    setattr(parent, name, _BandedGains(child, self.factors))
        self.eval()

    def forward(self, factors: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for the other arguments, with its gains scaled.

        Args:
            factors: one for each band, from low to high frequencies.
            *args: arguments of the model.
            **kwargs: keyword arguments of the model.
        """
        self.factors.values = factors
        return self.model(*args, **kwargs)
