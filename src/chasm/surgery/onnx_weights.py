"""Keep the weights of an ONNX file in a separate file, so that one graph serves all weights of an architecture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


def weights_as_bytes(state: Mapping[str, Tensor]) -> bytes:
    """Return the content of the weights file of a graph: the tensors one after the other."""
    return b"".join(value.detach().cpu().contiguous().numpy().tobytes() for value in state.values())


def optimise_without_weights(program: Any, state: Mapping[str, Tensor]) -> None:
    """Optimise a `torch.onnx.ONNXProgram` in place, and compute nothing from its weights beforehand.

    These are the passes of `program.optimize()` without its patterns, which compare all nodes with all others: half a
    minute for a varnet. onnxruntime has patterns of its own.

    Args:
        program: exported with optimize=False.
        state: the state dict of the module that it was made of.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer

    model, graph = program.model, program.model.graph
    weights = [graph.initializers[name] for name in state if name in graph.initializers]
    graph.inputs.extend(weights)  # the optimiser takes an input for something that may change
    optimizer.inline(model)
    for _ in range(2):  # folding one node may allow to fold another
        optimizer.fold_constants(model)
        optimizer.remove_unused_nodes(model)
    for make_pass in (
        lambda: common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass,
        common.DeduplicateInitializersPass,
        common.CommonSubexpressionEliminationPass,
        common.RemoveUnusedNodesPass,
        common.RemoveUnusedFunctionsPass,
        common.RemoveUnusedOpsetsPass,
        common.OutputFixPass,
        common.NameFixPass,
    ):
        make_pass()(model)
    for weight in weights:
        graph.inputs.remove(weight)


def move_weights_out(file: Path, state: Mapping[str, Tensor], location: str) -> None:
    """Make an ONNX file refer to another file for its weights, and drop the exporter's notes from it.

    Args:
        file: the ONNX file, which is replaced.
        state: the state dict of the module that it was made of.
        location: the name of the file that holds `weights_as_bytes(state)`, beside this one.
    """
    import onnx

    model = onnx.load(str(file))
    offsets, end = {}, 0
    for name, value in state.items():
        offsets[name], end = end, end + value.nbytes
    for tensor in model.graph.initializer:
        if tensor.name not in offsets:
            continue
        value = state[tensor.name]
        if list(tensor.dims) != list(value.shape):
            raise ValueError(f"{tensor.name}: {list(tensor.dims)} in the ONNX file, {list(value.shape)} in the network")
        tensor.ClearField("raw_data")
        place = {"location": location, "offset": offsets[tensor.name], "length": value.nbytes}
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, entry in place.items():
            tensor.external_data.add(key=key, value=str(entry))
    for node in model.graph.node:  # stack traces of the machine that wrote it
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    for tensor in (*model.graph.initializer, *model.graph.input, *model.graph.output, *model.graph.value_info):
        tensor.ClearField("metadata_props")
    model.graph.ClearField("value_info")
    model.ClearField("metadata_props")
    model.graph.ClearField("metadata_props")
    file.write_bytes(model.SerializeToString(deterministic=True))
