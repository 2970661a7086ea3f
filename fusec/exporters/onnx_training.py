"""Export the ops of training, each as several operators, because ONNX has none for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from onnx import TensorProto

from fusec.errors import LoweringError
from fusec.exporters.onnx_emit import Export, Exporter, cast_to, formula
from fusec.exporters.onnx_max_pools import max_pool_train, pool_gradient
from fusec.ir import DType, HostArray, Node, TensorType, Value, print_node


def filter_gradient(e: Exporter, node: Node, x: str, dy: str) -> str:
    """Export conv_wgrad as a convolution whose images are channels, with strides and dilations exchanged."""
    image, loss = (v.type.shape for v in node.operands)
    a, n = node.op.attributes, len(image) - 2
    groups, batch, spatial = a["groups"], image[0], range(3, 3 + n)
    split = e.op("Reshape", x, e.ints([batch, groups, image[1] // groups, *image[2:]]))
    channels_first = e.op("Transpose", split, perm=[2, 1, 0, *spatial])
    images = e.op("Reshape", channels_first, e.ints([image[1] // groups, groups * batch, *image[2:]]))
    filters = e.op("Transpose", dy, perm=[1, 0, *range(2, 2 + n)])
    attributes = {"strides": a["dilations"], "dilations": a["strides"], "pads": a["pads"], "group": groups}
    found = e.op("Conv", images, filters, kernel_shape=loss[2:], **attributes)
    axes = e.ints(range(2, 2 + n))
    window = e.op("Slice", found, e.ints([0] * n), e.ints(a["window"]), axes)
    return e.op("Transpose", window, perm=[1, 0, *range(2, 2 + n)])


def batch_norm_train(e: Exporter, node: Node, operands: list[str]) -> list[str]:
    """Export batch_norm_train by ReduceMean. 16-bit images with fp32 parameters are computed in fp32."""
    stats = _Statistics(e, node.operands[0].type, node.operands[1].type.dtype)
    x, scale, bias = (stats.wide(v) for v in operands)
    mean = stats.mean(x)
    centred = e.op("Sub", x, mean)
    variance = stats.mean(e.op("Mul", centred, centred))
    shifted = e.op("Add", variance, e.number(node.op.attributes["epsilon"], node, 1))
    inverse = e.op("Reciprocal", e.op("Sqrt", shifted))
    scaled = e.op("Mul", centred, e.op("Mul", inverse, stats.channels(scale)))
    y = e.op("Add", scaled, stats.channels(bias))
    return [stats.narrow(y), stats.flat(mean), stats.flat(inverse)]


def channel_sums(e: Exporter, node: Node, operands: list[str]) -> list[str]:
    stats = _Statistics(e, node.operands[0].type, node.results[0].type.dtype)
    x = stats.wide(operands[0])
    return [stats.flat(stats.sum(v)) for v in (x, e.op("Mul", x, x))]


def batch_norm_by_sums(e: Exporter, node: Node, operands: list[str]) -> list[str]:
    """Export batch_norm_by_sums like batch_norm_train. 16-bit images are always computed in fp32."""
    shape, computed = node.operands[0].type.shape, node.operands[3].type.dtype
    stats = _Statistics(e, node.operands[0].type, computed)
    types = [v.type.dtype for v in node.operands[:3]]
    image, factor, shift = (cast_to(e, name, dtype, computed) for name, dtype in zip(operands, types, strict=False))
    count = e.number(math.prod(shape) // shape[1], node, 3)
    mean, squares = (e.op("Div", stats.channels(v), count) for v in operands[3:])
    spread = e.op("Relu", e.op("Sub", squares, e.op("Mul", mean, mean)))
    shifted = e.op("Add", spread, e.number(node.op.attributes["epsilon"], node, 3))
    inverse = e.op("Reciprocal", e.op("Sqrt", shifted))
    scaled = e.op("Mul", e.op("Sub", image, mean), e.op("Mul", inverse, stats.channels(factor)))
    results = [e.op("Add", scaled, stats.channels(shift)), stats.flat(mean), stats.flat(inverse)]
    return [cast_to(e, name, computed, v.type.dtype) for name, v in zip(results, node.results, strict=True)]


def batch_norm_backward(e: Exporter, node: Node, operands: list[str]) -> list[str]:
    stats = _Statistics(e, node.operands[1].type, node.operands[2].type.dtype)
    dy, x, *parameters = (stats.wide(v) for v in operands)
    scale, mean, inverse, *bias = (stats.channels(v) for v in parameters)
    normal = e.op("Mul", e.op("Sub", x, mean), inverse)
    for shift in bias:
        y = stats.narrow(e.op("Add", e.op("Mul", normal, scale), shift))
        passed = e.op("Greater", y, e.number(0.0, node, 1))
        dy = e.op("Where", passed, dy, e.number(0.0, node, 2))
    product = e.op("Mul", dy, normal)
    inner = e.op("Sub", e.op("Sub", dy, stats.mean(dy)), e.op("Mul", normal, stats.mean(product)))
    dx = e.op("Mul", inner, e.op("Mul", scale, inverse))
    return [stats.narrow(dx), stats.flat(stats.sum(product)), stats.flat(stats.sum(dy))]


class _Widened:
    """Casts of an op whose values are stored in one dtype and computed in another."""

    def __init__(self, e: Exporter, stored: DType, computed: DType):
        self.e = e
        self.stored, self.computed = stored, computed

    def wide(self, x: str) -> str:
        return cast_to(self.e, x, self.stored, self.computed)

    def narrow(self, x: str) -> str:
        return cast_to(self.e, x, self.computed, self.stored)


class _Statistics(_Widened):
    """Reductions of an image over all axes but the channels."""

    def __init__(self, e: Exporter, image: TensorType, computed: DType):
        super().__init__(e, image.dtype, computed)
        self.shape = image.shape
        self.axes = [0, *range(2, image.rank)]

    def mean(self, x: str) -> str:
        return self.e.op("ReduceMean", x, self.e.ints(self.axes), keepdims=1)

    def sum(self, x: str) -> str:
        return self.e.op("ReduceSum", x, self.e.ints(self.axes), keepdims=1)

    def channels(self, v: str) -> str:
        return self.e.op("Reshape", v, self.e.ints([1, self.shape[1], *([1] * (len(self.shape) - 2))]))

    def flat(self, v: str) -> str:
        return self.e.op("Reshape", v, self.e.ints([self.shape[1]]))


def layer_norm_backward(e: Exporter, node: Node, operands: list[str]) -> list[str]:
    """Export layer_norm_backward. 16-bit rows with an fp32 scale are computed in fp32."""
    shape, op = node.operands[1].type.shape, node.op
    stats = _Statistics(e, node.operands[1].type, node.operands[2].type.dtype)
    dy, x, scale = (stats.wide(v) for v in operands)
    first = op.attributes["axis"] % len(shape)
    stats.axes = list(range(first, len(shape)))
    centred = e.op("Sub", x, stats.mean(x)) if op.attributes["centred"] else x
    variance = stats.mean(e.op("Mul", centred, centred))
    shifted = e.op("Add", variance, e.number(op.attributes["epsilon"], node, 2))
    normal = e.op("Div", centred, e.op("Sqrt", shifted))
    inner = e.op("Mul", dy, scale)
    along = e.op("Mul", normal, stats.mean(e.op("Mul", inner, normal)))
    if op.attributes["centred"]:
        along = e.op("Add", along, stats.mean(inner))
    dx = e.op("Div", e.op("Sub", inner, along), e.op("Sqrt", shifted))
    sums = [e.op("Mul", dy, normal), dy][: 2 if op.attributes["centred"] else 1]
    if first:
        rows = e.ints(list(range(first)))
        sums = [e.op("ReduceSum", v, rows, keepdims=0) for v in sums]
    return [stats.narrow(dx), *sums]


def random_bits(e: Exporter, node: Node, operands: list[str]) -> list[str]:
    """Raise LoweringError, because ONNX's random operators have no state."""
    raise LoweringError(f"{print_node(node)}: ONNX has no random bits that follow from a state")


