"""
Your first mixer
================

A mixer takes a feature map and returns one of the same shape. CHASM goes to the frequencies of one
axis, multiplies the channels of each frequency by a small symmetric matrix, comes back, and does
the same along the other axis.
"""

# %%
# Three lines are all it takes. ``size`` tells CHASM for which maps to make its tables; every other
# size works too.

import matplotlib.pyplot as plt
import torch

import chasm
from chasm.data import open_dataset

mixer = chasm.CHASM(16, size=(64, 64))
x = torch.randn(2, 16, 64, 64)
print(mixer(x).shape, mixer(torch.randn(2, 16, 51, 90)).shape)

# %%
# Basis and gains start at the identity, so the spectral core changes nothing before it is trained.

core = chasm.CHASM(16, size=(64, 64), local=False)  # without the convolutions around it
print("largest change before training:", (core(x) - x).abs().max().item())

# %%
# What a gain does
# ----------------
#
# To see what training can do, we set the gains of a core with one channel by hand: the lower half
# of the vertical frequencies stays, the upper half becomes a tenth. The gain is the softplus of the
# table, and the table is stored divided by ``step_scale``; :meth:`chasm.CHASM.operators` returns
# the gains themselves.

brain = open_dataset("embedded", split="test", size=96, cases=6, slices=3)[1].image[:1].abs()[None]
smooth = chasm.CHASM(1, size=(96, 96), axes="ch", local=False)
wanted = torch.ones(49, 1)
wanted[12:] = 0.1
with torch.no_grad():
    start = smooth.axis_parameters("ch").gain_table
    smooth.gain_table["ch"].copy_((torch.log(torch.expm1(wanted)) - start) / smooth.step_scale)
    blurred = smooth(brain)
    gains = smooth.operators(96, 96)["ch"].gains

figure, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
for axis, image, title in ((axes[0], brain, "input"), (axes[2], blurred, "output")):
    axis.imshow(image[0, 0].numpy(), cmap="gray", vmin=0, vmax=brain.max())
    axis.set_title(title)
    axis.set_axis_off()
axes[1].step(range(49), gains[:, 0].numpy(), where="mid")
axes[1].set(title="gain", xlabel="vertical frequency k", ylim=(0, 1.1))
plt.show()

# %%
# Vertical detail is gone and horizontal detail is untouched: one pass works along one axis only.
#
# Which form runs
# ---------------
#
# CHASM has several equal ways to compute the same thing, and picks one by size, dtype and device.

print(mixer.explain(x))
