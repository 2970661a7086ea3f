"""Check that a graph survives export to ONNX and import, and that onnxruntime computes what it means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

import numpy as np

from fusec import frontends
from fusec.errors import LoweringError
from fusec.exporters.onnx import to_onnx
from fusec.ir import HALVES, Graph, HostArray, Node
from fusec.ops import NonMaxSuppression, Recurrent, Resize
from fusec.testing.case import Case, MismatchError, Property, Trust
from fusec.testing.error_bounds.bounds import allowed, compare, execution, meaning
from fusec.testing.properties.fixtures import CASE, in_float64, prepared

if TYPE_CHECKING:
    from onnx import ModelProto


# Relative. Implementations compute a variance as the mean of squares minus the square of the mean, which cancels.
NORMS, OF_NORMS = 1e-3, ("group_norm", "instance_norm", "layer_norm", "batch_norm", "rms_norm")
# Ops that onnxruntime computes differently from the specification, or with less precision.
DEVIATES = {
    "lrn": "its sum of squares runs over other channels where the size is even",
    "floor_mod": "Mod of floats with a negative divisor",
    "pow": "integers to powers beyond their range",
}


def onnx_round_trip(graph: Graph, case: Case = CASE) -> None:
    """Check that a graph, exported as ONNX and imported again, has the same interface and meaning."""
    import onnx  # imported here because only this property needs it

    model = _exported(graph)
    onnx.checker.check_model(model)
    if any(isinstance(n.op, NonMaxSuppression) for n in graph.nodes):
        raise SkipTest("imported again, the model is split at the number of boxes that stay")
    back = frontends.load(model.SerializeToString())
    back.verify()
    for kind, got, want in (
        ("inputs", [(v.name, v.type) for v in back.inputs], [(v.name, v.type) for v in graph.inputs]),
        ("outputs", _outputs(back), _outputs(graph)),
    ):
        if [(name, t.with_order(())) for name, t in got] != [(name, t.with_order(())) for name, t in want]:
            raise MismatchError(f"through ONNX, the {kind} are {got} instead of {want}")
    if any(v.type.dtype in HALVES for v in graph.values()):
        return  # an attribute of fusec is a 16-bit tensor in ONNX
    feeds = prepared(graph, case).feeds
    compare(in_float64(back, feeds), [allowed(graph, feeds, meaning(exported=True))], "through ONNX")


def onnxruntime_agrees(graph: Graph, case: Case = CASE) -> None:
    """Check that onnxruntime, without its optimisations, computes what the graph means.

    If it differs, the evaluator of the ONNX specification is asked, too.
    """
    if case.style == "special" or any(n.op.name in DEVIATES for n in graph.nodes):
        return
    if any(v.type.dtype in HALVES for v in graph.values()):
        return  # onnxruntime has few such kernels, and each rounds in its own way
    if any(v.type.dtype.is_narrow for v in graph.values()):
        return  # onnxruntime does not take them from NumPy, and rounds where it casts to them
    if any(n.op.name == "instance_norm" and n.result.type.size == 0 for n in graph.nodes):
        return  # its kernel crashes on images without pixels
    if any(isinstance(n.op, Resize) and _near_a_tie(n.op, n.operands[0].type.shape) for n in graph.nodes):
        return  # because onnxruntime rounds coordinates to 32 bits
    model, feeds = _exported(graph), case.inputs(graph)
    if any(isinstance(n.op, Recurrent) and _may_be_empty(n, feeds) for n in graph.nodes):
        return  # the last states of a sequence of no steps are the first ones here, and zeros in onnxruntime
    got = _run(model.SerializeToString(), feeds)
    if got is None:
        return
    right = allowed(graph, feeds, execution(device=True, exported=True))  # its erf and tanh are approximations, too
    room = NORMS if any(n.op.name in OF_NORMS for n in graph.nodes) else 0.0
    try:
        compare(got, [right], "onnxruntime", room)
    except MismatchError as mismatch:
        third = _specification(model, feeds)
        if third is not None:
            try:
                compare(third, [right], "the ONNX reference", room)
            except MismatchError as second:
                raise MismatchError(f"{mismatch}; {second}", got, right.want, Trust.REFERENCE) from second
            return  # only onnxruntime differs
        raise MismatchError(str(mismatch), got, right.want, Trust.ONNXRUNTIME) from mismatch


def _may_be_empty(layer: Node, feeds: Mapping[str, HostArray]) -> bool:
    """Tell if a sequence of a recurrent layer has no steps, or a length that is computed."""
    lengths = layer.operands[-1]
    if lengths.type.dtype.is_float:
        return False
    given = lengths.literal.array if lengths.literal is not None else feeds.get(lengths.name)
    return given is None or bool((given <= 0).any())


def _near_a_tie(op: Resize, shape: tuple[int, ...]) -> bool:
    """Tell if rounding scales and coordinates to 32 bits may change which element is nearest."""
    if op.mode != "nearest":
        return False
    for dim, (size, scale) in enumerate(zip(shape, op.scales, strict=True)):
        at = op.positions(np, dim, size) + (0.0 if op.rounding in ("floor", "ceil") else 0.5)
        off = np.abs(at - np.rint(at))
        exact = float(np.float32(scale)) == scale  # then a coordinate on a tie is one in 32 bits, too
        if ((off < 1e-5 * (1 + size)) & ~(exact & (off == 0.0))).any():
            return True
    return False


def _exported(graph: Graph) -> ModelProto:
    try:
        return to_onnx(graph)
    except LoweringError as error:
        raise SkipTest(str(error)) from error


def _outputs(graph: Graph) -> list[tuple[str, Any]]:
    return [(name, v.type) for name, v in zip(graph.output_names, graph.outputs, strict=True)]


def _run(model: bytes, feeds: Mapping[str, HostArray]) -> dict[str, HostArray] | None:
    """Run a model with onnxruntime; None if it has no kernel for it."""
    import onnxruntime  # optional

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    package: Any = onnxruntime
    words = package.capi.onnxruntime_pybind11_state
    refusals = (words.NotImplemented, words.InvalidGraph, words.Fail, words.InvalidArgument, words.RuntimeException)
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        results = session.run(names, {name: np.array(array) for name, array in feeds.items()})
    except refusals:
        return None
    return {name: np.asarray(array) for name, array in zip(names, results, strict=True)}


def _specification(model: Any, feeds: Mapping[str, HostArray]) -> dict[str, HostArray] | None:
    """Run a model with the reference evaluator of the onnx package; None if that fails."""
    from onnx.reference import ReferenceEvaluator

    try:
        with np.errstate(all="ignore"):
            evaluator = ReferenceEvaluator(model)
            results: Any = evaluator.run(None, dict(feeds))
    except Exception:  # noqa: BLE001 - an implementation in Python, with an error for each thing it lacks
        return None
    return {str(name): np.asarray(array) for name, array in zip(evaluator.output_names, results, strict=True)}


PROPERTIES_ONNX: tuple[Property, ...] = (
    Property("onnx_round_trip", onnx_round_trip),
    Property("onnxruntime_agrees", onnxruntime_agrees, "onnxruntime"),
)
