"""A graph as an ONNX model: every op is an ONNX operator, or a few of them of the same meaning.

Memory orders are left out, since ONNX has none; float attributes are rounded to 32 bits, as ONNX keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from fusec.errors import LoweringError
from fusec.exporters import onnx_training
from fusec.ir import Constant, DType, Graph, Node, print_node
from fusec.ops import Resize

Array = np.ndarray[Any, Any]
OPSET = 21  # GroupNormalization with a scale per channel, Gelu, AveragePool with dilations
IR_VERSION = 10

TYPES: Mapping[DType, int] = {
    DType.F64: TensorProto.DOUBLE,
    DType.F32: TensorProto.FLOAT,
    DType.F16: TensorProto.FLOAT16,
    DType.BF16: TensorProto.BFLOAT16,
    DType.I64: TensorProto.INT64,
    DType.I32: TensorProto.INT32,
    DType.I16: TensorProto.INT16,
    DType.I8: TensorProto.INT8,
    DType.U64: TensorProto.UINT64,
    DType.U32: TensorProto.UINT32,
    DType.U16: TensorProto.UINT16,
    DType.U8: TensorProto.UINT8,
    DType.BOOL: TensorProto.BOOL,
    DType.F8E4M3: TensorProto.FLOAT8E4M3FN,
    DType.F8E4M3FNUZ: TensorProto.FLOAT8E4M3FNUZ,
    DType.F8E5M2: TensorProto.FLOAT8E5M2,
    DType.F8E5M2FNUZ: TensorProto.FLOAT8E5M2FNUZ,
    DType.F8E8M0: TensorProto.FLOAT8E8M0,
    DType.F4E2M1: TensorProto.FLOAT4E2M1,
    DType.I4: TensorProto.INT4,
    DType.U4: TensorProto.UINT4,
    DType.I2: TensorProto.INT2,
    DType.U2: TensorProto.UINT2,
}


Notes = Mapping[Node, Mapping[str, str]]


def to_onnx(graph: Graph, notes: Notes | None = None, properties: Mapping[str, str] | None = None) -> ModelProto:
    """The graph as a model of opset 21, with the same inputs and outputs; `frontends.load` reads it back.

    notes: what is written into the metadata of the operators that a node becomes; with it these get names, and values
    their types. properties: metadata of the model.

    Constants become initializers, values keep their names where no output has them. LoweringError where ONNX has
    nothing of the meaning: a linear resize whose sizes do not follow from its scales, random bits.
    """
    return _Exporter(graph, notes or {}).model(properties or {})


class _Exporter:
    def __init__(self, graph: Graph, notes: Notes):
        self.graph = graph
        self.notes = notes
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.taken = {*graph.output_names, *(v.name for v in graph.inputs)}
        self.names: dict[Any, str] = {v: v.name for v in graph.inputs}
        for name, value in zip(graph.output_names, graph.outputs, strict=True):
            made = value.node is not None and value.literal is None
            if made and value not in self.names and name not in (v.name for v in graph.inputs):
                self.names[value] = name

    def model(self, properties: Mapping[str, str]) -> ModelProto:
        graph = self.graph
        for node in graph.nodes:
            self._export(node)
        outputs: list[Any] = []
        for name, value in zip(graph.output_names, graph.outputs, strict=True):
            if self.names[value] != name:
                self.nodes.append(helper.make_node("Identity", [self.names[value]], [name]))
            outputs.append(helper.make_tensor_value_info(name, TYPES[value.type.dtype], value.type.shape))
        inputs = [helper.make_tensor_value_info(v.name, TYPES[v.type.dtype], v.type.shape) for v in graph.inputs]
        made = helper.make_graph(self.nodes, graph.name or "graph", inputs, outputs, self.initializers)
        model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="fusec")
        model.ir_version = IR_VERSION
        helper.set_model_props(model, dict(properties))
        if self.notes:
            known = {v.name for v in (*inputs, *outputs)}
            values = {self.names[v]: v.type for v in graph.values() if v.literal is None and v in self.names}
            model.graph.value_info.extend(
                helper.make_tensor_value_info(name, TYPES[type.dtype], type.shape)
                for name, type in values.items()
                if name not in known
            )
        return model

    def _export(self, node: Node) -> None:
        for value in node.results:
            if value not in self.names:
                self.names[value] = self.fresh(value.name)
        if isinstance(node.op, Constant):
            self.initializer(node.op.literal.array, self.names[node.result])
            return
        first = len(self.nodes)
        results = EXPORT[node.op.name](self, node, [self.names[v] for v in node.operands])
        # the nodes that gave the results get their names; a result that is no node's goes through Identity
        renamed = dict(zip(results, (self.names[v] for v in node.results), strict=True))
        made = {name for n in self.nodes[first:] for name in n.output}
        for n in self.nodes[first:]:
            for names in (n.input, n.output):
                for i, name in enumerate(names):
                    if name in made and name in renamed:
                        names[i] = renamed[name]
        for result, name in renamed.items():
            if result not in made:
                self.nodes.append(helper.make_node("Identity", [result], [name]))
        for n in self.nodes[first:] if node in self.notes else ():
            n.name = n.output[0]
            for key, text in self.notes[node].items():
                n.metadata_props.add(key=key, value=text)

    def fresh(self, hint: str) -> str:
        name, count = hint, 0
        while name in self.taken:
            count += 1
            name = f"{hint}_{count}"
        self.taken.add(name)
        return name

    def initializer(self, array: Array, name: str) -> str:
        held = np.ascontiguousarray(array)
        tensor = TensorProto(name=name, data_type=TYPES[DType.of(held.dtype)], dims=array.shape)
        tensor.raw_data = held.tobytes()
        self.initializers.append(tensor)
        return name

    def ints(self, values: Sequence[int]) -> str:
        return self.initializer(np.array(values, np.int64), self.fresh("const"))

    def number(self, value: float, node: Node, operand: int = 0) -> str:
        """A scalar of the dtype of an operand."""
        return self.initializer(np.array(value).astype(node.operands[operand].type.dtype.numpy), self.fresh("const"))

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator with one result; its name."""
        return self.several(kind, inputs, 1, attributes)[0]

    def several(self, kind: str, inputs: Sequence[str], count: int, attributes: Mapping[str, Any]) -> list[str]:
        results = [self.fresh("t") for _ in range(count)]
        self.nodes.append(helper.make_node(kind, inputs, results, **attributes))
        return results


