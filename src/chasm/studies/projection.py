"""Give the untied mixers of a run the best shared basis, and score on its test split what the run loses."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from chasm.common.files import write_json, write_text
from chasm.common.precision import tf32
from chasm.mixers.chasm import CHASM
from chasm.studies.statistics import Interval, difference
from chasm.surgery.harmonise import harmonise
from chasm.train.checkpoints import holds_work, refuse_foreign_files
from chasm.train.config import Part, RunConfig, differences, dump, load_recipe
from chasm.train.evaluation import save_examples, score_split, split_of
from chasm.train.run import Run, environment, load_run, score
from chasm.train.weights import WEIGHTS, save_weights


@dataclass(frozen=True)
class Projection:
    """Scores of a run before and after its mixers were harmonised."""

    folder: Path  # of the harmonised run
    before: dict[str, dict[str, float]]  # case -> metric -> score
    after: dict[str, dict[str, float]]

    def difference(self, metric: str) -> Interval:
        """Return the score after minus the score before, paired by case."""
        sides = [{case: scores[metric] for case, scores in cases.items()} for cases in (self.after, self.before)]
        return difference(sides[:1], sides[1:], metric)


def has_untied(model: nn.Module) -> bool:
    """Return True if there is something to harmonise."""
    return any(isinstance(m, CHASM) and m.basis == "untied" for m in model.modules())


def harmonised_folder(folder: Path) -> Path:
    """Return the folder of the harmonised run, where a report looks for it."""
    return folder / "harmonised"


def project_run(
    run: Run, out: Path | None = None, *, device: torch.device | str = "cpu", data_path: str | None = None
) -> Projection:
    """Give every untied mixer of a run the best shared basis; return the test scores before and after.

    Args:
        run: a finished run with ``basis="untied"`` in its slots, as `load_run` returns it. Its model is harmonised in
            place.
        out: folder of the harmonised run, which is complete: it can be scored, reconstructed with and reported.
            Default: `harmonised_folder`.
        device: where the model is and is scored.
        data_path: another place of the same dataset.

    Raises:
        ValueError: if the run has no untied mixer, or `out` holds a run with another config.
    """
    if not has_untied(run.model):
        raise ValueError(f"{run.folder}: no slot has an untied basis, so there is nothing to project")
    config, out, device = _shared_config(run.config), out or harmonised_folder(run.folder), torch.device(device)
    if holds_work(out) and (other := differences(load_recipe(out / "config.yaml"), config)):
        raise ValueError(f"{out} holds a run with another config: {other}: choose another folder, or remove it")
    refuse_foreign_files(out)
    with tf32(config.train.tf32):
        data = split_of(run, "test", device, data_path)
        before = score(run.model, run.task, data, device, config.train.batch, config.train.workers)
        assert before is not None
        harmonise_slots(run.model)
        facts = environment(config, device, run.images.shape) | {"training_data": run.images.description}
        write_json(out / "environment.json", facts)
        write_text(out / "config.yaml", dump(config))
        save_weights(out / WEIGHTS, run.model.state_dict(), run.images)
        harmonised = load_run(out, device)  # score what was written, not what is in memory
        save_examples(harmonised, data, device)
        metrics = score_split(harmonised, data, device)
    write_json(out / "metrics.json", metrics)
    return Projection(out, before.per_case, metrics["cases"])


def harmonise_slots(model: nn.Module) -> None:
    """Replace every untied CHASM in a model by its harmonised mixer, in place."""
    untied = [(name, m) for name, m in model.named_modules() if isinstance(m, CHASM) and m.basis == "untied"]
    for name, mixer in untied:
        model.set_submodule(name, harmonise(mixer))


def _shared_config(config: RunConfig) -> RunConfig:
    options = {k: v for k, v in config.mixer.options.items() if k != "basis"}
    mixer = Part(name=config.mixer.name, options=options)
    return config.model_copy(update={"name": f"{config.name}-harmonised", "mixer": mixer})
