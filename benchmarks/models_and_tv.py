"""What the models that come with chasm add to compressed sensing, on the same slices and under the same mask.

    python benchmarks/models_and_tv.py FOLDER        # of the proxy bundle
    python benchmarks/models_and_tv.py FOLDER --phase 1.5 --unaligned

Prints a Markdown table of PSNR, as mean over the test slices. Total variation has the strength that `chasm reconstruct
--run tv` uses. With --phase, a phase in radians is added to the images that the models see; with --unaligned, they do
not turn it back.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from chasm.backbones import VarNet
from chasm.common.tables import markdown_table
from chasm.mri import Operator, to_channels, to_complex
from chasm.mri.classical import total_variation
from chasm.train import load_run
from chasm.train.evaluation import split_of, under
from chasm.train.run import score

PARTS = {
    "brain-x8": ["brain_ixi_pd", "tumour_lgg_flair", "brain_siat_t2"],
    "brain-x4": ["brain_ixi_pd", "tumour_lgg_flair", "brain_siat_t2"],
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


class Turned(nn.Module):
    """A network that sees its images with a phase added. Scores are of magnitudes, which have none.

    Args:
        network: a network for complex images.
        phase: the phase in radians.
    """

    def __init__(self, network: nn.Module, phase: float) -> None:
        super().__init__()
        self.network, self.turn = network, torch.polar(torch.ones(()), torch.tensor(phase))

    def forward(self, x: Tensor, mask: Tensor, **_: Tensor) -> Tensor:
        """Return what the network makes of a zero-filled image.

        Args:
            x: zero-filled image (B, 2, H, W).
            mask: columns that were measured.
        """
        restored: Tensor = self.network(to_channels(to_complex(x) * self.turn), mask=mask)
        return restored


def rows(folder: str, phase: float, align: bool) -> Iterator[list[str]]:
    """Yield a row of the table for every model and every part of the bundle that it is scored on.

    Args:
        folder: folder of the bundle.
        phase: phase in radians that is added to the images.
        align: whether the models turn it back.
    """
    cpu = torch.device("cpu")
    for name, parts in PARTS.items():
        for part in parts:
            fixed = ["task.options.masks=fixed", "data.options.also=[]", f"data.options.part={part}"]
            run = under(load_run(name), fixed)
            data = split_of(run, "test", cpu, folder)
            assert isinstance(run.model, VarNet)
            run.model.align_phase = align
            columns = None, TotalVariation(), Turned(run.model, phase)
            scores = [score(column, run.task, data, cpu, 4, 0) for column in columns]
            yield [name, part, *(f"{s.stats['psnr'].mean:.1f}" for s in scores if s is not None)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder of the proxy bundle")
    parser.add_argument("--phase", type=float, default=0.0, help="phase in radians that is added to all images")
    parser.add_argument("--unaligned", action="store_true", help="the models do not turn the phase back")
    asked = parser.parse_args()
    header = ["model", "test slices", "zero-filled", "compressed sensing", "model"]
    print(markdown_table(header, list(rows(asked.folder, asked.phase, not asked.unaligned))))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
