"""`chasm app`: reconstruction in the browser."""

from pathlib import Path

import typer

from chasm.common.extras import require

RUNS = "Run folders, names of models ('chasm models list') or owner/name on the Hub. Default: all models of the list."


def app(
    runs: list[str] = typer.Argument(None, metavar="[RUN]..", help=RUNS),
    port: int = typer.Option(0, min=0, max=65535, help="Port on this machine. Default: a free one."),
    out: Path | None = typer.Option(
        None, "--out", "-o", help="Write the page as a folder for any web server, and serve nothing."
    ),
    browser: bool = typer.Option(True, help="Open the page in the browser."),
) -> None:
    """Reconstruct in the browser: drop a scan, choose a mask, compare, save, and change what the mixers learned.

    The network runs in the page. Without -o, chasm serves the page on 127.0.0.1 under an address with a secret token,
    and reads formats that the page cannot read. With -o the page needs no chasm. In both cases no file leaves the
    machine.
    """
    require("train", "data")
    import tempfile
    import webbrowser

    from chasm.app import build_site, serve

    def announce(name: str) -> None:
        typer.echo(f"{name} .. (seconds; a minute or two if its architecture is new here)")

    if out is not None:
        folder = build_site(runs or [], out, on_model=announce)
        size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        typer.echo(f"{folder}: {size / 2**20:.0f} MiB; try it with: python3 -m http.server -d {folder}")
        return

    def ready(address: str) -> None:
        typer.echo(f"{address} (Ctrl-C ends it)")
        if browser:
            webbrowser.open(address)

    with tempfile.TemporaryDirectory(prefix="chasm-app-") as temporary:
        site = build_site(runs or [], temporary, convert=True, on_model=announce)
        try:
            serve(site, port, ready)
        except KeyboardInterrupt:
            typer.echo("ended")
