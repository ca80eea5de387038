"""The table: shape x dtype x mode x (mixer and form), each row compared with a float64 oracle before it is timed.

Modes   core        spectral core forward, in eval, constants cached
        core-graph  the same captured in a CUDA graph
        eval        block forward, no gradient
        step        block forward and backward in training, bases included, eager
        graph       the same captured in a CUDA graph, as `train.cuda_graph` does with a whole training step

Floor   the maps that have to pass through memory, in the input's dtype, at the speed of a copy in the same run.
        core 4: x in, z out (first axis), z in, y out (second axis). eval 5: the residual reads x again.
        step 12: those 5; backward gy, z in and gz out; gz, x in, gy again (residual), gx out.
        Rows of rivals are divided by the same floor, so that ratios compare.

Rivals run as their users run them: float32 parameters, under autocast for bfloat16. Every row is measured with NCHW
and with channels-last (NHWC) input, and shows the faster. float32 means float32: TF32 is off.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chasm import ops
from chasm.bench import subjects
from chasm.bench.clock import (
    Limits,
    NotCapturableError,
    Pace,
    capture,
    clock,
    first_line,
    input_sets,
    measure_limits,
    peak_mib,
)
from chasm.bench.subjects import LITERAL, Shape, Subject
from chasm.common.registry import OWN_NAME_HINT, suggest

# Mode -> what runs, and whether inside a CUDA graph.
MODES = {
    "core": ("core", False),
    "core-graph": ("core", True),
    "eval": ("eval", False),
    "step": ("step", False),
    "graph": ("step", True),
}
MAPS = {"core": 4, "eval": 5, "step": 12}  # of the floor
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
# Relative errors, of the output and of gradients. Looser for the others: torch's float32 matrix exponential, and batch
# norms and ReLUs whose gradients turn on single roundings.
OURS = {"float32": (1e-4, 1e-3), "bf16": (2e-2, 5e-2)}
OTHERS = {"float32": (1e-3, 1e-2), "bf16": (5e-2, 0.5)}
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
COLUMNS = (
    "shape", "dtype", "mode", "mixer", "form", "layout", "time_ms", "times_literal", "times_floor", "peak_mib",
    "error", "grad_error", "worst_gradient", "note",
)  # fmt: skip
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to measure. Empty lists stand for everything."""

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
        """How many there will be, for a progress bar."""
        kinds = {MODES[mode][0] for mode in self.modes}
        per_mode = {m: sum(1 for _ in self._names(MODES[m][0])) for m in self.modes}
        return len(self.shapes) * len(self.dtypes) * (len(kinds) * (1 + self.compiled) + sum(per_mode.values()))

    def _names(self, kind: str) -> Iterator[tuple[str, str]]:
        if "chasm" in self.mixers:
            yield from (("chasm", form) for form in self.forms)
        yield from ((m, "-") for m in self.mixers if m != "chasm" and (kind != "core" or m in subjects.PURE_CORES))


