"""The training loop. One step is one line of `Trainer.fit`; everything it needs to go on is in its checkpoint.

The rows of a step depend on the seed and the step alone, and so does the step size: a run that was killed goes on
from its last checkpoint exactly as if nothing had happened.
"""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn

from chasm.mixers.chasm import batched_bases
from chasm.optim import param_groups
from chasm.train.config import RunConfig, dump, load_recipe
from chasm.train.evaluation import evaluate
from chasm.train.files import Checkpoints, save_tensors, write_json, write_text
from chasm.train.progress import Progress
from chasm.train.run import batches, build_model, environment, open_split, score


class NonFiniteError(RuntimeError):
    """A loss or gradient was not finite; the message says where the slices of that step are listed."""


def train(config: RunConfig, folder: str | Path, *, quiet: bool = False) -> dict[str, Any]:
    """Train, select on validation, test; returns the metrics. Resumes a run by itself, and skips a finished one."""
    folder = Path(folder).expanduser()
    done = folder / "metrics.json"
    if (folder / "config.yaml").is_file() and load_recipe(folder / "config.yaml") != config:
        raise ValueError(f"{folder} holds a run with another config: choose another folder, or remove it")
    if done.is_file():
        finished: dict[str, Any] = json.loads(done.read_text())
        return finished
    return Trainer(config, folder, quiet=quiet).run()


