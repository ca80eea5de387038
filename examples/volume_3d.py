"""
A 3-D volume
============

``ndim=3`` gives a mixer for volumes (B, C, D, H, W): one more axis, one more basis and one more
table of gains. With ``ndim=1`` it takes sequences. Here the bare core learns to remove noise from a
drawn head, and its gains show how.
"""

import matplotlib.pyplot as plt
import torch

import chasm
from chasm.data import open_dataset

DEPTH, SIZE = 12, 48
slices = open_dataset("embedded", split="train", size=SIZE, cases=8, slices=DEPTH)
volumes = torch.stack([s.image for s in slices]).abs().reshape(-1, 1, DEPTH, SIZE, SIZE)
volumes = volumes / volumes.amax()
print(volumes.shape)

# %%
# With one channel and no convolutions, only one gain for each frequency of each axis is left.

torch.manual_seed(0)
core = chasm.CHASM(1, ndim=3, size=(DEPTH, SIZE, SIZE), local=False)
print(core.axes, {axis: tuple(table.shape) for axis, table in core.gain_table.items()})

optimizer = torch.optim.AdamW(core.parameters(), lr=3e-3)
for step in range(60):
    clean = volumes[step % len(volumes)][None]
    loss = (core(clean + 0.2 * torch.randn_like(clean)) - clean).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %%
# It has learned what a Wiener filter does: it keeps the low frequencies, where the head is, and
# lowers the high ones, where the noise is.

clean = volumes[:1]
with torch.no_grad():
    noisy = clean + 0.2 * torch.randn_like(clean)
    restored = core(noisy)
    gains = {axis: operator.gains[:, 0] for axis, operator in core.operators(DEPTH, SIZE, SIZE).items()}

figure, axes = plt.subplots(1, 3, figsize=(9.5, 3.2), layout="constrained")
for axis, volume, title in ((axes[0], noisy, "noisy slice"), (axes[1], restored, "restored slice")):
    axis.imshow(volume[0, 0, DEPTH // 2], cmap="gray", vmin=0, vmax=1)
    axis.set_title(title)
    axis.set_axis_off()
names = {"cd": "depth", "ch": "height", "cw": "width"}
for name, values in gains.items():
    axes[2].plot(torch.linspace(0, 1, len(values)), values, label=names[name])
axes[2].set(xlabel="fraction of the highest frequency", title="learned gains", ylim=(0, None))
axes[2].legend()
plt.show()
