"""Lower a partition to a cuDNN graph, which is plain data.

The table LOWER has a function for each op that cuDNN runs; WITHOUT has the reason for each op that it does not run.
`lowering.graph_builder` chooses dims and tensors; `lowering.anchors` and `lowering.pointwise` write the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from fusec.errors import LoweringError
from fusec.ir import Constant, DType, Graph, Node, Value
from fusec.lowering.anchors import ANCHORED
from fusec.lowering.conversion import convert_to_bytes, limit_bytes, round_to_bytes
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.graph_builder import ConstantBinding, CudnnBuilder, Lowered
from fusec.lowering.known_bugs import misread
from fusec.lowering.pointwise import POINTWISE
from fusec.lowering.training_norms import TRAINING_NORMS
from fusec.ops import ANCHORS, PRODUCTS, STRIDED_VIEWS, Cast, MatMul

__all__ = ["ANCHORS", "LOWER", "WITHOUT", "ConstantBinding", "Lowered", "lower"]


def lower(body: Graph, tensor_cores: bool = True, for_cudnn: bool = True) -> Lowered:
    """Lower the body of a partition. The result is stored with the body, because several stages ask for it.

    tensor_cores: False excludes engines that round fp32 to tf32.
    for_cudnn: refuse graphs that cuDNN is known to compute wrongly; False if another library reads the graph.
    Raises LoweringError if the body cannot be written as one cuDNN graph.
    """
    key = (lower, tensor_cores, for_cudnn)
    if key not in body.memo:
        body.memo[key] = _lower(body, tensor_cores, for_cudnn)
    return body.memo[key]


def _lower(body: Graph, tensor_cores: bool, for_cudnn: bool) -> Lowered:
    anchors = [n for n in body.nodes if isinstance(n.op, ANCHORS)]
    if any(isinstance(n.op, MatMul) for n in anchors):
        with suppress(LoweringError):  # where operands do not let the batch dims be merged with the rows
            return _write(CudnnBuilder(body, tensor_cores, fold_batch=True, for_cudnn=for_cudnn), anchors)
    builder = CudnnBuilder(body, tensor_cores, pointwise_only=not anchors, for_cudnn=for_cudnn)
    return _write(builder, anchors)


def _write(b: CudnnBuilder, anchors: list[Node]) -> Lowered:
    b.find_stored()
    b.scaled = any(_has_bytes(n.operands[0]) for n in anchors)
    compute = [n for n in b.body.nodes if not isinstance(n.op, (Constant, *STRIDED_VIEWS))]
    if not compute:
        raise LoweringError("nothing to compute")
    b.assign_foldings(anchors, compute)
    for node in compute:
        if node.op.name not in LOWER:
            raise LoweringError(f"{node.op.name}: {WITHOUT.get(node.op.name, 'cuDNN has no such operation')}")
        LOWER[node.op.name](b, node)
    # Tensor cores are excluded only for products of fp32, because no other op is rounded to tf32, and excluding them
    # would lose engines.
    products = any(isinstance(n.op, PRODUCTS) for n in anchors)
    fp32 = any(v.type.dtype is DType.F32 for n in anchors for v in n.operands)
    graph = CudnnGraph(tuple(b.tensors), tuple(b.calls), b.tensor_cores or not (products and fp32))
    wrong = misread(graph) if b.for_cudnn else None
    if wrong is not None:
        raise LoweringError(wrong)
    offsets = tuple(b.offsets.items())
    return Lowered(graph, tuple(b.inputs), tuple(b.outputs), tuple(b.constants), offsets, tuple(b.spare))


def _has_bytes(value: Value) -> bool:
    """Return True for a value of 8-bit numbers, as such or cast: each layer has its own scale of their products."""
    cast = value.node if value.node is not None and isinstance(value.node.op, Cast) else None
    return any(v.type.dtype in (DType.I8, DType.F8E4M3) for v in (value, *(cast.operands if cast is not None else ())))


def _clip(b: CudnnBuilder, node: Node) -> None:
    (limit_bytes if node in b.conversions else POINTWISE["clip"])(b, node)


def _cast(b: CudnnBuilder, node: Node) -> None:
    (convert_to_bytes if node in b.conversions else POINTWISE["cast"])(b, node)


LOWER: Mapping[str, Callable[[CudnnBuilder, Node], None]] = {
    **POINTWISE,
    **ANCHORED,
    **TRAINING_NORMS,
    "round": round_to_bytes,
    "clip": _clip,
    "cast": _cast,
}

_NO_MODE = "cuDNN has no pointwise mode for it"
_MOVES = "moves elements; cuDNN graphs only read and write strided tensors"
WITHOUT: Mapping[str, str] = {
    **dict.fromkeys(("sign", "acos", "asin", "atan", "cosh", "sinh", "acosh", "asinh", "atanh"), _NO_MODE),
    **dict.fromkeys(("is_nan", "is_inf", "logical_xor"), _NO_MODE),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"), _NO_MODE),
    **dict.fromkeys(("shift_left", "shift_right"), _NO_MODE),
    # By quotients, floor(x / y) * y is NaN where y is infinite, and the sign of a zero is lost.
    "mod": "cuDNN does not say what its mode gives for infinities, zero divisors and large quotients",
    "floor_mod": "cuDNN's modes compute it only by a rounded quotient, which is NaN for an infinite divisor",
    **dict.fromkeys(("sin", "cos", "tan"), "cuDNN's mode loses digits with the size of the angle: 3 are left at 1e4"),
    "gen_index": "merging dims for cuDNN loses its axis",
    "batch_norm": "cuDNN has no engine for inference batch norm; fold it or decompose it",
    "group_norm": "cuDNN normalises whole channels only",
    "lrn": "cuDNN graphs have no local response norm",
    "max_pool": "the cuDNN frontend's Python binding has no resample operation",
    "avg_pool": "the cuDNN frontend's Python binding has no resample operation",
    "rotary": _MOVES,
    "packed_matmul": "a kernel of fusec reads weights of 4 and 8 bits; for cuDNN they are unpacked to floats",
    "softmax": "a reduction may not feed another op of the same cuDNN graph",
    **dict.fromkeys(("reshape", "transpose", "relayout"), "a view; it becomes strides where no copy is needed"),
    **dict.fromkeys(("expand", "concat", "split", "slice", "pad", "dilate", "gather"), _MOVES),
    "resize": "cuDNN plans no upsampling",
    **dict.fromkeys(
        ("grid_sample", "roi_align", "roi_pool", "deform_conv"),
        "cuDNN graphs cannot read at places that a tensor gives",
    ),
    **dict.fromkeys(
        ("top_k", "non_max_suppression"),
        "cuDNN graphs cannot sort",
    ),
    "scatter": _MOVES,
    "cumulate": "cuDNN graphs have no running sums",
    "scan": "cuDNN graphs have no loop; a kernel of fusec runs all steps in one launch",
    "linear_scan": "cuDNN graphs have no loop; a kernel of fusec runs all steps in one launch",
    **dict.fromkeys(
        ("max_pool_train", "max_pool_backward"), "the cuDNN frontend's Python binding has no resample operation"
    ),
    "batch_norm_by_sums": "a kernel of fusec computes the statistics from sums and applies them in one launch",
    "layer_norm_backward": "cuDNN reads the statistics of each row, and refuses to compute them in the same graph",
    "random_bits": "cuDNN's random numbers do not depend on a state that the graph carries",
    "all_finite": "a cuDNN graph reduces one tensor",
    "recurrent": "cuDNN graphs have no loop; a kernel of fusec runs all steps of up to 4,096 units in one launch",
}
