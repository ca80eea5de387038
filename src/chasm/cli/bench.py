"""`chasm bench`: measure how fast the mixers and their hosts are on this machine."""

from pathlib import Path
from typing import Any

import typer

from chasm.common.extras import require
from chasm.common.files import holds, require_replaceable
from chasm.common.progress import ProgressBar
from chasm.common.text import parse_shape

app = typer.Typer(invoke_without_command=True, no_args_is_help=False)

DEVICE = typer.Option(None, help="cuda or cpu. Default: a GPU if there is one.")
MODES = (
    "core (forward of the spectral part), eval (forward of the block), step (forward and backward), "
    "core-graph and graph (core and step in a CUDA graph)."
)
MIXER = (
    "A name of 'chasm mixers', or what people use instead: depthwise-7x7, convnext, window-attention, attention. "
    "The paper-literal block is always measured."
)
OUT = typer.Option(None, "--out", "-o", help="Write OUT.md and OUT.csv.")


@app.callback()
def bench(
    context: typer.Context,
    shape: list[str] = typer.Option([], help="B,C,H,W. Default: the published shapes on a GPU, small ones on a CPU."),
    dtype: list[str] = typer.Option([], help="float32 or bf16."),
    mixer: list[str] = typer.Option([], help=MIXER),
    mode: list[str] = typer.Option([], help=MODES),
    form: list[str] = typer.Option([], help="How CHASM is computed: auto, reference, fft, triton or fused."),
    compiled: bool = typer.Option(False, help="Also time the paper-literal block under torch.compile (takes minutes)."),
    seconds: float | None = typer.Option(None, min=0.001, help="Time to spend on each row. Default: by the device."),
    out: Path | None = OUT,
    device: str | None = DEVICE,
) -> None:
    """Time every mixer and form at every shape, dtype and mode on this machine.

    Each row is compared with the paper-literal block (the paper's equations as they are written, eager) and with the
    floor (the time to move the maps through memory). A row whose outputs or gradients disagree with float64 is printed
    without a time.

    --shape, --dtype, --mixer, --mode and --form select what is measured, and can be repeated. By default everything
    is measured.
    """
    if context.invoked_subcommand is not None:
        if any((shape, dtype, mixer, mode, form, compiled, seconds, out, device)):
            raise ValueError(f"options of {context.invoked_subcommand!r} go after its name")
        return
    from chasm.bench import report, table
    from chasm.bench.clock import Pace
    from chasm.common.precision import tf32

    place = _device(device)
    with tf32(False):
        config = table.make_config(
            place,
            shapes=[_shape(text) for text in shape],
            dtypes=dtype,
            modes=mode,
            mixers=mixer,
            forms=form,
            compiled=compiled,
            pace=None if seconds is None else Pace(seconds, 3, 1000),
        )
        facts = _begin(place, out, config.limits)
        rows: list[dict[str, Any]] = []
        text = report.header("Mixers, timed", facts) + f"\n\n{report.LEGEND}"
        with ProgressBar(config.rows()) as bar:
            for of_shape in table.run(config, bar.advance):
                rows += of_shape
                titles = {k: v for k, v in table.TITLES.items() if k != "shape"}
                name = report.cell("shape", of_shape[0])
                with bar.hidden():
                    report.show(of_shape, titles, name)
                text += f"\n\n## {name}\n\n{report.markdown(of_shape, titles)}"
                report.write(out, text, rows, table.COLUMNS)  # after every shape: an interrupted run keeps its rows


@app.command()
def scaling(
    sweep: list[str] = typer.Option([], help="size, channels or batch. Default: all three."),
    dtype: list[str] = typer.Option([], help="float32 or bf16. Default: bf16 on a GPU, float32 on a CPU."),
    mixer: list[str] = typer.Option([], help="A name of 'chasm mixers'. Default: all."),
    mode: list[str] = typer.Option([], help=f"{MODES} Default: step."),
    plot: Path | None = typer.Option(None, help="Draw time against size into this PNG file."),
    redraw: list[Path] = typer.Option([], "--from", help="Draw CSVs of earlier runs with --plot; measure nothing."),
    note: str = typer.Option("", help="With --from: a line to write below the picture."),
    out: Path | None = OUT,
    device: str | None = DEVICE,
) -> None:
    """Show how the time of every mixer grows with H = W, C and the batch, up to the largest map that fits."""
    if plot is not None:
        require("report")
    from chasm.bench import report, table
    from chasm.bench import scaling as sweeps
    from chasm.bench.clock import Pace
    from chasm.common.precision import tf32

    if plot is not None:
        require_replaceable(plot, lambda path: holds(path, sweeps.PLOT_TITLE.encode()))
    with tf32(False):
        if redraw:
            if plot is None:
                raise ValueError("--from draws earlier measurements: give the name of the picture with --plot")
            sweeps.plot([row for path in redraw for row in sweeps.read(path)], plot, note)
            return
        for name in sweep:
            if name not in sweeps.SWEEPS:
                raise ValueError(f"unknown sweep {name!r}: expected {', '.join(sweeps.SWEEPS)}")
        place = _device(device)
        pace = Pace(0.02, 3, 30) if place.type == "cuda" else Pace(0.05, 2, 10)
        dtypes = dtype or (["bf16"] if place.type == "cuda" else ["float32"])
        config = table.make_config(place, dtypes=dtypes, modes=mode or ["step"], mixers=mixer, pace=pace)
        facts = _begin(place, out, config.limits)
        chosen = sweep or list(sweeps.SWEEPS)
        rows: list[dict[str, Any]] = []
        with ProgressBar(sweeps.total(config, chosen)) as bar:
            for point in sweeps.run(config, chosen, bar.advance):
                rows += point
                slopes = sweeps.slopes(rows)
                text = report.header("How time grows", facts)
                text += f"\n\n{sweeps.__doc__}\n## Slopes\n\n{report.markdown(slopes, sweeps.SLOPES)}"
                text += f"\n\n## Times\n\n{report.markdown(rows, sweeps.TITLES)}"
                report.write(out, text, rows, sweeps.COLUMNS)
        report.show(rows, sweeps.TITLES, "Times")
        report.show(slopes, sweeps.SLOPES, "Slopes: time ~ n^p")
        if plot is not None:
            batch, width, *_ = sweeps.shapes("size", place.type == "cuda")[0][1]
            sweeps.plot(rows, plot, f"{facts['device']}, torch {facts['torch']}, C = {width}, batch {batch}")