Export = Callable[[_Exporter, Node, list[str]], list[str]]


def _same(kind: str, *keep: str, **fixed: Any) -> Export:
    """An operator of the same operands; `keep` names attributes that both call alike."""

    def export(e: _Exporter, node: Node, x: list[str]) -> list[str]:
        return [e.op(kind, *x, **{k: node.op.attributes[k] for k in keep}, **fixed)]

    return export


def _formula(build: Callable[..., str]) -> Export:
    """A composition: `build(e, node, *operands)`."""
    return lambda e, node, x: [build(e, node, *x)]


# pointwise ---------------------------------------------------------------------------------------------------


def _neg(e: _Exporter, node: Node, x: str) -> str:
    unsigned = node.operands[0].type.dtype.value.startswith("u")
    return e.op("Sub", e.number(0, node), x) if unsigned else e.op("Neg", x)


def _clip(e: _Exporter, node: Node, x: str) -> str:
    low, high = node.op.attributes["min"], node.op.attributes["max"]
    dtype = node.operands[0].type.dtype
    if not dtype.is_float:
        info = np.iinfo(dtype.numpy)
        low = math.ceil(min(max(low, info.min), info.max))
        high = math.floor(min(max(high, info.min), info.max))
    if low > high:
        return e.op("Min", e.op("Max", x, e.number(low, node)), e.number(high, node))
    bounds = [e.number(b, node) if math.isfinite(b) else "" for b in (low, high)]
    if not any(bounds):
        return e.op("Identity", x)
    return e.op("Clip", x, *(bounds if bounds[1] else bounds[:1]))


def _swish(e: _Exporter, node: Node, x: str) -> str:
    beta = node.op.attributes["beta"]
    return e.op("Mul", x, e.op("Sigmoid", x if beta == 1.0 else e.op("Mul", x, e.number(beta, node))))


