"""ONNX files: a folded model, written with a free batch size and checked in onnxruntime before it appears."""

import copy
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from chasm.common.files import write_atomic
from chasm.surgery.fold import Foldable, fold
from chasm.surgery.probe import evaluating


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Tensor | tuple[Tensor, ...],
    *,
    check: bool = True,
    tolerance: float | None = None,
) -> Path:
    """Fold a model for the size of an example and write it as ONNX, with a free batch size.

    The file is run once in onnxruntime and compared with the model in eval mode, output by output. It appears at `path`
    only if they agree.

    Args:
        model: the network; its CHASM, GFNet and SpectFormer mixers are folded.
        path: the file to write; its folder must exist.
        example: the input tensors of the network.
        check: False to skip the comparison, for dtypes that onnxruntime cannot run.
        tolerance: the largest relative error that is accepted. Default: 1e-4, and 5e-3 for float16.

    Returns:
        The path of the file.

    Raises:
        ValueError: when onnxruntime is missing, the model does not map tensors to tensors or contains something
            that ONNX lacks, or the file differs from it.
    """
    path = Path(path)
    require_runtime(path)
    inputs = example if isinstance(example, tuple) else (example,)
    for t in inputs:
        if not isinstance(t, Tensor):
            raise ValueError(f"example: expected a tensor or a tuple of tensors, got {type(t).__name__}: pass tensors")
    dtypes = {t.dtype for t in (*model.parameters(), *inputs) if t.is_floating_point()}
    others = dtypes - {torch.float32, torch.float16}
    if check and others:
        problem = f"onnxruntime checks float32 and float16, got {others.pop()}"
        raise ValueError(f"{problem}: convert model and example with .float(), or pass check=False")
    if tolerance is None:
        tolerance = 5e-3 if torch.float16 in dtypes else 1e-4
    with torch.no_grad(), evaluating(model):
        want = [t for t in tree_leaves(model(*inputs)) if t is not None]
    for t in want:
        if not isinstance(t, Tensor):
            raise ValueError(f"expected a model that returns tensors, got {type(t).__name__}: drop it from the output")

    folded = fixed_copy(model, inputs)
    # The exporter would take a batch of one for a constant. Beside a longer batch, an input of length 1 is constant.
    one = {t.shape[0] for t in inputs if t.ndim} == {1}
    sample = tuple(torch.cat([t, t]) if one and t.ndim else t for t in inputs)
    batch = torch.export.Dim.DYNAMIC
    free = [{0: batch} if t.ndim and t.shape[0] != 1 else {} for t in sample]
    checks = [(inputs, want)] if check else []
    write_checked(path, folded, checks, sample=sample, dynamic_shapes=tuple(free), tolerance=tolerance)
    return path


def fixed_copy(model: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Module:
    """Return a copy in eval mode; mixers that `fold` knows, if there are any, are folded for the size of the inputs."""
    has_mixers = any(isinstance(m, Foldable) for m in model.modules())
    return fold(model, example=inputs) if has_mixers else copy.deepcopy(model).eval()


def write_checked(
    path: Path,
    model: nn.Module | torch.export.ExportedProgram,
    checks: Sequence[tuple[tuple[Tensor, ...], Sequence[Tensor]]],
    *,
    sample: tuple[Tensor, ...] = (),
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    metadata: Mapping[str, str] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    weights_file: str = "",
    tolerance: float = 1e-4,
    **options: Any,
) -> float:
    """Write a model as ONNX, run the file, keep it only if it computes what is expected, and return the largest error.

    Args:
        path: the file to write; its folder must exist.
        model: a module, or a program of torch.export.
        checks: inputs, and the outputs that are expected for them.
        sample: the inputs to trace a module with.
        shapes: shapes of inputs and outputs, by name; a word becomes the name of a free axis.
        metadata: metadata of the file.
        weights: the state dict of the model, if the weights are to stay outside the file.
        weights_file: the file beside `path` that holds `weights`, as `weights_as_bytes` wrote it.
        tolerance: the largest relative error that is accepted.
        **options: options of torch.onnx.export.
    """
    runtime = require_runtime(path)
    from chasm.surgery.onnx_scan import TRANSLATIONS
    from chasm.surgery.onnx_weights import move_weights_out, optimise_without_weights

    largest = 0.0

    def write(partial: Path) -> None:
        nonlocal largest
        with _quiet(), _one_line():
            program = torch.onnx.export(
                model,
                sample,
                dynamo=True,
                verbose=False,
                optimize=weights is None,
                custom_translation_table=TRANSLATIONS,
                **options,
            )
            assert program is not None
            if weights is not None:
                optimise_without_weights(program, weights)
            program.save(str(partial), external_data=False)
        if weights is not None:
            move_weights_out(partial, weights, weights_file)
        if shapes or metadata:
            _describe(partial, shapes or {}, metadata or {})
        for inputs, expected in checks:
            for got, want in zip(_run(runtime, partial, inputs), expected, strict=True):
                error = _difference(torch.as_tensor(got).double(), want.cpu().double())
                if not error <= tolerance:
                    problem = f"differs from the model by {error:.1e} (allowed {tolerance:.0e})"
                    raise ValueError(f"the ONNX file {problem}: not saved")
                largest = max(largest, error)

    write_atomic(path, write)
    return largest


def _run(runtime: Any, file: Path, inputs: tuple[Tensor, ...]) -> list[Any]:
    """Return the outputs of a file in onnxruntime."""
    try:
        session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        feed = {i.name: t.detach().cpu().numpy() for i, t in zip(session.get_inputs(), inputs, strict=True)}
        outputs: list[Any] = session.run(None, feed)
    except Exception as e:  # onnxruntime's own errors have no narrower base
        text = " ".join(str(e).split())
        raise ValueError(f"onnxruntime cannot run the file, which is not saved: {text[:400]}") from e
    return outputs


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn the exporter's report into one line with its first cause."""
    try:
        yield
    except torch.onnx.OnnxExporterError as e:
        cause: BaseException = e
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = " ".join(str(cause).split())
        raise ValueError(f"this model cannot be written as ONNX: {text[:400]}") from e


def require_runtime(path: Path) -> Any:
    """Return the module onnxruntime, before work begins that could not be checked or written.

    Raises:
        ValueError: when onnxruntime or onnxscript is missing.
        FileNotFoundError: when the folder of the file is.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  (torch's exporter needs it)
    except ModuleNotFoundError as missing:
        raise ValueError(f"ONNX export needs {missing.name}: pip install 'chasm-mixer[export]'") from None
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder for {path.name}: make it first")
    return onnxruntime


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's remarks about packages, inputs and its own deprecated calls."""
    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir", "onnxscript")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _describe(file: Path, shapes: Mapping[str, Sequence[int | str]], metadata: Mapping[str, str]) -> None:
    """Write names of free axes, in place of the exporter's symbols, and metadata into a file.

    Shapes between input and output are left out: those the exporter gives half spectra of a free size are wrong, and
    onnxruntime would reuse memory by them.
    """
    import onnx

    model = onnx.load(str(file))
    ends = [*model.graph.input, *model.graph.output]
    symbols = {
        axis.dim_param: word
        for value in ends
        for axis, word in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False)
        if isinstance(word, str)
    }
    del model.graph.value_info[:]
    for value in ends:
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param in symbols:
                axis.dim_param = symbols[axis.dim_param]
    onnx.helper.set_model_props(model, dict(metadata))
    onnx.save(model, str(file))


def _difference(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        return float("inf")
    return ((got - want).norm() / want.norm().clamp(min=1e-12)).item()
