"""Every mixer trains in every host, in bfloat16 as in float32."""

import pytest
import torch

import chasm
from chasm.mri import Sampling
from chasm.tasks import Reconstruction

HOSTS = {
    "hifi-mamba": {"width": 16, "groups": 1, "blocks": 1, "state": 4, "dropout": 0.0, "drop_path": 0.0},
    "unet": {"width": 16, "depth": 2, "levels": (1, 2)},
    "varnet": {"cascades": 2, "width": 8, "depth": 1, "levels": (1,)},
    "vit": {"width": 32, "depth": 2, "heads": 4, "patch": 4, "head_width": 8, "slot_blocks": (1, 2)},
}
STEPS, LR = 8, 6e-3


def losses(host: str, mixer: str, dtype: torch.dtype) -> list[float]:
    """The losses of a few steps of AdamW on four slices of blobs, always the same."""
    torch.manual_seed(0)
    size = (16, 16)
    coarse = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    image = torch.nn.functional.interpolate(coarse, size, mode="bicubic")
    batch = (task := Reconstruction(Sampling("equispaced", 4))).prepare(image)
    model = chasm.create_backbone(host, mixer, size=size, **HOSTS[host])
    optimiser = torch.optim.AdamW(model.parameters(), lr=LR)
    found = []
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = model(batch.input, **batch.physics)
        loss = task.loss(output.float(), batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("mixer", chasm.list_mixers())
@pytest.mark.parametrize("host", HOSTS)
def test_bfloat16_lowers_the_loss_about_as_float32_does(host: str, mixer: str) -> None:
    single, half = (losses(host, mixer, dtype) for dtype in (torch.float32, torch.bfloat16))
    start, end = single[0], sum(single[-3:]) / 3
    assert end < 0.98 * start
    assert sum(half[-3:]) / 3 < end + 0.25 * (start - end)
