"""`chasm bench`: how fast the mixers and their hosts are on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

app = typer.Typer(invoke_without_command=True, no_args_is_help=False)

DEVICE = typer.Option(None, help="cuda or cpu. Default: a GPU where there is one.")
OUT = typer.Option(None, "--out", "-o", help="Write OUT.md and OUT.csv.")


@app.callback()
def bench(
    context: typer.Context,
    shape: list[str] = typer.Option([], help="B,C,H,W; repeat for more. Default: the shapes of the published table."),
    dtype: list[str] = typer.Option([], help="float32 or bf16."),
    mixer: list[str] = typer.Option([], help="chasm, or a rival; the paper-literal block is always there."),
    mode: list[str] = typer.Option([], help="core, core-graph, eval, step or graph."),
    form: list[str] = typer.Option([], help="Form of CHASM, or auto."),
    compiled: bool = typer.Option(False, help="Also the paper-literal block under torch.compile; takes minutes."),
    seconds: float | None = typer.Option(None, min=0.001, help="How long to repeat each row."),
    out: Path | None = OUT,
    device: str | None = DEVICE,
) -> None:
    """Time every mixer and form at every shape, dtype and mode, against the paper-literal block and the memory floor.

    No time is printed of a row that does not agree, in outputs and gradients, with float64 in the same run.
    Options that name things can be repeated, and select; without them everything is measured.
    """
    if context.invoked_subcommand is not None:
        return
    with _one_line_errors():
        from chasm.bench import report, table
        from chasm.bench.clock import Pace
        from chasm.ops.precision import tf32

        place = _device(device)
        with tf32(False):
            limits, facts = _begin(place)
            plan = table.make_plan(
                place,
                limits,
                shapes=[_shape(s) for s in shape],
                dtypes=dtype,
                modes=mode,
                mixers=mixer,
                forms=form,
                compiled=compiled,
                pace=None if seconds is None else Pace(seconds, 3, 1000),
            )
            rows: list[dict[str, Any]] = []
            text = report.header("Mixers, timed", facts) + f"\n\n{report.LEGEND}"
            with report.progress(plan.rows()) as tick:
                for found in table.run(plan, tick):
                    rows += found
                    titles = {k: v for k, v in report.TITLES.items() if k != "shape"}
                    name = report.cell("shape", found[0])
                    report.show(found, titles, name)
                    text += f"\n\n## {name}\n\n{report.markdown(found, titles)}"
                    report.write(out, text, rows, table.COLUMNS)  # after every shape: an interrupted run leaves them


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as e:
        typer.echo(f"error: {e}", err=True)
        raise typer.Exit(3) from None


def _device(name: str | None) -> Any:
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cuda", "cpu"):
        raise ValueError(f"expected device cuda or cpu, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device here: leave out --device, or give cpu")
    return torch.device(name)


def _begin(device: Any) -> tuple[Any, dict[str, str]]:
    """What the device does at best, and the header that says where all this was measured; printed."""
    from chasm.bench import report
    from chasm.bench.clock import measure_limits

    limits = measure_limits(device)
    dtype = "bf16" if device.type == "cuda" else "float32"
    facts = {
        **report.provenance(device),
        "copy": f"{limits.copy_gb_per_s:.0f} GB/s read and written",
        f"{dtype} matrix product": f"{limits.gemm_tflop_per_s:.3g} TFLOP/s",
    }
    for name, value in facts.items():
        typer.echo(f"{name}: {value}")
    return limits, facts


def _shape(text: str) -> Any:
    parts = text.replace("x", ",").split(",")
    if len(parts) != 4 or not all(p.strip().isdecimal() and int(p) > 0 for p in parts):
        raise ValueError(f"expected a shape like 8,96,256,256 (B,C,H,W), got {text!r}")
    return tuple(int(p) for p in parts)
