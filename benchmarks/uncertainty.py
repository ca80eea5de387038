"""How well the maps of `chasm reconstruct --uncertainty` fit the true errors of the shipped models.

    python benchmarks/uncertainty.py DATA --slices 4 --draws 8 > uncertainty.md

Slices of the test parts of the proxy bundle, spread over the patients, are undersampled and reconstructed; their truth
is known. The table has, for each model and part: the root mean square of the errors over that of the maps (1 is right,
more means that the map is too small), the share of pixels whose error is within the map and within twice the map (68
and 95 % if errors were Gaussian), and the correlation of error and map over pixels.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from chasm.data import open_dataset
from chasm.models import shipped_models
from chasm.reconstruct import reconstruct
from chasm.train import load_run

ELSEWHERE = {"brain-x4": ["brain_siat_t2"], "brain-x8": ["brain_siat_t2"]}  # parts that a model was not trained on


def measure(model: str, part: str, data: Path, slices: int, draws: int) -> str:
    """Return a row of the table.

    Args:
        model: the name of a shipped model.
        part: of the bundle.
        data: the folder of the bundle.
        slices: how many.
        draws: of a map.
    """
    test = open_dataset("proxy", data, split="test", part=part, phase=True)
    rows = np.linspace(0, len(test) - 1, slices).round().astype(int)
    images = np.stack([test[int(row)].image[0].numpy() for row in rows])
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/scan.npy", images)
        volume = reconstruct(f"{folder}/scan.npy", model, f"{folder}/out.npy", uncertainty=draws).volumes[0]
        error = np.abs(np.load(f"{folder}/out.npy") - np.abs(images))
        spread = np.load(f"{folder}/out.uncertainty.npy")
    ratio = np.sqrt(np.square(error).mean() / np.square(spread).mean())
    each = np.sqrt(np.square(error).mean((1, 2)) / np.square(spread).mean((1, 2)))
    within = [f"{(error < times * spread).mean():.0%}" for times in (1, 2)]
    correlation = np.corrcoef(error.ravel(), spread.ravel())[0, 1]
    psnr = volume.scores["psnr"]
    assert volume.uncertainty is not None
    cells = (model, part, f"{psnr:.1f}", f"{ratio:.2f}", f"{each.min():.2f} to {each.max():.2f}", *within)
    return f"| {' | '.join(cells)} | {correlation:.2f} | {volume.uncertainty.factor:.2f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder of the proxy bundle")
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--draws", type=int, default=8)
    options = parser.parse_args()
    print("| model | data | PSNR | error / map | per slice | within map | within twice | correlation | factor |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in shipped_models():
        config = load_run(model).config
        if config.task.name != "reconstruction":
            continue
        own = config.data.options["part"]
        for part in [*([own] if isinstance(own, str) else own), *ELSEWHERE.get(model, [])]:
            print(measure(model, part, options.data, options.slices, options.draws), flush=True)


if __name__ == "__main__":
    main()