def make_plan(
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
) -> Plan:
    """Names checked, defaults filled in; where no limits are given, the device's are measured, last of all."""
    gpu = device.type == "cuda"
    for kind, given, known in (
        ("dtype", dtypes, list(DTYPES)),
        ("mode", modes, list(MODES)),
        ("mixer", mixers, ["chasm", *subjects.rivals()]),
        ("form", forms, ["auto", *ops.FORMS]),
    ):
        for name in given or []:
            if name not in known:
                own = f" {OWN_NAME_HINT}" if kind == "mixer" else ""
                raise ValueError(f"unknown {kind} {name!r}: {suggest(name, known)}{own}")
    wants_gpu = [f"mode {m!r}" for m in modes or [] if MODES[m][1]]
    wants_gpu += [f"form {f!r}" for f in forms or [] if f in ops.GPU_FORMS]
    if wants_gpu and not gpu:
        raise ValueError(f"{wants_gpu[0]} needs a CUDA device, got {device}: leave it out")
    return Plan(
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


def run(plan: Plan, tick: Callable[[str], None] = lambda _: None) -> Iterator[list[Row]]:
    """The rows of one shape after the other. `tick` is called with the name of each row before it is measured."""
    for shape in plan.shapes:
        rows = list(_rows_of(plan, shape, tick))
        order = {mode: i for i, mode in enumerate(MODES)}
        rows.sort(key=lambda r: (plan.dtypes.index(r["dtype"]), order[r["mode"]]))  # stable: subjects keep their order
        yield rows
        free(plan.device)


def _rows_of(plan: Plan, shape: Shape, tick: Callable[[str], None]) -> Iterator[Row]:
    kinds = list(dict.fromkeys(MODES[mode][0] for mode in plan.modes))
    exact = exact_or_reason(partial(subjects.literal, shape, plan.device), kinds, shape, plan.device)
    of_literal: dict[tuple[str, str], float] = {}

    def row(make: Callable[[], Subject], name: str, form: str, dtype: str, mode: str, exact: dict[str, Any]) -> Row:
        kind = MODES[mode][0]
        tick(f"{shape} {dtype} {mode} {name} {form}")
        found = measure(make, shape, dtype, mode, exact[kind], plan)
        found = {"shape": shape, "dtype": dtype, "mode": mode, "mixer": name, "form": form, **found}
        time = found.get("time_ms")
        if time is not None:
            if (name, form) == (LITERAL, "eager"):
                of_literal[dtype, kind] = time
            base = of_literal.get((dtype, kind))
            moved = MAPS[kind] * torch.Size(shape).numel() * DTYPES[dtype].itemsize
            found["times_literal"] = base / time if base is not None else None
            found["times_floor"] = time / plan.limits.floor_ms(moved)
        return found

    literal = partial(subjects.literal, shape, plan.device)
    compiled = partial(subjects.compiled_literal, shape, plan.device)
    for dtype in plan.dtypes:
        for kind in kinds:  # the eager mode of a kind has its kind's name; no graph can hold torch's matrix exponential
            yield row(literal, LITERAL, "eager", dtype, kind, exact)
            if plan.compiled:
                yield row(compiled, LITERAL, "compiled", dtype, kind, exact)
        for mode in plan.modes if "chasm" in plan.mixers else []:
            for form in plan.forms:
                yield row(partial(subjects.ours, shape, form, plan.device), "chasm", form, dtype, mode, exact)
    del exact
    for name in plan.mixers:
        if name == "chasm":
            continue
        make = partial(subjects.rival, name, shape, plan.device)
        of_rival = exact_or_reason(make, kinds, shape, plan.device)
        for dtype in plan.dtypes:
            for mode in plan.modes:
                if MODES[mode][0] != "core" or name in subjects.PURE_CORES:
                    yield row(make, name, "-", dtype, mode, of_rival)


def exact_or_reason(
    make: Callable[[], Subject], kinds: list[str], shape: Shape, device: torch.device
) -> dict[str, Any]:
    """Oracle results by kind, or the reason why there are none."""
    try:
        return subjects.exact_results(make(), kinds, shape, device)
    except Exception as e:  # too large for the device, or no such mixer at this width: said in the rows
        free(device)
        return dict.fromkeys(kinds, f"no oracle: {reason(e)}")


def measure(
    make: Callable[[], Subject],
    shape: Shape,
    dtype: str,
    mode: str,
    exact: dict[str, Tensor] | str,
    plan: Plan,
    layouts: Iterable[str] = subjects.LAYOUTS,
) -> Row:
    """Errors and, where they are small enough, time and memory of one subject, in the faster of these layouts.

    `exact`: float64 results, or why there are none. An empty one is for callers that compared at another size.
    """
    kind, graph = MODES[mode]
    if isinstance(exact, str):
        return {"note": exact}
    best: Row = {}
    try:
        subject = make()
        for layout in layouts:
            found = _in_layout(subjects.fresh(subject), shape, dtype, kind, graph, layout, exact, plan)
            if found.get("time_ms") is None:
                return found
            if not best or found["time_ms"] < best["time_ms"]:
                best = found
    except Exception as e:  # a row that cannot run says why; the others still count
        best = {"note": reason(e)}
    if graph or "note" in best:
        free(plan.device)  # the memory of a dropped graph, or of a failed try
    return best


def _in_layout(
    subject: Subject,
    shape: Shape,
    dtype: str,
    kind: str,
    graph: bool,
    layout: str,
    exact: dict[str, Tensor],
    plan: Plan,
) -> Row:
    device, pace = plan.device, plan.pace
    sets = input_sets(MAPS[kind] * torch.Size(shape).numel() * DTYPES[dtype].itemsize, device)
    inputs = subjects.make_inputs(shape, DTYPES[dtype], layout, sets, device)
    call = subjects.call_of(subject, kind, inputs, DTYPES[dtype])
    form = subjects.form_that_runs(subject, kind, inputs[0][0])
    if graph:
        captured = capture(call, sets, device)
        given = {t.untyped_storage().data_ptr() for pair in inputs for t in pair}
        with torch.no_grad():
            for result in captured.results.values():
                if result.untyped_storage().data_ptr() not in given:
                    result.fill_(float("nan"))  # what a replay does not write shows
        captured.replay()
        results, peak = captured.results, captured.peak_mib
    else:
        results = call(0)
        peak = None
    found: Row = {"form": form, "layout": layout}
    error = grad_error = 0.0
    if exact:
        error, grad_error, worst = subjects.errors(results, exact)
        found |= {"error": error, "grad_error": grad_error, "worst_gradient": worst}
    del results
    allowed, allowed_grad = (OURS if subject.mixer == "chasm" else OTHERS)[dtype]
    if not (error <= allowed and grad_error <= allowed_grad):
        of_gradient = f", {grad_error:.1e} of the gradient of {worst}" if worst else ""
        limits = f"allowed {allowed:.0e} and {allowed_grad:.0e}"
        return {**found, "note": f"wrong: error {error:.1e} of y{of_gradient}, {limits}"}
    if graph:
        timing = clock(lambda _: captured.replay(), 1, device, pace, calls=sets)
    else:
        timing = clock(call, sets, device, pace)
        peak = peak_mib(lambda: call(0), device)
    time = timing.median_ms if device.type == "cuda" else timing.best_ms
    return {**found, "time_ms": time, "peak_mib": peak}


def reason(e: Exception) -> str:
    if isinstance(e, torch.OutOfMemoryError):
        return "out of memory"
    return first_line(e) if isinstance(e, (ValueError, NotCapturableError)) else f"{type(e).__name__}: {first_line(e)}"


def free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
