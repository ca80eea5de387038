"""What the models that come with chasm add to compressed sensing, on the same slices and under the same mask.

    python benchmarks/models_and_tv.py FOLDER        # of the proxy bundle

Prints a Markdown table of PSNR, as mean over the test slices. Total variation has the strength that `chasm reconstruct
--run tv` uses.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from chasm.common.tables import markdown_table
from chasm.mri import Operator, to_channels, to_complex
from chasm.mri.classical import total_variation
from chasm.train import load_run
from chasm.train.evaluation import split_of, under
from chasm.train.run import score

PARTS = {
    "brain-x4": ["brain_ixi_pd", "tumour_lgg_flair", "brain_siat_t2"],
    "brain-x8": ["brain_ixi_pd", "tumour_lgg_flair", "brain_siat_t2"],
    "knee-x4": ["knee_stanford_pdfs"],
}


class TotalVariation(nn.Module):
    """Compressed sensing in the place of a network: from the zero-filled image and the mask to an image."""

    def forward(self, x: Tensor, mask: Tensor, **_: Tensor) -> Tensor:
        """Return real and imaginary part of the image with little total variation.

        Args:
            x: zero-filled image (B, 2, H, W).
            mask: columns that were measured.
        """
        A = Operator(mask)
        return to_channels(total_variation(A, A.forward(to_complex(x))))


def rows(folder: str) -> Iterator[list[str]]:
    """Yield a row of the table for every model and every part of the bundle that it is scored on."""
    cpu = torch.device("cpu")
    for name, parts in PARTS.items():
        for part in parts:
            fixed = ["task.options.masks=fixed", "data.options.also=[]", f"data.options.part={part}"]
            run = under(load_run(name), fixed)
            data = split_of(run, "test", cpu, folder)
            scores = [score(model, run.task, data, cpu, 4, 0) for model in (None, TotalVariation(), run.model)]
            yield [name, part, *(f"{s.stats['psnr'].mean:.1f}" for s in scores if s is not None)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder of the proxy bundle")
    header = ["model", "test slices", "zero-filled", "compressed sensing", "model"]
    print(markdown_table(header, list(rows(parser.parse_args().folder))))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