def _floor_mod(e: _Exporter, node: Node, x: str, y: str) -> str:
    if not node.operands[0].type.dtype.is_float:
        return e.op("Mod", x, y)
    rest, zero = e.op("Mod", x, y, fmod=1), e.number(0.0, node)
    differ = e.op("Xor", e.op("Less", rest, zero), e.op("Less", y, zero))
    wrong = e.op("And", differ, e.op("Not", e.op("Equal", rest, zero)))
    return e.op("Where", wrong, e.op("Add", rest, y), rest)


def _prelu(e: _Exporter, node: Node, x: str, slope: str) -> str:
    if node.result.type.shape == node.operands[0].type.shape:
        return e.op("PRelu", x, slope)
    return e.op("Where", e.op("GreaterOrEqual", x, e.number(0.0, node)), x, e.op("Mul", slope, x))


def _shift(e: _Exporter, node: Node, x: str, y: str) -> str:
    dtype = node.operands[0].type.dtype
    left = node.op.name == "shift_left"
    if dtype.value.startswith("u"):
        return e.op("BitShift", x, y, direction="LEFT" if left else "RIGHT")
    raise LoweringError(f"{print_node(node)}: ONNX shifts unsigned integers only")


def _gen_index(e: _Exporter, node: Node, x: str) -> str:
    (index,) = node.op.reference(np, np.zeros(node.operands[0].type.shape, node.operands[0].type.dtype.numpy))
    return e.initializer(np.asarray(index), e.fresh("index"))


def _positive(e: _Exporter, node: Node, x: str) -> str:
    return e.op("Greater", x, e.number(0.0, node))


def _relu_backward(e: _Exporter, node: Node, dy: str, x: str) -> str:
    return e.op("Where", _positive(e, node, x), dy, e.number(0.0, node))


def _leaky_relu_backward(e: _Exporter, node: Node, dy: str, x: str) -> str:
    return e.op("Where", _positive(e, node, x), dy, e.op("Mul", dy, e.number(node.op.attributes["alpha"], node)))


def _sigmoid_backward(e: _Exporter, node: Node, dy: str, x: str) -> str:
    return e.op("Mul", e.op("Mul", dy, e.op("Sigmoid", x)), e.op("Sigmoid", e.op("Neg", x)))


def _tanh_backward(e: _Exporter, node: Node, dy: str, x: str) -> str:
    cosh = e.op("Cosh", x)
    return e.op("Div", dy, e.op("Mul", cosh, cosh))


def _elu_backward(e: _Exporter, node: Node, dy: str, x: str) -> str:
    below = e.op("Mul", dy, e.op("Exp", e.op("Min", x, e.number(0.0, node))))
    return e.op("Where", _positive(e, node, x), dy, e.op("Mul", below, e.number(node.op.attributes["alpha"], node)))


def _swish_backward(e: _Exporter, node: Node, dy: str, x: str) -> str:
    z = e.op("Mul", x, e.number(node.op.attributes["beta"], node))
    z = e.op("Clip", z, e.number(-800.0, node), e.number(800.0, node))
    slope = e.op("Add", e.op("Mul", z, e.op("Sigmoid", e.op("Neg", z))), e.number(1.0, node))
    return e.op("Mul", e.op("Mul", dy, e.op("Sigmoid", z)), slope)


def _limited(e: _Exporter, node: Node, x: str) -> str:
    """The gradients of gelu are 0 or 1 beyond 40, and no square overflows before."""
    return e.op("Clip", x, e.number(-40.0, node), e.number(40.0, node))


def _gelu_backward(e: _Exporter, node: Node, dy: str, x: str) -> str:
    x = _limited(e, node, x)
    erf = e.op("Erf", e.op("Mul", x, e.number(math.sqrt(0.5), node)))
    cdf = e.op("Mul", e.op("Add", erf, e.number(1.0, node)), e.number(0.5, node))
    bell = e.op("Exp", e.op("Mul", e.op("Mul", x, x), e.number(-0.5, node)))
    density = e.op("Mul", bell, e.number(1.0 / math.sqrt(2.0 * math.pi), node))
    return e.op("Mul", dy, e.op("Add", cdf, e.op("Mul", x, density)))


