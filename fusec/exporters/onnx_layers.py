"""Export convolutions, attention, pools, norms and reductions."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fusec.errors import LoweringError
from fusec.exporters.onnx_emit import Export, Exporter, cast_to, formula, operator
from fusec.ir import DType, Node, print_node


def _conv(e: Exporter, node: Node, x: list[str]) -> list[str]:
    a = dict(node.op.attributes)
    a["group"] = a.pop("groups")
    kind = "ConvTranspose" if node.op.name == "conv_transpose" else "Conv"
    if node.results[0].type.dtype is DType.I32:
        kind = "ConvInteger"
    return [e.op(kind, *x, kernel_shape=node.operands[1].type.shape[2:], **a)]


def _flipped_conv(e: Exporter, node: Node, x: list[str]) -> list[str]:
    """Export a convolution with reversed filters: ONNX's Slice runs backwards to an end before the first element."""
    n = node.operands[1].type.rank - 2
    before_first, axes = e.ints([-(1 << 63)] * n), e.ints(range(2, 2 + n))
    return _conv(e, node, [x[0], e.op("Slice", x[1], e.ints([-1] * n), before_first, axes, e.ints([-1] * n))])


def _matmul(e: Exporter, node: Node, x: list[str]) -> list[str]:
    dtype = node.operands[0].type.dtype
    if dtype is DType.F8E4M3:
        return [e.op("MatMul", *(cast_to(e, each, dtype, DType.F32) for each in x))]
    return [e.op("MatMulInteger" if dtype is DType.I8 else "MatMul", *x)]


def _packed_matmul(e: Exporter, node: Node, x: str, codes: str, scales: str, *zeros: str) -> str:
    """Dequantise the weights in fp32, and multiply in fp32: the weights are not rounded to the type of x."""
    own, block = node.operands[0].type.dtype, node.op.attributes["block"]
    computed = DType.F64 if own is DType.F64 else DType.F32
    if node.operands[2].type.dtype is DType.F64:
        raise LoweringError(f"{print_node(node)}: ONNX has no scales of 64 bits; cast them to f32")
    scales = cast_to(e, scales, node.operands[2].type.dtype, DType.F32)
    columns, blocks = node.operands[2].type.shape
    if blocks == 1:
        factors = [e.op("Reshape", v, e.ints((columns,)), allowzero=1) for v in (scales, *zeros)]
        weights = e.op("DequantizeLinear", codes, *factors, axis=0)
    else:
        weights = e.op("DequantizeLinear", codes, scales, *zeros, axis=1, block_size=block)
    weights = e.op("Transpose", cast_to(e, weights, DType.F32, computed), perm=(1, 0))
    return cast_to(e, e.op("MatMul", cast_to(e, x, own, computed), weights), computed, own)


