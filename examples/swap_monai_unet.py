"""
Swap CHASM into a MONAI U-Net
=============================

The residual units of MONAI's U-Net hold two convolutions each. The second one keeps the shape of
its input, so a mixer fits in its place.
"""

import matplotlib.pyplot as plt
import torch
from monai.networks.nets import UNet

import chasm
from chasm.data import open_dataset

torch.manual_seed(0)
unet = UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 16, 32), strides=(2, 2), num_res_units=2)
x = torch.randn(1, 1, 64, 64)

# %%
# ``print(unet)`` shows the names. ``unit1`` is the second convolution of a residual unit. We choose
# the two of the encoder, where the network has 8 channels at 32 x 32 and 16 channels at 16 x 16.

places = [name for name, module in unet.named_modules() if name.endswith("conv.unit1")]
print("\n".join(places))
encoder = {"model.0.conv.unit1", "model.1.submodule.0.conv.unit1"}

# %%
# Nothing in MONAI adds the input of ``unit1`` to its output, so ``host_residual=False``: the mixer
# keeps its own identity path.

mixed = chasm.swap(unet, lambda name, module: name in encoder, "chasm", example=x, host_residual=False)
print(mixed(x).shape, mixed(torch.randn(1, 1, 96, 80)).shape)

# %%
# Everything that was not replaced is the same network with the same weights, and trains with it. We
# train both networks for a few seconds to remove noise from drawn brains.

slices = open_dataset("embedded", split="train", size=64, cases=20, slices=3)
clean = torch.stack([s.image[:1].abs() for s in slices])
clean = clean / clean.amax((-2, -1), keepdim=True)


def fit(model: torch.nn.Module) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = torch.Generator().manual_seed(1)
    for _ in range(120):
        batch = clean[torch.randint(len(clean), (4,), generator=order)]
        loss = (model(batch + 0.15 * torch.randn(batch.shape, generator=order)) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


for name, model in (("MONAI's U-Net", unet), ("with CHASM", mixed)):
    print(f"{name:14} last loss {fit(model):.4f}")

# %%
# The picture shows the last slice with noise, and the outputs of the two networks.

noisy = clean[-1:] + 0.15 * torch.randn(1, 1, 64, 64)
with torch.no_grad():
    images = {"noisy": noisy, "MONAI's U-Net": unet.eval()(noisy), "with CHASM": mixed.eval()(noisy)}
figure, axes = plt.subplots(1, 3, figsize=(9, 3.3), layout="constrained")
for axis, (title, image) in zip(axes, images.items(), strict=True):
    axis.imshow(image[0, 0], cmap="gray", vmin=0, vmax=1)
    axis.set_title(title)
    axis.set_axis_off()
plt.show()

# %%
# A place that changes the shape is refused before anything is built.

try:
    chasm.swap(unet, "model.0.conv.unit0", "chasm", example=x)
except ValueError as error:
    print(error)
