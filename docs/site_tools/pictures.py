"""The numbers behind the interactive pictures: a drawn brain, and the response of a real CHASM core to one pixel."""

import json

import torch

import chasm
from chasm.data import open_dataset

SIZE = 96  # pixels of the drawn brain, each way
GRID = 17  # pixels of the response, each way


def as_script() -> str:
    """Return a script that puts the data where `pictures.js` looks for it. A script also loads from a local file."""
    data = {"size": SIZE, "brain": brain(), "grid": GRID, "height": response("ch"), "both": response("ch>cw")}
    return f"window.chasmPictures = {json.dumps(data, separators=(',', ':'))};\n"


def brain() -> list[int]:
    """Return a drawn slice row by row, as grey values from 0 to 255."""
    image = open_dataset("embedded", split="test", contrast="t1", size=SIZE, cases=6, slices=3)[1].image[0].abs()
    return grey(image)


def response(axes: str) -> list[int]:
    """Return what a core with random gains makes of one bright pixel in the middle, as grey values.

    Args:
        axes: the passes of the core, as `chasm.CHASM` takes them.
    """
    torch.manual_seed(3)
    core = chasm.CHASM(4, size=GRID, axes=axes, local=False)
    pixel = torch.zeros(1, 4, GRID, GRID)
    pixel[0, 0, GRID // 2, GRID // 2] = 1
    with torch.no_grad():
        for parameter in (*core.theta.values(), *core.gain_table.values()):
            parameter.normal_(std=1 / core.step_scale)
        strength = core(pixel)[0].square().sum(0).sqrt()
    return grey(strength.sqrt())  # the square root lets the weak parts show


def grey(image: torch.Tensor) -> list[int]:
    """Return an image row by row, scaled so that its maximum is 255."""
    return (255 * image / image.max()).round().to(torch.int64).flatten().tolist()
