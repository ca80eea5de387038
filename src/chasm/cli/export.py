"""`chasm export`: a trained run as one ONNX file."""

from pathlib import Path

import typer

from chasm.common.text import parse_size


def export(
    run: str = typer.Argument(..., metavar="RUN", help="Run folder, or name of a model that comes with chasm."),
    out: Path = typer.Option(Path("model.onnx"), "--out", "-o", help="File to write."),
    size: str | None = typer.Option(
        None,
        help="HEIGHTxWIDTH, or one number, for a faster file of this size only. Default: any size from 32 x 32 on.",
    ),
    coils: int | None = typer.Option(
        None, help="1 for one coil, 2 or more for any number of coils. Default: that of the run's data."
    ),
    force: bool = typer.Option(False, "--force", help="Replace a file that chasm did not write."),
) -> None:
    """Write a trained run as one ONNX file, checked in onnxruntime against the run.

    The file of a reconstruction run takes k-space and a mask, and returns images. Scaling, Fourier transforms, coil
    sensitivities and data consistency are inside, in real arithmetic that onnxruntime runs anywhere, also in a browser.
    """
    from chasm.common.files import holds, require_replaceable
    from chasm.train.export import MARK, export_run

    require_replaceable(out, lambda path: holds(path, MARK.encode()), force)
    exported = export_run(run, out, size=None if size is None else parse_size(size), coils=coils)
    for kind, shapes in (("in", exported.inputs), ("out", exported.outputs)):
        for name, shape in shapes.items():
            typer.echo(f"{kind}: {name} float32 ({', '.join(map(str, shape))})")
    megabytes = exported.path.stat().st_size / 1e6
    typer.echo(f"{exported.path}: {megabytes:.1f} MB, differs from the run by {exported.error:.0e} in onnxruntime")