def attention_train(e: Exporter, node: Node, operands: list[str]) -> list[str]:
    heads = _Heads(e, node, node.operands[:3])
    q, k, v, *bias = (heads.wide(x) for x in operands)
    scores = heads.scores(q, k, bias)
    sums = e.op("ReduceLogSumExp", scores, e.ints([3]), keepdims=1)
    weights = e.op("Softmax", scores, axis=3)  # exp(scores - sums) would lose the digits of a large sum
    return [heads.narrow(e.op("MatMul", weights, heads.repeated(v))), sums]


def attention_backward(e: Exporter, node: Node, operands: list[str]) -> list[str]:
    heads = _Heads(e, node, node.operands[1:4])
    dy, q, k, v, y, sums, *bias = (heads.wide(x) for x in operands)
    weights = e.op("Exp", e.op("Sub", heads.scores(q, k, bias), sums))
    along = e.op("ReduceSum", e.op("Mul", dy, y), e.ints([3]), keepdims=1)
    slopes = e.op("Sub", e.op("MatMul", dy, heads.transposed(heads.repeated(v))), along)
    slopes = e.op("Mul", e.op("Mul", weights, slopes), heads.number(node.op.attributes["scale"]))
    dk, dv = e.op("MatMul", heads.transposed(slopes), q), e.op("MatMul", heads.transposed(weights), dy)
    found = e.op("MatMul", slopes, heads.repeated(k)), heads.summed(dk), heads.summed(dv)
    return [heads.narrow(x) for x in found]


