"""The training loop. Its checkpoints hold everything that a run needs to resume.

The slices and the step size of a step depend on seed and step only, so a run that was killed and resumed gives the
same result as one that was not.
"""

import math
import signal
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, set_seed
from safetensors.torch import load_file
from torch import Tensor, nn

from chasm.common.files import expanded, json_safe, read_json, remove_unfinished, write_json, write_text
from chasm.common.locks import Lock, locked
from chasm.common.precision import tf32
from chasm.surgery.param_groups import param_groups
from chasm.tasks import TaskBatch
from chasm.train.augment import flips_of_step, vary
from chasm.train.checkpoints import Checkpoints, holds_work, refuse_foreign_files
from chasm.train.config import RunConfig, differences, dump, load_recipe
from chasm.train.evaluation import save_examples, score_split
from chasm.train.fingerprint import compare_fingerprints, fingerprint
from chasm.train.graphed import GraphedGradients
from chasm.train.loading import batches, dead_readers_are_one_line
from chasm.train.log import Log
from chasm.train.nonfinite import NonFiniteGuard, check_weights_are_finite
from chasm.train.processes import StopRequest, make_accelerator
from chasm.train.progress import Progress
from chasm.train.record import Best, Record
from chasm.train.run import (
    build_model,
    check_disjoint,
    environment,
    load_run,
    open_split,
    resident,
    score,
    write_environment,
)
from chasm.train.schedule import learning_rate, rows_of_step, seeds_of_step, steps_per_epoch
from chasm.train.snapshot import check_fits, restore, snapshot, tensors_of
from chasm.train.start import load_start, update_average
from chasm.train.step import add_gradients
from chasm.train.trackers import Trackers, check_trackers
from chasm.train.weights import WEIGHTS, TrainingImages, check_weights, describe_training_data, save_weights


def train(
    config: RunConfig, folder: str | Path, *, quiet: bool = False, trackers: Sequence[str] = ()
) -> dict[str, Any]:
    """Train, select weights on validation, and test. Resumes a run that was stopped, and leaves a finished one alone.

    Args:
        config: the config of the run.
        folder: folder of the run.
        quiet: show no progress.
        trackers: also send the log to these: "tensorboard", "wandb", "mlflow", as Accelerate names them.

    Returns:
        The content of metrics.json.

    Raises:
        ValueError: if the folder holds a run with another config, or files that are not of a run.
        NonFiniteError: if loss, gradient or weights are not finite.
    """
    folder = expanded(folder)
    check_config(config, folder)
    if (folder / "metrics.json").is_file():
        finished: dict[str, Any] = read_json(folder / "metrics.json")
        check_weights(folder)
        return finished
    refuse_foreign_files(folder)
    return Trainer(config, folder, quiet=quiet, trackers=trackers).run()


def check_config(config: RunConfig, folder: Path) -> None:
    """Raise a ValueError if the folder holds a run with another config, or a finished one that does not say which."""
    stored = folder / "config.yaml"
    if not holds_work(folder):
        return
    if stored.is_file():
        if other := differences(load_recipe(stored), config):
            raise ValueError(f"{folder} holds a run with another config: {other}: choose another folder, or remove it")
    elif (folder / "metrics.json").exists():  # a checkpoint holds the config itself
        raise ValueError(f"{stored}: not there, so the scores may be of any config: choose another folder")


