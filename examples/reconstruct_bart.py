"""
Reconstruct a BART file
=======================

Scanners and toolboxes have their own files. This script writes the k-space of a drawn head as a
BART ``.cfl``, trains a small network for some seconds, and reconstructs the file with it. An
ISMRMRD file, a Siemens ``.dat`` or a fastMRI volume works in the same way.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from chasm.data import KSpaceScan, open_dataset, read_scans, write_scan
from chasm.mri import fft2c
from chasm.reconstruct import reconstruct
from chasm.train import load_recipe, train

folder = tempfile.TemporaryDirectory()
here = Path(folder.name)

# %%
# The scan has three fully sampled slices of one coil, so that there is a truth to compare with.
# ``write_scan`` takes the format from the suffix: ``.cfl`` is BART, ``.mrd`` is ISMRMRD.

slices = [s.image for s in open_dataset("embedded", split="test", size=64, cases=6, slices=3)][:3]
kspace = np.stack([fft2c(image).numpy() for image in slices]).astype(np.complex64)  # (slices, coils, H, W)
write_scan(KSpaceScan(kspace, size=(64, 64)), here / "scan.cfl")
print(sorted(file.name for file in here.iterdir()))
for name, scan in read_scans(here / "scan.cfl").items():
    print(repr(name), scan.kspace.shape, scan.size)

# %%
# We train a small U-Net with CHASM to reconstruct with, x4 equispaced. For your own data, use
# ``chasm train``.

recipe = load_recipe(
    "folder",
    [
        "data.name=embedded",
        "data.options={size: 64, cases: 12, slices: 3}",
        "backbone.options={width: 8, depth: 2, levels: [0, 1, 2], data_consistency: true}",
        "train={steps: 80, batch: 4, lr: 0.003, val_every: 80}",
    ],
)
train(recipe, here / "run", quiet=True)

# %%
# The command line does the same: ``chasm reconstruct scan.cfl --run run -o volume.nii.gz``. Full
# k-space is undersampled with the mask of the run, and scored against itself.

outcome = reconstruct(here / "scan.cfl", here / "run", here / "volume.nii.gz")
(volume,) = outcome.volumes
print(outcome.read_as)
print(outcome.sampling)
print("zero-filled:  ", {name: round(value, 3) for name, value in volume.reference.items()})
print("reconstructed:", {name: round(value, 3) for name, value in volume.scores.items()})
for note in outcome.notes:
    print("note:", note)

# %%
# Compressed sensing with total variation needs no training. It gets the same columns of k-space.

classical = reconstruct(here / "scan.cfl", "tv", here / "tv.nii.gz", acceleration=4)
scores = classical.volumes[0].scores
print("compressed sensing:", {name: round(value, 3) for name, value in scores.items()})

# %%
# A picture is written beside the volume. Some seconds of training remove a part of the aliasing. ``chasm demo`` trains
# for minutes and shows a better result.

figure, axis = plt.subplots(figsize=(9, 6), layout="constrained")
axis.imshow(plt.imread(volume.picture), cmap="gray")
axis.set_axis_off()
plt.show()

# %%
folder.cleanup()