def learning_rate(step: int, steps: int, warmup: int, peak: float, final: float) -> float:
    """Linear warm-up to `peak`, then a cosine that ends at `final` with the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(steps - 1 - warmup, 1)
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def rows_of_step(step: int, n: int, batch: int, seed: int) -> list[int]:
    """The slices of a step: a fresh permutation per epoch, the incomplete last batch dropped."""
    per_epoch = max(n // batch, 1)
    epoch, place = divmod(step, per_epoch)
    order = torch.randperm(n, generator=torch.Generator().manual_seed((seed << 20) + epoch)).tolist()
    return [order[i % n] for i in range(place * batch, (place + 1) * batch)]


class Trainer:
    def __init__(self, config: RunConfig, folder: Path, *, quiet: bool = False) -> None:
        t = config.train
        self.config, self.folder, self.t = config, folder, t
        self.accelerator = Accelerator(mixed_precision="bf16" if t.precision == "bf16" else "no")
        self.main, self.device = self.accelerator.is_main_process, self.accelerator.device
        self.progress = Progress(quiet or not self.main)
        world = self.accelerator.num_processes
        if t.batch % (world * t.accumulate):
            raise ValueError(
                f"train.batch {t.batch} must be a multiple of {world} processes x {t.accumulate} accumulated"
            )
        self.task = config.task.create()
        self.data = {split: open_split(config, split, self.device) for split in ("train", "val", "test")}
        self.shape = tuple(self.data["train"][0].image.shape)
        self.steps = t.steps or max(round((t.epochs or 0) * len(self.data["train"]) / t.batch), 1)
        self.val_every = t.val_every or max(self.steps // 20, 1)
        self.warmup = round(t.warmup * self.steps)

        set_seed(config.seed)
        self.model = build_model(config, self.task, self.shape).to(self.device)
        groups = param_groups(
            self.model, lr=t.lr, weight_decay=t.weight_decay, spectral_lr=t.lr * t.spectral_multiplier
        )
        self.peaks = [group["lr"] for group in groups]
        self.optimizer = torch.optim.AdamW(groups, lr=t.lr)
        self.ema = {k: v.detach().clone() for k, v in self.model.state_dict().items()} if t.ema else None
        self.step, self.seconds = 0, 0.0
        self.best: dict[str, Any] = {"step": -1, "score": -math.inf, "values": {}}
        self.checkpoints = Checkpoints(folder / "checkpoints", self.progress.say)
        self.log: list[dict[str, Any]] = []
        self.interrupted = False

    def run(self) -> dict[str, Any]:
        if self.main:
            write_text(self.folder / "config.yaml", dump(self.config))
            write_json(self.folder / "environment.json", environment(self.config, self.device, self.shape))
        self.resume()
        self.wrapped = self.accelerator.prepare_model(self.model)
        previous = signal.signal(signal.SIGTERM, self._on_term) if _in_main_thread() else None
        try:
            with self.progress:
                self.fit()
        finally:
            if previous is not None:
                signal.signal(signal.SIGTERM, previous)
        return self.finish()

    def fit(self) -> None:
        self.model.train()
        started, done_before = time.monotonic(), self.seconds
        for raw, step in self._stream():
            loss, norm = self._update(raw, step)
            self.step, self.seconds = step + 1, done_before + time.monotonic() - started
            if self.step % self.t.log_every == 0 or self.step == self.steps:
                self._record(
                    {"step": self.step, "loss": loss, "grad_norm": norm, "lr": self.optimizer.param_groups[0]["lr"]}
                )
            self.progress.step(self.step, self.steps, loss)
            if self.step % self.val_every == 0 or self.step == self.steps:
                self.validate()
            if self.step % self.t.save_every == 0 or self.step == self.steps or self.interrupted:
                self.save()
            if self.interrupted:
                raise SystemExit(143)

    def _stream(self) -> Iterator[tuple[list[Any], int]]:
        """(micro-batches of this process, step) from the present step on."""
        t, n, rank, world = (
            self.t,
            len(self.data["train"]),
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )

        def rows() -> Iterator[list[int]]:
            for step in range(self.step, self.steps):
                chosen = rows_of_step(step, n, t.batch, self.config.seed)
                for micro in range(t.accumulate):
                    yield chosen[micro * world + rank :: world * t.accumulate]

        stream = batches(self.data["train"], rows(), self.device, t.workers)
        for step in range(self.step, self.steps):
            yield [next(stream) for _ in range(t.accumulate)], step

    def _update(self, micro_batches: list[Any], step: int) -> tuple[float, float]:
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = learning_rate(step, self.steps, self.warmup, peak, self.t.final_lr)
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for i, raw in enumerate(micro_batches):
            batch = self.task.prepare(raw.image, raw.label, raw.case)
            last = i == len(micro_batches) - 1
            with batched_bases(self.model), self._sync(last):
                output, aux = self.wrapped(batch.input, **batch.physics, return_aux=True)
                loss = (self.task.loss(output.float(), batch) + 1e-3 * aux.float()) / len(micro_batches)
                self.accelerator.backward(loss)
            total += loss.detach()
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if self.t.clip is not None:
            norm = nn.utils.clip_grad_norm_(parameters, self.t.clip)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        value, size = self._mean(total), float(norm)
        if not math.isfinite(value) or not math.isfinite(size):
            self._nonfinite(micro_batches, step, value, size)
        else:
            self.optimizer.step()
            if self.ema is not None:
                self._average()
        return value, size

    def _sync(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are exchanged between processes with the last micro-batch only."""
        return nullcontext() if last else self.accelerator.no_sync(self.wrapped)

    def _mean(self, value: Tensor) -> float:
        return float(self.accelerator.reduce(value, "mean"))

    @torch.no_grad()
    def _average(self) -> None:
        assert self.ema is not None
        assert self.t.ema is not None
        for k, v in self.model.state_dict().items():
            if v.is_floating_point():
                self.ema[k].lerp_(v, 1 - self.t.ema)
            else:
                self.ema[k].copy_(v)

    def _nonfinite(self, micro_batches: list[Any], step: int, loss: float, norm: float) -> None:
        ids = [[case, index] for raw in micro_batches for case, index in zip(raw.case, raw.index, strict=True)]
        path = self.folder / f"nonfinite-step-{step}.json"
        if self.main:
            write_json(path, {"step": step, "loss": str(loss), "grad_norm": str(norm), "slices": ids})
        if self.t.on_nonfinite == "stop":
            raise NonFiniteError(f"step {step}: loss {loss}, gradient norm {norm}: stopped; its slices are in {path}")
        self.progress.say(f"step {step}: loss {loss}, gradient norm {norm}: skipped; its slices are in {path}")

    def _weights(self) -> dict[str, Tensor]:
        return self.ema if self.ema is not None else self.model.state_dict()

    def validate(self) -> None:
        """Score the validation split on every process (each needs the answer), keep the weights when they are best."""
        kept = None
        if self.ema is not None:
            kept = {k: v.clone() for k, v in self.model.state_dict().items()}
            self.model.load_state_dict(self.ema)
        summary = score(self.model, self.task, self.data["val"], self.device, self.t.batch, self.t.workers)
        assert summary is not None
        if kept is not None:
            self.model.load_state_dict(kept)
        values = {k: s.mean for k, s in summary.stats.items()}
        better = self.task.protocol.better
        self._record({"step": self.step, **{f"val_{k}": v for k, v in values.items()}})
        self.progress.validated(f"{better} {values[better]:.4g}")
        if values[better] > self.best["score"]:
            self.best = {"step": self.step, "score": values[better], "values": values}
            if self.main:
                save_tensors(self.folder / "weights.safetensors", self._weights())

    # --- saving and resuming ----------------------------------------------------------------------

    def save(self) -> None:
        if not self.main:
            return
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        state = self.optimizer.state_dict()["state"]
        tensors |= {f"optimizer.{i}.{k}": v for i, values in state.items() for k, v in values.items()}
        tensors |= {f"ema.{k}": v for k, v in (self.ema or {}).items()}
        tensors["rng.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        self.checkpoints.save(self.step, tensors, {"best": self.best, "seconds": self.seconds, "log": self.log})

    def resume(self) -> None:
        found = self.checkpoints.newest()
        if found is None:
            return
        tensors, record = found
        part: Callable[[str], dict[str, Tensor]] = lambda name: {  # noqa: E731
            k.removeprefix(name): v for k, v in tensors.items() if k.startswith(name)
        }
        self.model.load_state_dict(part("model."))
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in part("optimizer.").items():
            i, name = key.split(".", 1)
            state.setdefault(int(i), {})[name] = value
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        if self.ema is not None:
            self.ema = {k: v.to(self.device) for k, v in part("ema.").items()}
        torch.set_rng_state(tensors["rng.cpu"])
        if "rng.cuda" in tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.device)
        self.step, self.best, self.seconds, self.log = record["step"], record["best"], record["seconds"], record["log"]
        self.progress.say(f"resuming {self.folder} at step {self.step} of {self.steps}")

    def _on_term(self, *_: Any) -> None:
        self.interrupted = True  # the step in progress is finished first

    def _record(self, row: dict[str, Any]) -> None:
        self.log.append(row)
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "log.jsonl", "a") as f:
                f.write(json.dumps(row) + "\n")

    def finish(self) -> dict[str, Any]:
        """Test the selected weights; write logs, pictures and, last, the metrics that mark the run as done."""
        metrics: dict[str, Any] = {}
        if self.main:
            self._write_log()
            metrics = evaluate(self.folder, device=self.device, data=self.data["test"])
            metrics |= {
                "best_step": self.best["step"],
                "best_val": self.best["values"],
                "steps": self.steps,
                "seconds": round(self.seconds, 2),
                "peak_memory": torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
            }
            write_json(self.folder / "metrics.json", metrics)
        self.accelerator.wait_for_everyone()
        return metrics

    def _write_log(self) -> None:
        """The whole log again, without what a killed run had written beyond its last checkpoint."""
        write_text(self.folder / "log.jsonl", "".join(json.dumps(row) + "\n" for row in self.log))
        columns = list(dict.fromkeys(k for row in self.log for k in row))
        lines = [columns, *([row.get(c, "") for c in columns] for row in self.log)]
        write_text(self.folder / "log.csv", "".join(",".join(map(str, line)) + "\n" for line in lines))


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
