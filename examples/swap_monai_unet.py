"""
Swap CHASM into a MONAI U-Net
=============================

The residual units of MONAI's U-Net hold two convolutions each. The second one keeps the shape of
its input, so a mixer fits in its place.
"""

import torch
from monai.networks.nets import UNet

import chasm

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
# Everything that was not replaced is the same network with the same weights, and trains with it.

loss = mixed(x).square().mean()
loss.backward()
mixers = [module for module in mixed.modules() if isinstance(module, chasm.CHASM)]
for mixer in mixers:
    print(mixer.channels, "channels, gradient of the height gains:", mixer.gain_table["ch"].grad.norm().item())

# %%
# A place that changes the shape is refused before anything is built.

try:
    chasm.swap(unet, "model.0.conv.unit0", "chasm", example=x)
except ValueError as error:
    print(error)
