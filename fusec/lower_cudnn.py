"""Lower a partition to a cuDNN graph as plain data, op by op through the table LOWER.

`lowering.graph_builder` decides the dims and tensors; `lowering.anchors` and `lowering.pointwise` write the calls.
Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

from fusec.errors import LoweringError
from fusec.ir import Constant, DType, Graph, Node
from fusec.lowering.anchors import ANCHORED
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.graph_builder import ConstantBinding, CudnnBuilder, Lowered
from fusec.lowering.known_bugs import misread
from fusec.lowering.pointwise import POINTWISE
from fusec.ops import ANCHORS, STRIDED_VIEWS, Conv, ConvTranspose, ConvWgrad, MatMul

__all__ = ["ANCHORS", "LOWER", "WITHOUT", "ConstantBinding", "Lowered", "lower"]


def lower(body: Graph, tensor_cores: bool = True, for_cudnn: bool = True) -> Lowered:
    """Lower a partition's body.

    tensor_cores: False excludes engines that round fp32 to tf32.
    for_cudnn: refuse what cuDNN is known to compute wrongly; False if another library reads the graph.
    Raises LoweringError when the body cannot be written as one cuDNN graph.
    """
    made = _LOWERED.setdefault(body, {})
    how = (body.edits, tensor_cores, for_cudnn)
    if how not in made:
        made[how] = _lower(body, tensor_cores, for_cudnn)
    return made[how]


# Of bodies that are still there, as often as they were edited: judged, planned and bound, a step is lowered once.
_LOWERED: WeakKeyDictionary[Graph, dict[tuple[int, bool, bool], Lowered]] = WeakKeyDictionary()


def _lower(body: Graph, tensor_cores: bool, for_cudnn: bool) -> Lowered:
    anchors = [n for n in body.nodes if isinstance(n.op, ANCHORS)]
    folds = (True, False) if any(isinstance(n.op, MatMul) for n in anchors) else (False,)
    for fold_batch in folds:
        builder = CudnnBuilder(body, tensor_cores, fold_batch, pointwise_only=not anchors, for_cudnn=for_cudnn)
        try:
            return _written(builder, anchors)
        except LoweringError:
            if fold_batch == folds[-1]:
                raise
    raise AssertionError("unreachable")


def _written(b: CudnnBuilder, anchors: list[Node]) -> Lowered:
    b.find_stored()
    compute = [n for n in b.body.nodes if not isinstance(n.op, (Constant, *STRIDED_VIEWS))]
    if not compute:
        raise LoweringError("nothing to compute")
    b.assign_frames(anchors, compute)
    for node in compute:
        if node.op.name not in LOWER:
            raise LoweringError(f"{node.op.name}: {WITHOUT.get(node.op.name, 'cuDNN has no such operation')}")
        LOWER[node.op.name](b, node)
    # only products of fp32 operands can be rounded to tf32; asking for more would lose other engines
    products = any(isinstance(n.op, (Conv, ConvTranspose, ConvWgrad, MatMul)) for n in anchors)
    fp32 = any(v.type.dtype is DType.F32 for n in anchors for v in n.operands)
    graph = CudnnGraph(tuple(b.tensors), tuple(b.calls), b.tensor_cores or not (products and fp32))
    wrong = misread(graph) if b.for_cudnn else None
    if wrong is not None:
        raise LoweringError(wrong)
    offsets = tuple(b.offsets.items())
    return Lowered(graph, tuple(b.inputs), tuple(b.outputs), tuple(b.constants), offsets)


LOWER: Mapping[str, Callable[[CudnnBuilder, Node], None]] = {**POINTWISE, **ANCHORED}

_NO_MODE = "cuDNN has no pointwise mode for it"
_MOVES = "moves elements; cuDNN graphs only read and write strided tensors"
WITHOUT: Mapping[str, str] = {
    **dict.fromkeys(("sign", "round", "acos", "asin", "atan", "cosh", "sinh", "acosh", "asinh", "atanh"), _NO_MODE),
    **dict.fromkeys(("is_nan", "is_inf", "logical_xor"), _NO_MODE),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"), _NO_MODE),
    **dict.fromkeys(("shift_left", "shift_right"), _NO_MODE),
    # quotients lose digits: floor(x / y) * y is NaN where y is infinite, and the sign of a zero is lost
    "mod": "cuDNN does not say what its mode gives for infinities, zero divisors and large quotients",
    "floor_mod": "cuDNN's modes only reach it by a rounded quotient, which is NaN for an infinite divisor",
    **dict.fromkeys(("sin", "cos", "tan"), "cuDNN's lose more digits the larger the angle is: 3 are left of 1e4"),
    "gen_index": "the axis is lost when dims are merged to the frame",
    "elu_backward": "cuDNN's takes no alpha",
    "batch_norm": "cuDNN has no engine for inference batch norm; fold it or decompose it",
    "group_norm": "cuDNN normalises whole channels only",
    "lrn": "cuDNN graphs have no local response norm",
    "max_pool": "the cuDNN frontend's Python binding has no resample operation",
    "avg_pool": "the cuDNN frontend's Python binding has no resample operation",
    "rotary": _MOVES,
    "softmax": "a reduction may not feed another op of the same cuDNN graph",
    **dict.fromkeys(("reshape", "transpose", "relayout"), "a view; it becomes strides where no copy is needed"),
    **dict.fromkeys(("expand", "concat", "split", "slice", "pad", "gather"), _MOVES),
    "resize": "cuDNN plans no upsampling",
    "top_k": "cuDNN graphs cannot sort",
    "scatter": _MOVES,
    "cumulate": "cuDNN graphs have no running sums",
    "max_pool_backward": "the cuDNN frontend's Python binding has no resample operation",
    **dict.fromkeys(
        ("batch_norm_train", "batch_norm_by_sums", "batch_norm_backward", "layer_norm_backward"),
        "an operation with several results is not lowered",
    ),
    "random_bits": "cuDNN's random numbers are no function of a state that the graph carries",
    "all_finite": "a cuDNN graph reduces one tensor",
}
