"""
Train small, test large
=======================

The tables of CHASM say what happens at a fraction of the highest frequency, not at a pixel. So a
network that was trained on small images runs on larger ones as it is, of any height and width.
"""

import matplotlib.pyplot as plt
import torch

import chasm
from chasm.data import open_dataset


def images_of(split: str, size: int | tuple[int, int]) -> torch.Tensor:
    slices = open_dataset("embedded", split=split, size=size, cases=16, slices=3)
    images = torch.stack([s.image for s in slices]).abs()
    return images / images.amax((-2, -1), keepdim=True)


def noisy(images: torch.Tensor) -> torch.Tensor:
    return images + 0.15 * torch.randn(images.shape, generator=torch.Generator().manual_seed(2))


# %%
# A small denoiser: a convolution, two CHASM mixers, a convolution. It sees images of 48 x 48 pixels
# only.

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1),
    chasm.CHASM(16, size=48),
    chasm.CHASM(16, size=48),
    torch.nn.Conv2d(16, 1, 3, padding=1),
)
small = images_of("train", 48)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(120):
    batch = small[torch.arange(4 * step, 4 * step + 4) % len(small)]
    loss = (model(batch + 0.15 * torch.randn_like(batch)) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %%
# The same weights on other sizes: the one it was trained for, twice as large, and one with odd
# sides.

model.eval()
shown = {}
for size in (48, 96, (101, 75)):
    clean = images_of("test", size)
    with torch.no_grad():
        restored = model(noisy(clean))
    before, after = (-10 * (image - clean).square().mean().log10() for image in (noisy(clean), restored))
    print(f"{tuple(clean.shape[-2:])!s:>10}: noisy {before:.1f} dB, restored {after:.1f} dB")
    shown[size] = (noisy(clean)[0, 0], restored[0, 0])

# %%
# The picture shows the larger size. To load trained weights, build the mixer with the ``size`` it
# was trained with, load, and give it maps of the new size.

figure, axes = plt.subplots(1, 2, figsize=(7, 3.6), layout="constrained")
for axis, image, title in zip(axes, shown[96], ("noisy, 96 x 96", "restored"), strict=True):
    axis.imshow(image, cmap="gray", vmin=0, vmax=1)
    axis.set_title(title)
    axis.set_axis_off()
plt.show()
