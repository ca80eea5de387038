"""Networks to fold, away from their initial point, inputs for them, and what swaps are tried with."""

from typing import Any

import torch
from torch import Tensor, nn

from chasm import CHASM


def moved(model: nn.Module) -> Any:
    """The model with all parameters moved at random; gains and bases as far as the rest, whatever the step scale."""
    torch.manual_seed(3)
    mixers = [m for m in model.modules() if isinstance(m, CHASM)]
    scales = {p: m.step_scale for m in mixers for name in m.spectral_parameters for p in getattr(m, name).values()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 / scales.get(p, 1) * torch.randn_like(p))
    return model


def features(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype)


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


class Net(nn.Module):
    """Mixers at two sizes, one in a container, and a normalisation whose eval mode differs from training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.first = CHASM(4, size=(8, 6))
        self.down = nn.Conv2d(4, 4, 2, stride=2)
        self.rest = nn.ModuleDict({"mix": CHASM(4, size=(4, 3), axes="ch+cw", residual=False)})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rest["mix"](self.down(self.first(self.norm(x))))
        return y


class Outputs(nn.Module):
    """A number beside the image, the mixer called by keyword, and outputs of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = CHASM(3, size=(6, 5))

    def forward(self, x: Tensor, level: Tensor) -> dict[str, Any]:
        y = self.mixer(x=x) * level
        return {"y": y, "more": (y.mean(), None), "label": y.argmax(1)}


class Double(nn.Module):
    """Stands for a mixer: sees (B, C, H, W), doubles it and remembers what it saw."""

    def __init__(self, channels: int, size: tuple[int, ...]) -> None:
        super().__init__()
        self.channels, self.size = channels, size
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach().clone()
        return self.weight * x


def encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
