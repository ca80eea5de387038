"""
Fold and export to ONNX
=======================

A trained mixer need not build its bases again. :func:`chasm.fold` turns every CHASM mixer of a
network into constants, and :func:`chasm.export_onnx` writes a folded network as a file and checks
it in onnxruntime.
"""

import tempfile
import timeit
from pathlib import Path

import matplotlib.pyplot as plt
import onnxruntime
import torch

import chasm

torch.manual_seed(0)
model = chasm.create_backbone("unet", mixer="chasm", size=(64, 64), width=8, depth=2, levels=(0, 1, 2)).eval()
for mixer in model.modules():
    if isinstance(mixer, chasm.CHASM):  # stands in for training: bases and gains away from the identity
        for parameter in (*mixer.theta.values(), *mixer.gain_table.values()):
            torch.nn.init.normal_(parameter, std=0.5 / mixer.step_scale)
x = torch.randn(1, 2, 64, 64)

# %%
# Folding needs an example: constants are made for its size.

folded = chasm.fold(model, example=x)
with torch.no_grad():
    difference = (folded(x) - model(x)).abs().max().item()
print(f"largest difference: {difference:.1e}")
print("CHASM mixers left:", sum(isinstance(module, chasm.CHASM) for module in folded.modules()))

# %%
# The folded network is an ordinary module. It runs at the size it was folded for, and says so at
# another.

try:
    folded(torch.randn(1, 2, 96, 96))
except ValueError as error:
    print(error)

# %%
# The ONNX file
# -------------
#
# ``export_onnx`` folds, writes, and compares the file with the original network before it returns.
# No FFT is left in the file: it holds convolutions and matrix products, which every runtime has.

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "model.onnx")
    chasm.export_onnx(model, file, x)
    print(f"{file.stat().st_size / 1e6:.1f} MB")
    session = onnxruntime.InferenceSession(file)
(y,) = session.run(None, {"x": x.numpy()})
with torch.no_grad():
    print(f"largest difference to PyTorch: {(torch.from_numpy(y) - model(x)).abs().max().item():.1e}")

# %%
# How long does one image take? The shortest of twenty times, on one core of the machine that built this
# page.


def milliseconds(call) -> float:
    call()
    return 1e3 * min(timeit.repeat(call, number=1, repeat=20))


with torch.no_grad():
    times = {
        "not folded": milliseconds(lambda: model(x)),
        "folded": milliseconds(lambda: folded(x)),
        "ONNX": milliseconds(lambda: session.run(None, {"x": x.numpy()})),
    }
figure, axis = plt.subplots(figsize=(6, 2.6), layout="constrained")
bars = axis.barh(list(times), list(times.values()))
axis.bar_label(bars, fmt="%.1f", padding=3)
axis.invert_yaxis()
axis.set(xlabel="milliseconds for one forward pass")
axis.margins(x=0.15)
plt.show()
