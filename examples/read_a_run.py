"""
Read what a run has learned
===========================

A run folder holds everything that is needed to look at it later. This script trains one for some
seconds, opens it with :func:`chasm.train.load_run`, and draws the gains and the basis of each
mixer.
"""

import tempfile

import matplotlib.pyplot as plt
import torch

import chasm
from chasm.train import load_recipe, load_run, train

# %%
# The recipe is the one of ``chasm train folder``, on drawn brains. A line of ``a.b=c`` changes one
# key, as ``--set`` does.

recipe = load_recipe(
    "folder",
    [
        "data.name=embedded",
        "data.options={size: 64, cases: 10, slices: 4}",
        "backbone.options={width: 8, depth: 2, levels: [0, 1]}",
        "train={steps: 80, batch: 4, lr: 0.003, val_every: 80}",
    ],
)
folder = tempfile.TemporaryDirectory()
metrics = train(recipe, folder.name, quiet=True)
print("on validation:", {name: round(value, 3) for name, value in metrics["best_val"].items()})

# %%
# ``operators`` returns basis and gains of every axis for maps of a size. The gains are positive,
# the basis is orthogonal.

run = load_run(folder.name)
mixers = {name: module for name, module in run.model.named_modules() if isinstance(module, chasm.CHASM)}
with torch.no_grad():
    learned = {name: mixer.operators(64, 64)["ch"] for name, mixer in mixers.items()}
for name, operator in learned.items():
    U = operator.U
    error = (U.T @ U - torch.eye(len(U))).abs().max().item()
    print(f"{name}: gains {operator.gains.min():.2f} to {operator.gains.max():.2f}, U^T U - I at most {error:.0e}")

# %%
# Each row of the left pictures is a direction of channels, each column a frequency. The right
# pictures show how far the basis has turned away from the channels themselves.

figure, axes = plt.subplots(len(learned), 2, figsize=(8, 2.6 * len(learned)), layout="constrained")
for row, (name, operator) in zip(axes, learned.items(), strict=True):
    gains = row[0].imshow(operator.gains.T, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2)
    row[0].set(title=f"{name}: gains", xlabel="vertical frequency k", ylabel="direction")
    figure.colorbar(gains, ax=row[0])
    basis = row[1].imshow(operator.U, cmap="RdBu_r", vmin=-1, vmax=1)
    row[1].set(title="basis U", xlabel="direction", ylabel="channel")
    figure.colorbar(basis, ax=row[1])
plt.show()

# %%
folder.cleanup()