class Trainer:
    """One run: `run` trains, selects weights on validation, and tests.

    Args:
        config: config of the run.
        folder: folder of the run.
        quiet: show no progress.
        trackers: also send the log to these: "tensorboard", "wandb", "mlflow", as Accelerate names them.
    """

    def __init__(self, config: RunConfig, folder: Path, *, quiet: bool = False, trackers: Sequence[str] = ()) -> None:
        check_trackers(trackers)
        t = config.train
        self.config, self.folder, self.t = config, folder, t
        self.accelerator = make_accelerator()
        self.main, self.device = self.accelerator.is_main_process, self.accelerator.device
        self.progress = Progress(quiet, self.main)
        world = self.accelerator.num_processes
        if t.batch % (world * t.accumulate):
            raise ValueError(
                f"train.batch {t.batch} must be a multiple of {world} processes x {t.accumulate} accumulated"
            )
        if t.cuda_graph and (self.device.type != "cuda" or world > 1):
            got = f"{world} on {self.device.type}"
            raise ValueError(f"train.cuda_graph needs one process on a CUDA device, got {got}: set it to false")
        self.task = config.task.create()
        self.data = {split: open_split(config, split) for split in ("train", "val", "test")}
        check_disjoint(self.data)
        self.shape = tuple(self.data["train"][0].image.shape)
        self.environment = environment(config, self.device, self.shape) | {"tf32": t.tf32, "processes": world}
        self.fingerprint = fingerprint(config, self.data, self.environment)
        self.steps = t.steps or max(round((t.epochs or 0) * len(self.data["train"]) / t.batch), 1)
        self.val_every = t.val_every or max(self.steps // 20, 1)
        self.warmup = round(t.warmup * self.steps)

        set_seed(config.seed)
        self.model = build_model(config, self.task, self.shape).to(self.device)
        groups = param_groups(
            self.model, lr=t.lr, weight_decay=t.weight_decay, spectral_lr=t.lr * t.spectral_multiplier
        )
        self.peaks = [group["lr"] for group in groups]
        self.graphed = GraphedGradients(self._gradients, self.model.parameters()) if t.cuda_graph else None
        self.optimizer = torch.optim.AdamW(groups, lr=t.lr)
        self.ema = self._copied_weights() if t.ema else None
        self.step, self.seconds = 0, 0.0
        self.best = Best()
        self.checkpoints = Checkpoints(folder / "checkpoints", self.progress.say)
        self.weights = folder / WEIGHTS  # the best on validation so far
        self.log = Log(folder, writes=self.main)
        self.guard = NonFiniteGuard(folder, t.on_nonfinite, writes=self.main, say=self.progress.say)
        self.lock: Lock | None = None  # lock of the folder, in the main process
        self.stop_request = StopRequest(world)
        self.stopping = False  # the same in all processes
        self.tracker_names = trackers
        # Reading the data takes longest, so it comes last: mistakes in the config are found first.
        self.data = {split: resident(config, data, self.device) for split, data in self.data.items()}
        self.images = TrainingImages(self.shape, describe_training_data(self.data["train"]))

    def run(self) -> dict[str, Any]:
        """Train to the end and return the metrics."""
        lock = locked(self.folder / "training.lock") if self.main else nullcontext()
        with lock as self.lock, tf32(self.t.tf32), dead_readers_are_one_line():
            if self.main:
                remove_unfinished(self.folder)
            check_config(self.config, self.folder)  # another process may have started a run before the lock
            return self._run()

    def _run(self) -> dict[str, Any]:
        if self.device.type == "cuda":
            kind = {"float32": "float32", "bf16": "bfloat16 autocast"}[self.t.precision]
            self.progress.note(
                f"precision: {kind}, TF32 {'on' if self.t.tf32 else 'off'}, "
                f"CUDA graph {'on' if self.t.cuda_graph else 'off'}"
            )
        self.resume()
        if self.main:
            now = self.environment | {"training_data": self.images.description}
            write_environment(self.folder / "environment.json", now, self.step)
            write_text(self.folder / "config.yaml", dump(self.config))
        self.log.rewrite()
        self.trackers = Trackers(self.accelerator, self.tracker_names, self.config, self.folder, self.step)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.t.compile:
            self.model.compile()
        self.wrapped = self.accelerator.prepare_model(self.model)
        try:
            with self.stop_request.listening(), self.progress:
                self.fit()
        finally:
            self.trackers.close()
        return self.finish()

    def fit(self) -> None:
        """Run all steps that are left."""
        self.model.train()
        self.progress.begin(self.step, self.steps)
        started, done_before = time.monotonic(), self.seconds
        with closing(self._stream()) as stream:  # so that an error leaves no process of it behind
            for raw, step in stream:
                loss, norm = self._update(raw, step)
                self.step, self.seconds = step + 1, done_before + time.monotonic() - started
                if self.step % self.t.log_every == 0 or self.step == self.steps:
                    self._record(
                        {"step": self.step, "loss": loss, "grad_norm": norm, "lr": self.optimizer.param_groups[0]["lr"]}
                    )
                self.progress.step(self.step, loss)
                if self.step % self.val_every == 0 or self.step == self.steps:
                    self.validate()
                if self.accelerator.num_processes == 1:  # several processes agree on it before the step
                    self.stopping = self.stop_request.signal > 0
                if self.step % self.t.save_every == 0 or self.step == self.steps or self.stopping:
                    self.save()
                if self.stopping:
                    self.progress.say(f"stopped at step {self.step}: run the same command again to go on")
                    number = self.stop_request.signal or signal.SIGTERM  # another process may have got the signal
                    raise SystemExit(128 + number)

    def _stream(self) -> Generator[tuple[list[Any], int]]:
        """Yield the micro-batches of this process and the number of each step that is left."""
        t, n = self.t, len(self.data["train"])

        def rows(step: int) -> Iterator[list[int]]:
            return self._shares(rows_of_step(step, n, t.batch, self.config.seed))

        while self.step < self.steps:  # one epoch per turn; `fit` advances self.step
            epoch = self.step // steps_per_epoch(n, t.batch)
            steps = range(self.step, min((epoch + 1) * steps_per_epoch(n, t.batch), self.steps))
            self.data["train"].set_epoch(epoch)
            chosen = (r for step in steps for r in rows(step))
            with closing(batches(self.data["train"], chosen, self.device, t.workers)) as stream:
                for step in steps:
                    raw = [next(stream) for _ in range(t.accumulate)]
                    if t.flips:
                        flips = self._shares(flips_of_step(step, t.batch, self.config.seed))
                        raw = [batch.mirrored(flip) for batch, flip in zip(raw, flips, strict=True)]
                    if t.vary:
                        seeds = self._shares(seeds_of_step(step, t.batch, self.config.seed))
                        raw = [vary(batch, drawn) for batch, drawn in zip(raw, seeds, strict=True)]
                    yield raw, step

    def _shares(self, of_step: list[int]) -> Iterator[list[int]]:
        """Yield the entries of a step that belong to each micro-batch of this process."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        for micro in range(self.t.accumulate):
            yield of_step[micro * world + rank :: world * self.t.accumulate]

    def _prepared(self, micro_batches: list[Any], step: int) -> Iterator[TaskBatch]:
        seeds = self._shares(seeds_of_step(step, self.t.batch, self.config.seed))
        for raw, drawn in zip(micro_batches, seeds, strict=True):
            yield self.task.for_training(self.task.prepare(raw.image, raw.label, raw.case), drawn)

    def _update(self, micro_batches: list[Any], step: int) -> tuple[float, float]:
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = learning_rate(step, self.steps, self.warmup, peak, self.t.final_lr)
        prepared = self._prepared(micro_batches, step)
        if self.graphed is not None:
            total = self.graphed(list(prepared))
        else:
            self.optimizer.zero_grad(set_to_none=True)
            total = self._gradients(prepared)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if self.t.clip is not None:
            norm = nn.utils.clip_grad_norm_(parameters, self.t.clip)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        value, size = self._agree(total), float(norm)
        if self.guard.allows(step, value, size, lambda: _slices_of(micro_batches)):
            self.optimizer.step()
            if self.ema is not None:
                update_average(self.ema, self.model, self.t.ema or 0, step)
        else:
            self._check_weights()
        return value, size

    def _gradients(self, batches: Iterable[TaskBatch]) -> Tensor:
        return add_gradients(
            self.model,
            self.task,
            batches,
            micro_batches=self.t.accumulate,
            bf16=self.t.precision == "bf16",
            is_graphed=self.graphed is not None,
            forward=self.wrapped,
            backward=self.accelerator.backward,
            no_sync=lambda: self.accelerator.no_sync(self.wrapped),
        )

    def _agree(self, loss: Tensor) -> float:
        """Return the mean loss of all processes, which also agree here to stop after the same step."""
        stop = torch.full_like(loss, float(self.stop_request.signal > 0))
        mean, stopping = self.accelerator.reduce(torch.stack([loss, stop]), "mean").tolist()
        self.stopping = stopping > 0
        return float(mean)

    def _check_weights(self) -> None:
        check_weights_are_finite(self.step, self.model.state_dict(), self.ema)

    def _copied_weights(self) -> dict[str, Tensor]:
        return {k: v.detach().clone() for k, v in self.model.state_dict().items()}

    def _weights(self) -> dict[str, Tensor]:
        return self.ema if self.ema is not None else self.model.state_dict()

    def validate(self) -> None:
        """Score the validation split, and save the weights if they are the best so far.

        Every process scores the whole split, since every process needs the result.
        """
        self._check_weights()
        trained = None
        if self.ema is not None:
            trained = self._copied_weights()
            self.model.load_state_dict(self.ema)
        # Scoring runs in float32 and without gradients, which would be a second graph to compile.
        with torch.compiler.set_stance("force_eager") if self.t.compile else nullcontext():
            summary = score(self.model, self.task, self.data["val"], self.device, self.t.batch, self.t.workers)
        assert summary is not None
        if trained is not None:
            self.model.load_state_dict(trained)
        values = {k: s.mean for k, s in summary.stats.items()}
        metric = self.task.protocol.selection_metric
        self._record({"step": self.step, **{f"val_{k}": v for k, v in values.items()}})
        self.progress.validated(f"{metric} {values[metric]:.4g}")
        value = values[metric] if math.isfinite(values[metric]) else None
        best = self.best.score
        if self.best.step < 0 or (value is not None and (best is None or value > best)):
            self.best = Best(self.step, value, json_safe(values))  # JSON has no NaN
            if self.main:
                save_weights(self.weights, self._weights(), self.images)

    # --- saving and resuming ----------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of everything that the run needs to go on."""
        self._check_weights()
        if not self.main:
            return
        self._require_place()
        tensors = snapshot(self.model, self.optimizer, self.ema, self.device)
        if self.best.step > 0:
            tensors |= {f"best.{k}": v for k, v in load_file(self.weights).items()}
        self.checkpoints.save(tensors, Record(self.step, self.best, self.seconds, self.log.rows, self.fingerprint))

    def resume(self) -> None:
        """Continue from the newest checkpoint that is whole, if there is one."""
        newest = self.checkpoints.newest()
        if newest is None:
            for name in (WEIGHTS, "nonfinite.jsonl"):  # left by a run without a checkpoint
                (self.folder / name).unlink(missing_ok=True)
            if self.t.start is not None:
                self.environment["start"] = load_start(self.model, self.t.start)
                self.ema = self._copied_weights() if self.t.ema else None
            return
        tensors, record = newest
        for note in compare_fingerprints(record.fingerprint or self.fingerprint, self.fingerprint, self.folder):
            self.progress.say(note)
        place = self.checkpoints.place(record.step)
        check_fits(place, tensors, self.model, self.optimizer, self.ema, has_best=record.best.step > 0)
        self.ema = restore(tensors, self.model, self.optimizer, self.ema, self.device)
        self.step, self.best, self.seconds = record.step, record.best, record.seconds
        self.log.rows = record.log
        if self.main and self.best.step > 0:  # the file may come from a later step
            save_weights(self.weights, tensors_of("best.", tensors), self.images)
        self.progress.say(f"resuming {self.folder} at step {self.step} of {self.steps}")

    def _require_place(self) -> None:
        """Raise an OSError before anything is written, if the folder is no longer the one this run began in."""
        if self.lock is not None:
            self.lock.require_place()

    def _record(self, row: dict[str, Any]) -> None:
        self._require_place()
        self.log.add(row)
        self.trackers.log(row)

    def finish(self) -> dict[str, Any]:
        """Test the best weights, write examples and, last, metrics.json, which marks the run as done."""
        metrics: dict[str, Any] = {}
        if self.main:
            self._require_place()
            run = load_run(self.folder, self.device)
            save_examples(run, self.data["test"], self.device)
            metrics = score_split(run, self.data["test"], self.device)
            metrics |= {
                "best_step": self.best.step,
                "best_val": self.best.values,
                "steps": self.steps,
                "seconds": round(self.seconds, 2),
                "peak_memory": torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
            }
            write_json(self.folder / "metrics.json", metrics)
        self.accelerator.wait_for_everyone()
        return metrics


def _slices_of(micro_batches: list[Any]) -> list[list[Any]]:
    """Return case and index of every slice of a step, of all processes."""
    own = [[case, index] for raw in micro_batches for case, index in zip(raw.case, raw.index, strict=True)]
    return list(gather_object(own))
