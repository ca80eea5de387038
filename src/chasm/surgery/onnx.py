"""ONNX files: a folded model, written with a free batch size and checked in onnxruntime before it appears."""

import copy
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from chasm.common.files import write_atomic
from chasm.mixers.chasm import CHASM
from chasm.surgery.fold import fold
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
        model: the network; its CHASM mixers are folded.
        path: the file to write; its folder must exist.
        example: the input tensors of the network.
        check: False to skip the comparison, for dtypes that onnxruntime cannot run.
        tolerance: the largest relative error that is accepted. Default: 1e-4, and 5e-3 for float16.

    Returns:
        The path of the file.

    Raises:
        ValueError: when onnxruntime is missing, the model does not map tensors to tensors, or the file differs from it.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  (torch's exporter needs it)
    except ModuleNotFoundError as missing:
        raise ValueError(f"ONNX export needs {missing.name}: pip install 'chasm-mixer[export]'") from None
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder for {path.name}: make it first")
    inputs = example if isinstance(example, tuple) else (example,)
    for t in inputs:
        if not isinstance(t, Tensor):
            raise ValueError(f"example: expected a tensor or a tuple of tensors, got {type(t).__name__}: pass tensors")
    dtypes = {t.dtype for t in (*model.parameters(), *inputs) if t.is_floating_point()}
    others = dtypes - {torch.float32, torch.float16}
    if check and others:
        raise ValueError(
            f"onnxruntime checks float32 and float16, got {others.pop()}: convert model and example with .float(), or"
            " pass check=False"
        )
    if tolerance is None:
        tolerance = 5e-3 if torch.float16 in dtypes else 1e-4
    with torch.no_grad(), evaluating(model):
        want = [t for t in tree_leaves(model(*inputs)) if t is not None]
    for t in want:
        if not isinstance(t, Tensor):
            raise ValueError(f"expected a model that returns tensors, got {type(t).__name__}: drop it from the output")

    has_mixers = any(isinstance(m, CHASM) for m in model.modules())
    constant = fold(model, example=inputs) if has_mixers else copy.deepcopy(model).eval()
    # The exporter would take a batch of one for a constant. Beside a longer batch, an input of length 1 is constant.
    one = {t.shape[0] for t in inputs if t.ndim} == {1}
    sample = tuple(torch.cat([t, t]) if one and t.ndim else t for t in inputs)
    batch = torch.export.Dim.DYNAMIC

    def write(partial: Path) -> None:
        torch.onnx.export(
            constant,
            sample,
            str(partial),
            dynamo=True,
            external_data=False,
            verbose=False,
            dynamic_shapes=tuple({0: batch} if t.ndim and t.shape[0] != 1 else {} for t in sample),
        )
        if check:
            session = onnxruntime.InferenceSession(str(partial), providers=["CPUExecutionProvider"])
            feed = {i.name: t.detach().cpu().numpy() for i, t in zip(session.get_inputs(), inputs, strict=True)}
            for got, expected in zip(session.run(None, feed), want, strict=True):
                error = _difference(torch.as_tensor(got).double(), expected.cpu().double())
                if not error <= tolerance:
                    raise ValueError(
                        f"the ONNX file differs from the model by {error:.1e} (allowed {tolerance:.0e}): not saved"
                    )

    write_atomic(path, write)
    return path


def _difference(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        return float("inf")
    return ((got - want).norm() / want.norm().clamp(min=1e-12)).item()