def _gelu_tanh_backward(e: _Exporter, node: Node, dy: str, x: str) -> str:
    x, c = _limited(e, node, x), 2.0 * math.sqrt(2.0 / math.pi)
    square = e.op("Mul", x, x)
    inner = e.op("Mul", x, e.op("Add", e.op("Mul", square, e.number(0.044715 * c, node)), e.number(c, node)))
    slope = e.op("Add", e.op("Mul", square, e.number(3 * 0.044715 * c, node)), e.number(c, node))
    rest = e.op("Mul", e.op("Mul", x, slope), e.op("Sigmoid", e.op("Neg", inner)))
    return e.op("Mul", e.op("Mul", dy, e.op("Sigmoid", inner)), e.op("Add", rest, e.number(1.0, node)))


# attention, windows and norms ----------------------------------------------------------------------------------------


def _conv(e: _Exporter, node: Node, x: list[str]) -> list[str]:
    a = dict(node.op.attributes)
    a["group"] = a.pop("groups")
    kind = "ConvTranspose" if node.op.name == "conv_transpose" else "Conv"
    return [e.op(kind, *x, kernel_shape=node.operands[1].type.shape[2:], **a)]


def _attention(e: _Exporter, node: Node, q: str, k: str, v: str, bias: str = "") -> str:
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


def _rotary(e: _Exporter, node: Node, x: str, cos: str, sin: str) -> str:
    width = node.result.type.shape[-1]
    first, second = e.several("Split", [x], 2, {"axis": -1, "num_outputs": 2}) if width else (x, x)
    turned = e.op("Concat", e.op("Neg", second), first, axis=-1)
    return e.op("Add", e.op("Mul", x, cos), e.op("Mul", turned, sin))


def _pool(kind: str) -> Export:
    def export(e: _Exporter, node: Node, x: list[str]) -> list[str]:
        a = {k: int(v) if isinstance(v, bool) else v for k, v in node.op.attributes.items()}
        return [e.op(kind, *x, kernel_shape=a.pop("window"), **a)]

    return export


def _rms_norm(e: _Exporter, node: Node, x: str, scale: str) -> str:
    rank, axis = node.operands[0].type.rank, node.op.attributes["axis"]
    if node.operands[0].type.size == 0:  # the mean of nothing is refused
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


def _reduce(e: _Exporter, node: Node, x: str) -> str:
    a = node.op.attributes
    if a["axes"]:
        return e.op(_REDUCTIONS[a["kind"]], x, e.ints(a["axes"]), keepdims=int(a["keepdims"]))
    match a["kind"]:  # no axes mean all of them to ONNX
        case "l1" | "l2":
            return e.op("Abs", x)
        case "sum_square":
            return e.op("Mul", x, x)
        case "log_sum":
            return e.op("Log", x)
        case _:
            return e.op("Identity", x)


# shapes ----------------------------------------------------------------------------------------------------------


def _slice(e: _Exporter, node: Node, x: str) -> str:
    a = node.op.attributes
    ends = [start + size * step for start, size, step in zip(a["starts"], a["sizes"], a["steps"], strict=True)]
    starts = [start if size else 0 for start, size in zip(a["starts"], a["sizes"], strict=True)]
    # an end below zero would count from the back
    ends = [(end if end >= 0 else -(2**62)) if size else 0 for end, size in zip(ends, a["sizes"], strict=True)]
    steps = [step if size else 1 for step, size in zip(a["steps"], a["sizes"], strict=True)]
    return e.op("Slice", x, e.ints(starts), e.ints(ends), e.ints(range(len(starts))), e.ints(steps))


def _pad(e: _Exporter, node: Node, x: str) -> str:
    a = node.op.attributes
    if not a["pads"]:
        return e.op("Identity", x)
    value = [e.number(a["value"], node)] if a["mode"] == "constant" else []
    return e.op("Pad", x, e.ints(a["pads"]), *value, mode=a["mode"])


