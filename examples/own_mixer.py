"""
Your own mixer in a study
=========================

A mixer of your own takes one class. With a name in the registry it is a mixer like the others: in
networks, in recipes and in the studies of the paper, on the same data and with the same first
weights of the network around it.
"""

import tempfile

import matplotlib.pyplot as plt
import torch

import chasm
from chasm.mixers import Facts, Mixer
from chasm.studies import collect, make_plan
from chasm.studies.plan import part_of
from chasm.train import train

# %%
# This one passes every channel through one learned 1-D filter along each axis, without mixing
# channels.


@chasm.register_mixer("strips")
class Strips(Mixer):
    """A depthwise convolution along height, then one along width."""

    facts = Facts(response="none", channel_mixing="none", resolution="any")

    def __init__(self, channels, *, size=None, taps=7, device=None, dtype=None):
        super().__init__()
        common = {"groups": channels, "device": device, "dtype": dtype}
        self.height = torch.nn.Conv2d(channels, channels, (taps, 1), padding=(taps // 2, 0), **common)
        self.width = torch.nn.Conv2d(channels, channels, (1, taps), padding=(0, taps // 2), **common)

    def forward(self, x):
        return self.width(self.height(x)).to(x.dtype)  # autocast may have changed it


print(chasm.list_mixers())
print(chasm.create_mixer("strips", channels=8, taps=5))

# %%
# One bright pixel shows how far it reaches.

figure, axes = plt.subplots(1, 3, figsize=(8, 2.9), layout="constrained")
pixel = torch.zeros(1, 8, 33, 33)
pixel[:, :, 16, 16] = 1
for axis, taps in zip(axes, (3, 7, 15), strict=True):
    mixer = chasm.create_mixer("strips", channels=8, taps=taps)
    with torch.no_grad():
        reached = (mixer(pixel) - mixer(torch.zeros_like(pixel))).square().sum(1).sqrt()[0]
    axis.imshow(reached, cmap="magma")
    axis.set_title(f"{taps} taps")
    axis.set_axis_off()
plt.show()

# %%
# In a file ``mine.py`` the same class is used by every command: ``chasm --with mine.py train demo
# --set mixer.name=strips``, or in a study, ``chasm --with mine.py study run wrapper --arm strips``.
# In Python a study is a plan, and a plan is a list of runs. We take the part with a U-Net, and two
# steps per run to keep this page quick. They show that it runs, not which mixer is better.

small = ["train.steps=2", "train.val_every=2", "data.options.cases=6", "data.options.slices=1"]
plan = make_plan("wrapper", seeds=[0], arms=["strips"], overrides=small)
plan = part_of(plan, ["host=unet", "arm=baseline,chasm,strips"])
for planned in plan.runs:
    print(planned.key)

# %%
# ``chasm study run`` trains what is missing, several runs at once. Here we train them one after the
# other.

with tempfile.TemporaryDirectory() as folder:
    for planned in plan.runs:
        train(planned.config, plan.folder(folder, planned), quiet=True)
    results = collect(plan, folder)
for row in results.rows:
    print(f"{row.arm:10} {row.scores['psnr'].mean:.2f} dB after two steps")