def _attention(e: Exporter, node: Node, q: str, k: str, v: str, bias: str = "") -> str:
    """Export attention as products and a softmax, and return the name of the result."""
    (b, h, s, d), (_, g, t, _) = (x.type.shape for x in node.operands[:2])
    a = node.op.attributes
    if h != g:
        q = e.op("Reshape", q, e.ints((b, g, h // g, s, d)), allowzero=1)
        k, v = (e.op("Unsqueeze", x, e.ints((2,))) for x in (k, v))
    swapped = (*range(2 + (h != g)), 3 + (h != g), 2 + (h != g))
    scores = e.op("Mul", e.op("MatMul", q, e.op("Transpose", k, perm=swapped)), e.number(a["scale"], node))
    if h != g:
        scores = e.op("Reshape", scores, e.ints((b, h, s, t)), allowzero=1)
    masks = [bias] if bias else []
    if a["causal"]:
        later = np.arange(t)[None, :] > np.arange(s)[:, None]
        masks.append(
            e.initializer(np.where(later, -np.inf, 0.0).astype(node.operands[0].type.dtype.numpy), e.fresh("const"))
        )
    for mask in masks:
        added = e.op("Add", scores, mask)
        if a["hides"]:
            hidden = e.op("Equal", mask, e.number(-math.inf, node))
            added = e.op("Where", hidden, mask, added)
        scores = added
    weights = e.op("Softmax", scores, axis=-1) if t else scores
    if a["guarded"]:
        weights = e.op("Where", e.op("IsNaN", weights), e.number(0.0, node), weights)
    if h == g:
        return e.op("MatMul", weights, v)
    weights = e.op("Reshape", weights, e.ints((b, g, h // g, s, t)), allowzero=1)
    return e.op("Reshape", e.op("MatMul", weights, v), e.ints(node.result.type.shape), allowzero=1)


def _rotary(e: Exporter, node: Node, x: str, cos: str, sin: str) -> str:
    width = node.result.type.shape[-1]
    first, second = e.several("Split", [x], 2, {"axis": -1, "num_outputs": 2}) if width else (x, x)
    swapped = e.op("Concat", e.op("Neg", second), first, axis=-1)
    return e.op("Add", e.op("Mul", x, cos), e.op("Mul", swapped, sin))


def _pool(kind: str) -> Export:
    def export(e: Exporter, node: Node, x: list[str]) -> list[str]:
        a = dict(node.op.attributes)
        return [e.op(kind, *x, kernel_shape=a.pop("window"), **a)]

    return export


def _rms_norm(e: Exporter, node: Node, x: str, scale: str) -> str:
    rank, axis = node.operands[0].type.rank, node.op.attributes["axis"]
    if node.operands[0].type.size == 0:  # because ONNX refuses a mean of no elements
        return e.op("Identity", x)
    axes = e.ints(range(axis % rank, rank))
    mean = e.op("ReduceMean", e.op("Mul", x, x), axes, keepdims=1)
    root = e.op("Sqrt", e.op("Add", mean, e.number(node.op.attributes["epsilon"], node)))
    return e.op("Mul", e.op("Div", x, root), scale)


_REDUCTIONS = {
    "sum": "ReduceSum",
    "mean": "ReduceMean",
    "max": "ReduceMax",
    "min": "ReduceMin",
    "prod": "ReduceProd",
    "l1": "ReduceL1",
    "l2": "ReduceL2",
    "sum_square": "ReduceSumSquare",
    "log_sum": "ReduceLogSum",
    "log_sum_exp": "ReduceLogSumExp",
}


def _reduce(e: Exporter, node: Node, x: str) -> str:
    a = node.op.attributes
    if a["axes"]:
        return e.op(_REDUCTIONS[a["kind"]], x, e.ints(a["axes"]), keepdims=int(a["keepdims"]))
    match a["kind"]:  # to ONNX, an empty list of axes means all axes
        case "l1" | "l2":
            return e.op("Abs", x)
        case "sum_square":
            return e.op("Mul", x, x)
        case "log_sum":
            return e.op("Log", x)
        case _:
            return e.op("Identity", x)


def _softmax(e: Exporter, node: Node, x: str) -> str:
    return e.op("LogSoftmax" if node.op.attributes["log"] else "Softmax", x, axis=node.op.attributes["axis"])


LAYERS: Mapping[str, Export] = {
    "conv": _conv,
    "conv_flipped": _flipped_conv,
    "conv_transpose": _conv,
    "attention": formula(_attention),
    "rotary": formula(_rotary),
    "batch_norm": operator("BatchNormalization", "epsilon"),
    "instance_norm": operator("InstanceNormalization", "epsilon"),
    "group_norm": lambda e, node, x: [
        e.op("GroupNormalization", *x, num_groups=node.op.attributes["groups"], epsilon=node.op.attributes["epsilon"])
    ],
    "layer_norm": operator("LayerNormalization", "axis", "epsilon"),
    "rms_norm": formula(_rms_norm),
    "matmul": _matmul,
    "packed_matmul": formula(_packed_matmul),
    "lrn": operator("LRN", "size", "alpha", "beta", "bias"),
    "max_pool": _pool("MaxPool"),
    "avg_pool": _pool("AveragePool"),
    "reduce": formula(_reduce),
    "softmax": formula(_softmax),
}