def _resize(e: _Exporter, node: Node, x: str) -> str:
    """A Resize for the dims whose scale is that of their sizes, and another for those that a scale in 32 bits gives."""
    op, shape = cast(Resize, node.op), node.operands[0].type.shape
    modes = {"mode": op.mode, "coordinate_transformation_mode": op.coordinates, "nearest_mode": op.rounding}
    fixed = op.coordinates == "align_corners"  # the sizes alone decide; ONNX would count a fractional length
    ratio = [fixed or math.isclose(s, n / d, rel_tol=1e-7) for s, n, d in zip(op.scales, op.sizes, shape, strict=True)]
    scales = np.where(ratio, 1.0, op.scales).astype(np.float32)
    sizes = [n if same else d for same, n, d in zip(ratio, op.sizes, shape, strict=True)]
    if sizes != list(shape) or all(ratio):
        x = e.op("Resize", x, "", "", e.ints(sizes), **modes)
    if all(ratio):
        return x
    counted = [math.floor(d * float(s)) for d, s in zip(sizes, scales, strict=True)]
    if counted == list(op.sizes) and all(ratio | (scales == op.scales)):
        return e.op("Resize", x, "", e.initializer(scales, e.fresh("scales")), **modes)
    if op.mode == "linear":
        raise LoweringError(f"{print_node(node)}: ONNX has no Resize whose sizes and scales are these")
    for dim in (d for d, same in enumerate(ratio) if not same):
        x = e.op("Gather", x, e.ints(op.nearest(np, dim, shape[dim])), axis=dim)
    return x


def _top_k(e: _Exporter, node: Node, x: list[str]) -> list[str]:
    a = node.op.attributes
    return e.several("TopK", [*x, e.ints([a["k"]])], 2, {"axis": a["axis"], "largest": int(a["largest"])})


def _scatter(e: _Exporter, node: Node, x: str, indices: str, updates: str) -> str:
    column = e.op("Unsqueeze", e.op("Cast", indices, to=TensorProto.INT64), e.ints([1]))
    return e.op("ScatterND", x, column, updates, reduction=node.op.attributes["reduction"])


def _cumulate(e: _Exporter, node: Node, x: str) -> str:
    """A running product, for which opset 21 has no operator, is a loop's worth of multiplications."""
    axis, kind = node.op.attributes["axis"], node.op.attributes["kind"]
    if kind == "sum":
        return e.op("CumSum", x, e.initializer(np.array(axis, np.int64), e.fresh("axis")))
    size = node.result.type.shape[axis]
    if size < 2:
        return e.op("Identity", x)
    parts = e.several("Split", [x, e.ints([1] * size)], size, {"axis": axis})
    for i in range(1, size):
        parts[i] = e.op("Mul", parts[i - 1], parts[i])
    return e.op("Concat", *parts, axis=axis)


def _split(e: _Exporter, node: Node, x: list[str]) -> list[str]:
    sizes = node.op.attributes["sizes"]
    return e.several("Split", [*x, e.ints(sizes)], len(sizes), {"axis": node.op.attributes["axis"]})


def _softmax(e: _Exporter, node: Node, x: str) -> str:
    return e.op("LogSoftmax" if node.op.attributes["log"] else "Softmax", x, axis=node.op.attributes["axis"])


def _transpose(e: _Exporter, node: Node, x: str) -> str:
    perm = node.op.attributes["perm"]
    return e.op("Transpose", x, perm=perm) if perm else e.op("Identity", x)


# ops that ONNX has under the same name, but for the capital letter
_ALIKE = (
    *("abs", "ceil", "cos", "erf", "exp", "floor", "identity", "log", "relu", "reciprocal", "sigmoid", "sin"),
    *("softplus", "sqrt", "tan", "tanh", "mish", "softsign", "sign", "round", "acos", "asin", "atan", "cosh"),
    *("sinh", "acosh", "asinh", "atanh", "add", "sub", "mul", "div", "where", "max", "min", "pow", "gelu"),
)
# and under another one
_RENAMED = {
    "hard_swish": "HardSwish",
    "logical_not": "Not",
    "logical_and": "And",
    "logical_or": "Or",
    "logical_xor": "Xor",
    "is_nan": "IsNaN",
    "is_inf": "IsInf",
    "cmp_eq": "Equal",
    "cmp_gt": "Greater",
    "cmp_ge": "GreaterOrEqual",
    "cmp_lt": "Less",
    "cmp_le": "LessOrEqual",
    "matmul": "MatMul",
    "relayout": "Identity",
}

