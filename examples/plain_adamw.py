"""
Plain AdamW, with and without CHASM
===================================

CHASM needs no special optimiser. This script trains the same small U-Net twice with
``torch.optim.AdamW`` and one learning rate: once with empty slots and once with CHASM in them. It
restores drawn brains from a quarter of their k-space, and the loop is ordinary PyTorch.
"""

import matplotlib.pyplot as plt
import torch

import chasm
from chasm.data import open_dataset
from chasm.mri import Operator, create_mask, to_channels, to_complex

STEPS, SIZE = 100, 64


def images_of(split: str) -> torch.Tensor:
    slices = open_dataset("embedded", split=split, size=SIZE, cases=20, slices=3)
    images = torch.stack([s.image for s in slices]).abs()
    return images / images.amax((-2, -1), keepdim=True)


train, test = images_of("train"), images_of("test")
mask = create_mask("equispaced", SIZE, acceleration=4)
measurement = Operator(mask.tensor())
print(mask)

# %%
# The input is the zero-filled image, as a real and an imaginary channel. The loss is the mean
# absolute error.


def magnitudes(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    return to_complex(model(to_channels(measurement.normal(images)))).abs()


def fit(mixer: str) -> tuple[torch.nn.Module, list[float]]:
    torch.manual_seed(0)  # the same first weights outside the slots, whatever the mixer is
    model = chasm.create_backbone("unet", mixer=mixer, size=(SIZE, SIZE), width=8, depth=2, levels=(0, 1, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        batch = train[torch.randint(len(train), (4,), generator=order)]
        with chasm.batched_bases(model):  # optional: builds all bases of the step in one call
            loss = (magnitudes(model, batch) - batch).abs().mean()
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.eval(), losses


def psnr(images: torch.Tensor) -> float:
    errors = (images - test).square().mean((-2, -1))
    return (-10 * errors.log10()).mean().item()


# %%
# Train the two networks, one after the other.

figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
print(f"zero-filled            {psnr(measurement.normal(test).abs()):.2f} dB")
for mixer in ("identity", "chasm"):
    model, losses = fit(mixer)
    with torch.no_grad():
        score = psnr(magnitudes(model, test))
    print(f"U-Net with {mixer:12}{score:.2f} dB")
    smoothed = torch.tensor(losses).unfold(0, 8, 1).mean(1)
    axis.plot(range(8, STEPS + 1), smoothed, label=f"{mixer}: {score:.1f} dB on the test images")
axis.set(xlabel="step of AdamW", ylabel="mean absolute error", yscale="log")
axis.legend()
plt.show()

# %%
# This works because of the step scale. Basis and gains start at the identity, and a step of AdamW
# moves any parameter by about the learning rate. The mixer stores them divided by 30
# (``step_scale``), so that the same step moves them 30 times as far. Drawn images show that the
# software works; they do not show which mixer is best on scans.
