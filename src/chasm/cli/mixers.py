"""`chasm mixers`: compare the cost and design of mixers, and check that one keeps the contract."""

import json
from typing import Any

import typer
from typer.core import TyperGroup

from chasm.cli.data import parse_options
from chasm.common.tables import markdown_table, print_table
from chasm.common.text import counted, parse_size

# Field of a row -> column title, table by table.
COST = {
    "mixer": "mixer",
    "params": "params",
    "params_real": "as two",
    "paper_params": "paper",
    "agrees": "agrees",
    "macs": "MMAC",
    "macs_inference": "infer",
    "macs_fft": "FFT",
    "macs_paper": "rule",
    "saved_bytes": "MiB",
}
DESIGN = {
    "mixer": "mixer",
    "response": "spectral response",
    "channel_mixing": "channel mixing",
    "shared_basis": "shared basis",
    "positive_gains": "positive gains",
    "identity_path": "identity path",
}
NOTES = {"mixer": "mixer", "resolution": "at another resolution", "note": "note"}
TABLES = {"Cost": COST, "Taxonomy": DESIGN, "Notes": NOTES}
LEGEND = """\
params: parameters, with a complex number counted once. as two: with a complex number counted twice.
paper: the paper's Core Params, for 96 channels and a 128x128 map only. agrees: which of our two counts it matches \
("no": see the note).
MMAC: million multiply-adds of one forward pass of one map, on a CPU in training, FFT included. infer: MMAC in \
evaluation, where matrices that depend on weights only are computed once and kept. FFT: the part of MMAC in FFTs. \
rule: MMAC as we think the paper counts them: convolutions and matrix products of its equations, a complex one once.
MiB: memory kept for the backward pass. identity path: inside the mixer, or added by the slot around it."""


class _Mixers(TyperGroup):
    """Read `chasm mixers` as `chasm mixers table`, and `chasm mixers 'f*'` as `chasm mixers table 'f*'`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        return super().parse_args(ctx, args if first in {*self.commands, "--help"} else ["table", *args])


app = typer.Typer(
    cls=_Mixers,
    help="Compare the mixers ('chasm mixers', 'chasm mixers gfnet', 'chasm mixers --json'), or check one of your own.",
)


@app.command()
def check(
    name: str = typer.Argument(help="Name of a mixer, as in 'chasm --with mine.py mixers check mine'."),
    channels: int = typer.Option(16, min=1, help="Channels of the maps in the check."),
    option: list[str] = typer.Option([], help="Option of the mixer: --option depth=2. Repeatable."),
) -> None:
    """Check that a mixer keeps the contract: shape, dtype, device, odd sizes, gradient, state dict, compile."""
    from chasm.mixers.contract import check_mixer

    broken = 0
    for claim in check_mixer(name, channels, **parse_options(option)):
        broken += bool(claim.problem)
        typer.echo(f"{'FAILED' if claim.problem else 'ok':<7} {claim.name}{claim.problem and ': ' + claim.problem}")
    if broken:
        raise ValueError(f"{name}: {counted(broken, 'promise')} of the contract not kept")


@app.command("table")
def mixers(
    pattern: str = typer.Argument("*", help="Names to show, as a pattern like 'f*'."),
    channels: int = typer.Option(96, min=1, help="Channels of the map."),
    size: str = typer.Option("128x128", help="HxW of the map that the mixers are built for and run on."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    markdown: bool = typer.Option(False, "--markdown", help="Print Markdown tables."),
) -> None:
    """Compare the mixers: parameters, multiply-adds including the FFT, memory, and the taxonomy of the paper."""
    from chasm.common.registry import OWN_NAME_HINT, suggest
    from chasm.mixers import MIXERS

    H, W = parse_size(size)
    names = MIXERS.list(pattern)
    if not names:
        raise ValueError(f"no mixer matches {pattern!r}: {suggest(pattern, MIXERS.list())} {OWN_NAME_HINT}")
    rows = [row(name, channels, (H, W)) for name in names]
    title = f"One map of {channels} x {H} x {W}."
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif markdown:
        tables = [markdown_table(list(columns.values()), _cells(rows, columns)) for columns in TABLES.values()]
        typer.echo("\n\n".join([title, *tables, LEGEND]))
    else:
        _print(rows, title)


def row(name: str, channels: int, size: tuple[int, int]) -> dict[str, Any]:
    """Return the costs and facts of one mixer, or the reason why it cannot be built at this width."""
    import torch

    from chasm.mixers import MIXERS, create_mixer
    from chasm.surgery.count import count

    try:
        cls: Any = MIXERS.get(name)
    except ValueError as e:  # the package that brings it is broken: the others are shown
        return {"mixer": name, "channels": channels, "size": list(size), "error": str(e), "note": str(e)}
    facts = cls.facts
    is_papers_size = channels == 96 and size == (128, 128)  # the only size with numbers in the paper
    described = {
        "mixer": name,
        "channels": channels,
        "size": list(size),
        "identity_path": "inside" if cls.owns_residual else "slot",
        **facts._asdict(),
    }
    x = torch.randn(1, channels, *size, requires_grad=True)  # a gradient passes through it, as inside a network
    try:
        cost = count(create_mixer(name, channels, size), x)
    except ValueError as e:
        return described | {"error": str(e), "note": str(e)}
    return described | {
        "params": cost.params,
        "params_real": cost.params_real,
        "agrees": agreement(cost.params, cost.params_real, facts.paper_params) if is_papers_size else "-",
        "macs": cost.total,
        "macs_inference": cost.inference,
        "macs_by_kind": cost.macs,
        "macs_fft": cost.macs.get("fft", 0),
        "macs_per_pixel": round(cost.total / (size[0] * size[1])),
        "macs_paper": cost.paper,
        "saved_bytes": cost.saved_bytes,
    }


def agreement(once: int, twice: int, paper: str) -> str:
    """Return which of our counts the paper's equals: "yes" (both), "once", "as two" or "no"; "-" without one.

    The paper prints millions with two decimals. A complex number is one parameter or two.

    >>> agreement(1_640_000, 3_280_000, "1.64M")
    'once'
    """
    if paper == "-":
        return "-"
    as_once, as_two = (f"{n / 1e6:.2f}M" == paper for n in (once, twice))
    if as_once:
        return "yes" if as_two else "once"
    return "as two" if as_two else "no"


def _cell(field: str, value: Any) -> str:
    if value is None:
        return "-"
    if field in ("macs", "macs_inference", "macs_fft", "macs_paper"):
        return f"{value / 1e6:.1f}"
    if field == "saved_bytes":
        return f"{value / 2**20:.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _cells(rows: list[dict[str, Any]], columns: dict[str, str]) -> list[list[str]]:
    return [[_cell(field, r.get(field)) for field in columns] for r in rows]


def _print(rows: list[dict[str, Any]], title: str) -> None:
    typer.echo(title)
    for heading, columns in TABLES.items():
        right = [name for field, name in columns.items() if field.startswith(("params", "macs", "saved"))]
        print_table(list(columns.values()), _cells(rows, columns), title=heading, right=right)
    typer.echo(LEGEND)