EXPORT: Mapping[str, Export] = {
    **{name: _same(name.capitalize()) for name in _ALIKE},
    **{name: _same(kind) for name, kind in _RENAMED.items()},
    "elu": _same("Elu", "alpha"),
    "selu": _same("Selu", "alpha", "gamma"),
    "celu": _same("Celu", "alpha"),
    "leaky_relu": _same("LeakyRelu", "alpha"),
    "thresholded_relu": _same("ThresholdedRelu", "alpha"),
    "hard_sigmoid": _same("HardSigmoid", "alpha", "beta"),
    "gelu_tanh": _same("Gelu", approximate="tanh"),
    "mod": _same("Mod", fmod=1),
    "neg": _formula(_neg),
    "rsqrt": _formula(lambda e, node, x: e.op("Reciprocal", e.op("Sqrt", x))),
    "swish": _formula(_swish),
    "clip": _formula(_clip),
    "gen_index": _formula(_gen_index),
    "add_square": _formula(lambda e, node, x, y: e.op("Add", x, e.op("Mul", y, y))),
    "cmp_neq": _formula(lambda e, node, x, y: e.op("Not", e.op("Equal", x, y))),
    "floor_mod": _formula(_floor_mod),
    "prelu": _formula(_prelu),
    "relu_backward": _formula(_relu_backward),
    "leaky_relu_backward": _formula(_leaky_relu_backward),
    "sigmoid_backward": _formula(_sigmoid_backward),
    "tanh_backward": _formula(_tanh_backward),
    "elu_backward": _formula(_elu_backward),
    "gelu_backward": _formula(_gelu_backward),
    "gelu_tanh_backward": _formula(_gelu_tanh_backward),
    "softplus_backward": _formula(lambda e, node, dy, x: e.op("Mul", dy, e.op("Sigmoid", x))),
    "swish_backward": _formula(_swish_backward),
    "cast": lambda e, node, x: [e.op("Cast", *x, to=TYPES[node.op.attributes["to"]])],
    "conv": _conv,
    "conv_transpose": _conv,
    "attention": _formula(_attention),
    "rotary": _formula(_rotary),
    "batch_norm": _same("BatchNormalization", "epsilon"),
    "instance_norm": _same("InstanceNormalization", "epsilon"),
    "group_norm": lambda e, node, x: [
        e.op("GroupNormalization", *x, num_groups=node.op.attributes["groups"], epsilon=node.op.attributes["epsilon"])
    ],
    "layer_norm": _same("LayerNormalization", "axis", "epsilon"),
    "rms_norm": _formula(_rms_norm),
    "lrn": _same("LRN", "size", "alpha", "beta", "bias"),
    "max_pool": _pool("MaxPool"),
    "avg_pool": _pool("AveragePool"),
    "reduce": _formula(_reduce),
    "softmax": _formula(_softmax),
    "reshape": lambda e, node, x: [e.op("Reshape", *x, e.ints(node.op.attributes["shape"]), allowzero=1)],
    "transpose": _formula(_transpose),
    "expand": lambda e, node, x: [e.op("Expand", *x, e.ints(node.op.attributes["shape"]))],
    "concat": _same("Concat", "axis"),
    "split": _split,
    "slice": _formula(_slice),
    "pad": _formula(_pad),
    "gather": _same("Gather", "axis"),
    "resize": _formula(_resize),
    "bitwise_and": _same("BitwiseAnd"),
    "bitwise_or": _same("BitwiseOr"),
    "bitwise_xor": _same("BitwiseXor"),
    "bitwise_not": _same("BitwiseNot"),
    "shift_left": _formula(_shift),
    "shift_right": _formula(_shift),
    "top_k": _top_k,
    "scatter": _formula(_scatter),
    "cumulate": _formula(_cumulate),
    "conv_wgrad": _formula(onnx_training.filter_gradient),
    "max_pool_backward": _formula(onnx_training.pool_gradient),
    "batch_norm_train": onnx_training.batch_norm_train,
    "batch_norm_backward": onnx_training.batch_norm_backward,
    "layer_norm_backward": onnx_training.layer_norm_backward,
    "random_bits": onnx_training.random_bits,
    "all_finite": onnx_training.all_finite,
    "attention_train": onnx_training.attention_train,
    "attention_backward": onnx_training.attention_backward,
}