@app.command()
def bases(out: Path | None = OUT, device: str | None = DEVICE) -> None:
    """Time all orthogonal bases of a HiFi-Mamba host, forward and backward, and torch's matrix exponential."""
    from chasm.bench import hosts

    _tables("Bases, timed", [("", hosts.bases, hosts.BASES)], hosts.COLUMNS, out, device, 0.3)


@app.command()
def hosts(
    host: list[str] = typer.Option([], help="hifi (training) or unet (inference). Default: both."),
    out: Path | None = OUT,
    device: str | None = DEVICE,
) -> None:
    """Time a HiFi-Mamba training step and folded U-Net inference, with CHASM and with empty slots."""
    from chasm.bench import hosts

    known = {"hifi": ("Training", hosts.hifi, hosts.TITLES), "unet": ("Inference", hosts.unet, hosts.TITLES)}
    for name in host:
        if name not in known:
            raise ValueError(f"unknown host {name!r}: expected {' or '.join(known)}")
    _tables("Hosts, timed", [known[name] for name in host or known], hosts.COLUMNS, out, device, 2.0)


@app.command()
def profile(
    mixer: str = typer.Option("chasm", help="The mixer in the slots of the host: a name of 'chasm mixers'."),
    top: int = typer.Option(25, min=1, help="Kernels to list."),
    out: Path | None = OUT,
    device: str | None = DEVICE,
) -> None:
    """Show where the time of a HiFi-Mamba training step goes (bf16, eager), by part of the network and by kernel."""
    from chasm.bench import profile as profiling
    from chasm.bench import report
    from chasm.common.precision import tf32
    from chasm.mixers import MIXERS

    with tf32(False):
        place = _device(device)
        MIXERS.get(mixer)  # an unknown name is refused before anything is measured
        facts = _begin(place, out)
        measured = profiling.profile_step(place, mixer)
        kernels = measured["kernels"][:top]
        host = f"HiFi-Mamba with {mixer}, batch {measured['batch']}, {measured['size']}x{measured['size']}"
        busy = f"its kernels, profiled separately: {measured['busy_ms']:.1f} ms"
        line = f"{host}: {measured['wall_ms']:.1f} ms per step; {busy}."
        typer.echo(line)
        report.show(measured["parts"], profiling.BY_PART, "By part")
        report.show(kernels, profiling.BY_KERNEL, "By kernel")
        text = report.header("Where a training step goes", facts) + f"\n\n{line}\n\n{profiling.__doc__}"
        tables = [report.markdown(measured["parts"], profiling.BY_PART), report.markdown(kernels, profiling.BY_KERNEL)]
        text += "\n" + "\n\n".join(tables)
        report.write(out, text, [*measured["parts"], *kernels], profiling.COLUMNS)


def _tables(title: str, parts: list[Any], columns: Any, out: Path | None, device: str | None, seconds: float) -> None:
    """Measure, show and write one table after the other."""
    from chasm.bench import report
    from chasm.bench.clock import Pace
    from chasm.common.precision import tf32

    with tf32(False):
        place = _device(device)
        facts = _begin(place, out)
        pace = Pace(seconds, 5, 50) if place.type == "cuda" else Pace(0.2, 2, 10)
        rows: list[dict[str, Any]] = []
        text = report.header(title, facts)
        for name, measure, titles in parts:
            shown = []
            with ProgressBar() as bar:
                for row in measure(place, pace):
                    shown.append(row)
                    bar.advance(str(row.get("mixer", row["what"])))
            report.show(shown, titles, name)
            rows += shown
            text += (f"\n\n## {name}" if name else "") + f"\n\n{report.markdown(shown, titles)}"
            report.write(out, text, rows, columns)


def _device(name: str | None) -> Any:
    from chasm.common.devices import usable_device

    device = usable_device(name)
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"expected device cuda or cpu, got {name!r}")
    return device


def _begin(device: Any, out: Path | None, limits: Any = None) -> dict[str, str]:
    """Print and return where the numbers were measured, and the peak rates of the device.

    A file that chasm did not write is refused before anything is measured.
    """
    from chasm.bench.clock import measure_limits
    from chasm.bench.report import require_replaceable_pages
    from chasm.common.provenance import provenance

    require_replaceable_pages(out)
    limits = limits or measure_limits(device)
    dtype = "bf16" if device.type == "cuda" else "float32"
    facts = {
        **provenance(device).lines(),
        "copy": f"{limits.copy_gb_per_s:.0f} GB/s read and written",
        f"{dtype} matrix product": f"{limits.gemm_tflop_per_s:.3g} TFLOP/s",
    }
    for name, value in facts.items():
        typer.echo(f"{name}: {value}")
    return facts


def _shape(text: str) -> tuple[int, int, int, int]:
    B, C, H, W = parse_shape(text, "8,96,256,256")
    return B, C, H, W