class _Heads(_Widened):
    """Products of attention, computed in f32 (or f64). Heads of keys and values are repeated for the queries."""

    def __init__(self, e: Exporter, node: Node, operands: Sequence[Value]):
        self.node = node
        self.q, self.k, _ = (v.type for v in operands)
        super().__init__(e, self.q.dtype, DType.F32 if self.q.dtype.itemsize == 2 else self.q.dtype)

    def number(self, value: float | HostArray) -> str:
        return self.e.initializer(np.asarray(value).astype(self.computed.numpy), self.e.fresh("c"))

    def transposed(self, x: str) -> str:
        return self.e.op("Transpose", x, perm=[0, 1, 3, 2])

    def repeated(self, x: str) -> str:
        """Repeat each head of keys or values for the query heads that share it."""
        times = self.q.shape[1] // self.k.shape[1]
        return x if times == 1 else self.e.op("Gather", x, self.e.ints(np.arange(self.q.shape[1]) // times), axis=1)

    def summed(self, x: str) -> str:
        """Add up the heads that `repeated` made of one head."""
        times = self.q.shape[1] // self.k.shape[1]
        if times == 1:
            return x
        split = self.e.op("Reshape", x, self.e.ints([0, self.k.shape[1], times, self.k.shape[2], -1]))
        return self.e.op("ReduceSum", split, self.e.ints([2]), keepdims=0)

    def scores(self, q: str, k: str, bias: Sequence[str]) -> str:
        a = self.node.op.attributes
        product = self.e.op("MatMul", q, self.transposed(self.repeated(k)))
        scores = self.e.op("Mul", product, self.number(a["scale"]))
        if a["causal"]:
            later = np.arange(self.k.shape[2])[None, :] > np.arange(self.q.shape[2])[:, None]
            bias = [*bias, self.number(np.where(later, -np.inf, 0.0))]
        for mask in bias:
            scores = self.e.op("Add", scores, mask)
        return scores


def all_finite(e: Exporter, node: Node, operands: list[str]) -> list[str]:
    """Export all_finite: x - x equals itself for a finite x, and is NaN for any other."""
    found: list[str] = []
    for x in operands:
        rest = e.op("Sub", x, x)
        ones = e.op("Cast", e.op("Equal", rest, rest), to=TensorProto.INT32)
        one = e.initializer(np.array(1, np.int32), e.fresh("const"))  # limits the minimum of no elements
        least = e.op("Min", e.op("ReduceMin", e.op("Reshape", ones, e.ints([-1])), keepdims=0), one)
        found.append(e.op("Cast", least, to=TensorProto.BOOL))
    while len(found) > 1:
        found = [e.op("And", found[0], found[1]), *found[2:]]
    return [e.op("Reshape", found[0], e.ints([]))]


TRAINING: Mapping[str, Export] = {
    "conv_wgrad": formula(filter_gradient),
    "max_pool_train": max_pool_train,
    "max_pool_backward": formula(pool_gradient),
    "batch_norm_train": batch_norm_train,
    "channel_sums": channel_sums,
    "batch_norm_by_sums": batch_norm_by_sums,
    "batch_norm_backward": batch_norm_backward,
    "layer_norm_backward": layer_norm_backward,
    "random_bits": random_bits,
    "all_finite": all_finite,
    "attention_train": attention_train,
    "attention_backward": attention_backward,
}
