"""The worker of every executor: it runs one cell of a study.

As a program it reads its job from standard input, and saves and stops when standard input closes. A worker therefore
never outlives the process that started it, even if that process is killed.
"""

import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

from chasm.common.extensions import load_extensions, loaded
from chasm.common.files import write_json, write_text
from chasm.common.locks import BusyError
from chasm.studies.state import clear_failure, failed, working_on
from chasm.train.config import Part, RunConfig, dump, load_recipe
from chasm.train.run import environment

COSTS = ("gmacs_paper", "gmacs", "gmacs_of_weights", "core_mparams", "core_mparams_real")
PROGRAM = "import sys; from chasm.studies.worker import main; sys.exit(main())"
Job = dict[str, Any]  # made by make_job, of plain values that JSON can hold


def make_job(key: str, folder: Path, config: RunConfig, kind: str = "train", size: int = 0) -> Job:
    """Return the description of a cell for a worker.

    Args:
        key: name of the cell.
        folder: folder of its run.
        config: what to train or to count.
        kind: "train", or "cost" to count multiply-adds and parameters.
        size: for "cost": height and width of the images.
    """
    return {
        "key": key,
        "folder": str(folder.resolve()),
        "with": list(loaded()),
        "kind": kind,
        "config": config.model_dump(mode="json"),
        "size": [size, size],
        "command": sys.argv,  # a run keeps it as the command to repeat
    }


def run_cell(job: Job) -> str:
    """Train or count, and write the results to the cell's folder.

    Returns:
        "done", "failed", or "running" if another process works on the cell.
    """
    folder = Path(job["folder"])
    try:
        with working_on(folder):
            clear_failure(folder)
            try:
                load_extensions(job["with"])
                config = load_recipe(job["config"])
                if job["kind"] == "cost":
                    write_text(folder / "config.yaml", dump(config))
                    write_json(folder / "environment.json", environment(config, torch.device("cpu"), (1, *job["size"])))
                    write_json(folder / "metrics.json", count_model(config, tuple(job["size"])))
                else:
                    from chasm.train import train

                    train(config, folder, quiet=True)
                return "done"
            except Exception as e:
                failed(folder, e)
                return "failed"
    except BusyError:
        return "running"


def count_model(config: RunConfig, size: tuple[int, int]) -> dict[str, Any]:
    """Count multiply-adds of the model for one complex image, and parameters, from shapes alone.

    Returns:
        The content of metrics.json. In its "costs", ``gmacs_paper`` counts as the paper's table seems to [reading],
        with CHASM as its equations are written, ``gmacs`` counts what runs for an image in evaluation,
        ``gmacs_of_weights`` what runs once per call whatever the batch, and ``core_mparams`` are the parameters of
        one mixer with 96 channels on a 128x128 map, as the paper's Core Params: complex numbers count once, or twice
        in ``core_mparams_real``.
    """
    from chasm.backbones import create_backbone
    from chasm.surgery.count import count, count_parameters

    x, mask = torch.empty(1, 2, *size, device="meta"), torch.ones(1, 1, 1, size[1], device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about slow scans, which do not run here
        with torch.device("meta"):
            host: Any = create_backbone(
                config.backbone.name, config.mixer.name, config.mixer.options, size=size, **config.backbone.options
            )
        cost = count(host, x, mask=mask)
    core, weights = core_parameters(config.mixer), cost.total - cost.inference
    slots = count_parameters(host.slots)
    costs = (cost.paper / 1e9, cost.inference / 1e9, weights / 1e9, core[0] / 1e6, core[1] / 1e6)
    return {
        "status": "done",
        "costs": dict(zip(COSTS, costs, strict=True)),
        "macs": cost.inference,
        "macs_of_weights": weights,
        "parameters": {"model": cost.params, "slots_complex_once": slots[0], "slots_real": slots[1]},
    }


def core_parameters(mixer: Part) -> tuple[int, int]:
    """Return the parameters of one mixer at 96 channels on a 128x128 map: complex numbers once, and as two."""
    from chasm.mixers import create_mixer
    from chasm.surgery.count import count_parameters

    return count_parameters(create_mixer(mixer.name, 96, (128, 128), device="meta", **mixer.options))


def _end_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock would be held when the interpreter ends
        pass
    if os.name == "nt":
        signal.raise_signal(signal.SIGTERM)  # os.kill would end the process there, without a handler
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Run the job on standard input, and return the exit code."""
    job = json.loads(sys.stdin.readline())
    sys.argv = job["command"]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return {"done": 0, "failed": 1, "running": 2}[run_cell(job)]
