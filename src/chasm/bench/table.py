"""The table of shapes, dtypes, modes, mixers and forms. Each row is compared with float64 before it is timed.

Modes   core        forward of the spectral core in eval, with cached constants
        core-graph  core, captured in a CUDA graph
        eval        forward of the block without gradient
        step        forward and backward of the block in training, including the bases, eager
        graph       step, captured in a CUDA graph, as `train.cuda_graph` does with a whole training step

Floor   the time to move the maps through memory, in the dtype of the input, at the speed of a copy in the same run.
        core moves 4 maps: the first axis reads x and writes z, the second reads z and writes y.
        eval moves 5: the residual reads x, too.
        step moves 12: those 5, then the backward pass reads gy and z, writes gz, reads gz, x and gy (residual),
        and writes gx.
        The times of rivals are divided by the same floor.

All mixers have float32 parameters and run under autocast for bfloat16. Every row is measured with NCHW and with
channels-last (NHWC) input and shows the faster of the two. TF32 is off.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chasm import ops
from chasm.bench import subjects
from chasm.bench.clock import Limits, NotCapturableError, Pace, capture, input_sets, measure_limits, timed
from chasm.bench.peers import PEERS
from chasm.bench.report import Row, titles
from chasm.bench.subjects import LITERAL, Shape, Subject
from chasm.common.registry import OWN_NAME_HINT, suggest
from chasm.common.text import first_line

# Mode: the kind of call, and True inside a CUDA graph.
MODES = {
    "core": ("core", False),
    "core-graph": ("core", True),
    "eval": ("eval", False),
    "step": ("step", False),
    "graph": ("step", True),
}
MOVED_MAPS = {"core": 4, "eval": 5, "step": 12}  # through memory, for the floor
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
DTYPE_SPELLINGS = {"fp32": "float32", "f32": "float32", "float": "float32", "bfloat16": "bf16"}
# Allowed relative errors of output and gradients. Rivals and the paper-literal block get more: torch's float32 matrix
# exponential is less exact, and one rounding can flip the gradient of a ReLU.
MAX_CHASM_ERRORS = {"float32": (1e-4, 1e-3), "bf16": (2e-2, 5e-2)}
MAX_RIVAL_ERRORS = {"float32": (1e-3, 1e-2), "bf16": (5e-2, 0.5)}
GPU_SHAPES: list[Shape] = [
    (8, 96, 256, 256),
    (8, 96, 128, 128),
    (8, 192, 64, 64),
    (8, 256, 32, 32),
    (8, 384, 32, 32),
    (8, 512, 16, 16),
    (1, 96, 320, 320),
    (8, 96, 160, 160),
    (4, 96, 218, 170),
]
CPU_SHAPES: list[Shape] = [(2, 96, 64, 64), (1, 96, 45, 37)]
TITLES = titles(
    "shape", "dtype", "mode", "mixer", "form", "layout", "time_ms", "times_literal", "times_floor", "peak_mib", "error"
)
COLUMNS = (*TITLES, "grad_error", "worst_gradient", "note")


@dataclass(frozen=True)
class BenchConfig:
    """The rows to measure, as `make_config` checked them."""

    device: torch.device
    limits: Limits
    shapes: list[Shape]
    dtypes: list[str]
    modes: list[str]
    mixers: list[str]
    forms: list[str]
    compiled: bool
    pace: Pace

    def rows(self) -> int:
        """Return the number of rows, for a progress bar."""
        kinds = [MODES[mode][0] for mode in self.modes]
        of_literal = len(set(kinds)) * (1 + self.compiled)
        of_chasm = len(kinds) * len(self.forms) * ("chasm" in self.mixers)
        rivals = [mixer for mixer in self.mixers if mixer != "chasm"]
        of_rivals = sum(kind != "core" or mixer in subjects.PURE_CORES for kind in kinds for mixer in rivals)
        return len(self.shapes) * len(self.dtypes) * (of_literal + of_chasm + of_rivals)


def make_config(
    device: torch.device,
    limits: Limits | None = None,
    *,
    shapes: list[Shape] | None = None,
    dtypes: list[str] | None = None,
    modes: list[str] | None = None,
    mixers: list[str] | None = None,
    forms: list[str] | None = None,
    compiled: bool = False,
    pace: Pace | None = None,
) -> BenchConfig:
    """Check the names of shapes, dtypes, modes, mixers and forms, and fill in defaults.

    Args:
        device: device to measure on.
        limits: peak rates of the device; measured if None.
        shapes: shapes of the inputs.
        dtypes: dtypes from `DTYPES`, or other spellings of these.
        modes: modes from `MODES`.
        mixers: names of mixers.
        forms: "auto" or names of `chasm.ops.FORMS`.
        compiled: also measure the paper-literal block under torch.compile.
        pace: time to spend on each row.

    Returns:
        The config. An argument that is None or empty stands for everything that the device can run.

    Raises:
        ValueError: if a name is unknown, or needs a GPU on a CPU.
    """
    gpu = device.type == "cuda"
    dtypes = [DTYPE_SPELLINGS.get(name, name) for name in dtypes or []]
    for kind, names, known in (
        ("dtype", dtypes, list(DTYPES)),
        ("mode", modes, list(MODES)),
        ("mixer", mixers, ["chasm", *dict.fromkeys([*subjects.rivals(), *PEERS])]),
        ("form", forms, ["auto", *ops.FORMS]),
    ):
        for name in names or []:
            if name not in known:
                hint = f" {OWN_NAME_HINT}" if kind == "mixer" else ""
                raise ValueError(f"unknown {kind} {name!r}: {suggest(name, known)}{hint}")
    wants_gpu = [f"mode {m!r}" for m in modes or [] if MODES[m][1]]
    wants_gpu += [f"form {f!r}" for f in forms or [] if f in ops.GPU_FORMS]
    if wants_gpu and not gpu:
        raise ValueError(f"{wants_gpu[0]} needs a CUDA device, got {device}: leave it out")
    return BenchConfig(
        device,
        limits or measure_limits(device),
        shapes or (GPU_SHAPES if gpu else CPU_SHAPES),
        dtypes or (["float32", "bf16"] if gpu else ["float32"]),
        modes or [m for m, (_, graph) in MODES.items() if gpu or not graph],
        mixers or ["chasm", *subjects.rivals()],
        forms or subjects.forms(device),
        compiled,
        pace or (Pace() if gpu else Pace(0.5, 3, 20)),
    )


def run(config: BenchConfig, tick: Callable[[str], None] = lambda _: None) -> Iterator[list[Row]]:
    """Measure, and yield the rows of each shape. `tick` is called with the name of each row before it is measured."""
    for shape in config.shapes:
        rows = list(_rows_of(config, shape, tick))
        order = {mode: i for i, mode in enumerate(MODES)}
        rows.sort(key=lambda r: (config.dtypes.index(r["dtype"]), order[r["mode"]]))  # stable: mixers keep their order
        yield rows
        free(config.device)


def _rows_of(config: BenchConfig, shape: Shape, tick: Callable[[str], None]) -> Iterator[Row]:
    device, kinds = config.device, list(dict.fromkeys(MODES[mode][0] for mode in config.modes))
    of_literal: dict[tuple[str, str], float] = {}

    def row(name: str, form: str, dtype: str, mode: str, exact: dict[str, Any]) -> Row:
        kind = MODES[mode][0]
        tick(f"{shape} {dtype} {mode} {name} {form}")
        make = partial(subjects.create, name, form, shape, device)
        measured = measure(make, shape, dtype, mode, exact[kind], config)
        measured = {"shape": shape, "dtype": dtype, "mode": mode, "mixer": name, "form": form, **measured}
        time = measured.get("time_ms")
        if time is not None:
            if (name, form) == (LITERAL, "eager"):
                of_literal[dtype, kind] = time
            base = of_literal.get((dtype, kind))
            moved = MOVED_MAPS[kind] * torch.Size(shape).numel() * DTYPES[dtype].itemsize
            measured["times_literal"] = base / time if base is not None else None
            measured["times_floor"] = time / config.limits.floor_ms(moved)
        return measured

    exact = exact_or_reason(partial(subjects.create, LITERAL, "eager", shape, device), kinds, shape, device)
    for dtype in config.dtypes:
        for kind in kinds:  # eager modes only: a graph cannot hold torch's matrix exponential
            for form in ("eager", "compiled") if config.compiled else ("eager",):
                yield row(LITERAL, form, dtype, kind, exact)
        for mode in config.modes if "chasm" in config.mixers else []:
            for form in config.forms:
                yield row("chasm", form, dtype, mode, exact)
    del exact
    for name in config.mixers:
        if name == "chasm":
            continue
        of_rival = exact_or_reason(partial(subjects.create, name, "-", shape, device), kinds, shape, device)
        for dtype in config.dtypes:
            for mode in config.modes:
                if MODES[mode][0] != "core" or name in subjects.PURE_CORES:
                    yield row(name, "-", dtype, mode, of_rival)


def exact_or_reason(
    make: Callable[[], Subject], kinds: list[str], shape: Shape, device: torch.device
) -> dict[str, Any]:
    """Return the float64 results of each kind, or a string that says why there are none."""
    try:
        return subjects.exact_results(make(), kinds, shape, device)
    except Exception as e:  # out of memory, or the mixer does not take this width: the rows say so
        free(device)
        return dict.fromkeys(kinds, f"no oracle: {reason(e)}")


def measure(
    make: Callable[[], Subject],
    shape: Shape,
    dtype: str,
    mode: str,
    exact: dict[str, Tensor] | str,
    config: BenchConfig,
    layouts: Iterable[str] = subjects.LAYOUTS,
) -> Row:
    """Measure a block: its errors and, if they are small enough, its time and memory.

    `exact` holds float64 results, or the reason why there are none. Empty skips the comparison, for callers that
    compared at another size.

    Returns:
        The row of the faster layout, or a row with a note that says what is wrong.
    """
    kind, graph = MODES[mode]
    if isinstance(exact, str):
        return {"note": exact}
    best: Row = {}
    try:
        subject = make()
        for layout in layouts:
            measured = _in_layout(subjects.fresh(subject), shape, dtype, kind, graph, layout, exact, config)
            if measured.get("time_ms") is None:
                return measured
            if not best or measured["time_ms"] < best["time_ms"]:
                best = measured
    except Exception as e:  # this row says why it cannot run; the others are still measured
        best = {"note": reason(e)}
    if graph or "note" in best:
        free(config.device)  # memory of the graph, or of what failed
    return best


def _in_layout(
    subject: Subject,
    shape: Shape,
    dtype: str,
    kind: str,
    graph: bool,
    layout: str,
    exact: dict[str, Tensor],
    config: BenchConfig,
) -> Row:
    device, pace = config.device, config.pace
    sets = input_sets(MOVED_MAPS[kind] * torch.Size(shape).numel() * DTYPES[dtype].itemsize, device)
    inputs = subjects.make_inputs(shape, DTYPES[dtype], layout, sets, device)
    call = subjects.call_of(subject, kind, inputs, DTYPES[dtype])
    form = subjects.form_that_runs(subject, kind, inputs[0][0])
    captured = capture(call, sets, device) if graph else None
    if captured is not None:
        input_storage = {t.untyped_storage().data_ptr() for pair in inputs for t in pair}
        with torch.no_grad():
            for result in captured.results.values():
                if result.untyped_storage().data_ptr() not in input_storage:
                    result.fill_(float("nan"))  # shows results that the replay does not write
        captured.replay()
    results = call(0) if captured is None else captured.results
    row: Row = {"form": form, "layout": layout}
    error = grad_error = 0.0
    if exact:
        error, grad_error, worst = subjects.errors(results, exact)
        row |= {"error": error, "grad_error": grad_error, "worst_gradient": worst}
    del results
    allowed, allowed_grad = (MAX_CHASM_ERRORS if subject.mixer == "chasm" else MAX_RIVAL_ERRORS)[dtype]
    if not (error <= allowed and grad_error <= allowed_grad):
        of_gradient = f", {grad_error:.1e} of the gradient of {worst}" if worst else ""
        limits = f"allowed {allowed:.0e} and {allowed_grad:.0e}"
        return {**row, "note": f"wrong: error {error:.1e} of y{of_gradient}, {limits}"}
    return row | timed(call, captured, sets, device, pace)


def reason(e: Exception) -> str:
    """Return one line that says why a row could not be measured."""
    if isinstance(e, torch.OutOfMemoryError):
        return "out of memory"
    line = first_line(e)[:120]
    return line if isinstance(e, (ValueError, NotCapturableError)) else f"{type(e).__name__}: {line}"


def free(device: torch.device) -> None:
    """Give unused memory back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
