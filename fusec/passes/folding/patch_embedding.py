"""Replace convolutions whose windows are patches of an image of few channels by matmuls of the patches.

Tensor cores take channels in eights, so a convolution of three leaves most of them idle. A matmul sums over the whole
patch. benchmarks/models/ablation.py measures the gain for the first layer of ViT-B/16.
"""

from __future__ import annotations

import math

import numpy as np

from fusec.ir import Array, Graph, Node, TensorType, Value, channels_last
from fusec.ops import Cast, Conv, MatMul, Reshape, Transpose, pw
from fusec.passes.base import Options, RulePass
from fusec.passes.layout.io_layout import set_input_orders
from fusec.passes.rewriting.computations import recorded
from fusec.passes.rewriting.derived_constants import derive
from fusec.passes.rewriting.rewriter import NoMatch, local, made_by, only_operand, single_use

_FEW_CHANNELS = 4  # half of the eight that tensor cores take
_ENOUGH_TAPS = 32  # of the matrix product
# Of the image, because there is one more launch. Images of models are larger, whatever the GPU.
_ENOUGH_ELEMENTS = 1 << 16


@recorded
def _columns(weight: Array) -> Array:
    """Reshape filters to the columns of a matrix."""
    return np.ascontiguousarray(weight.reshape(weight.shape[0], -1).T)


@recorded
def _columns_channels_last(weight: Array) -> Array:
    """Reshape filters to columns for patches whose channels are last."""
    return _columns(weight.transpose(0, 2, 3, 1))


def _is_channels_last(value: Value) -> bool:
    """Tell if the caller gives an image channels last, so that a patch is read by whole pixels."""
    while made_by(value, Cast):
        value = only_operand(value)
    return value.node is None and value.type.order == channels_last(4)


@local("conv", "add", equation="conv(x, w) + b = patches(x) @ w + b, windows side by side without overlap")
def _cut_into_patches(graph: Graph, node: Node) -> Value | None:
    """Replace a convolution whose windows are patches by a matmul of the patches."""
    conv, bias = _parts(node)
    x, w = conv.operands
    op, literal = conv.op, w.literal
    if not isinstance(op, Conv) or x.type.rank != 4 or x.type.shape[1] > _FEW_CHANNELS or op.groups != 1:
        raise NoMatch("no image of few channels", x)
    if literal is None:
        raise NoMatch("the filters are not constant", w)
    (n, c, high, wide), (filters, _, *window) = x.type.shape, w.type.shape
    if tuple(window) != op.strides or any(op.pads) or set(op.dilations) != {1} or high % window[0] or wide % window[1]:
        raise NoMatch("its windows are no patches", conv.result)
    taps = c * math.prod(window)
    if x.type.dtype.itemsize != 2 or x.type.size < _ENOUGH_ELEMENTS or taps < _ENOUGH_TAPS:
        raise NoMatch("too small to gain from it", x)
    # because a convolution fuses better with other ops
    if not single_use(node.result) or not isinstance(node.result.users[0].op, (Reshape, Transpose)):
        raise NoMatch("the next op does not read rows", node.result)
    rows, columns = high // window[0], wide // window[1]
    split = graph.insert(Reshape((n, c, rows, window[0], columns, window[1])), [x], before=node).result
    last = _is_channels_last(x)
    gathered = graph.insert(Transpose((0, 2, 4, 3, 5, 1) if last else (0, 2, 4, 1, 3, 5)), [split], before=node).result
    patches = graph.insert(Reshape((n, rows * columns, taps)), [gathered], before=node).result

    matrix_type = TensorType((taps, filters), w.type.dtype)
    matrix = derive(graph, conv, matrix_type, (literal,), _columns_channels_last if last else _columns, literal)
    product = graph.insert(MatMul(), [patches, matrix], before=node).result
    if bias is not None:
        row = graph.insert(Reshape((filters,)), [bias], before=node).result
        product = graph.insert(pw("add"), [product, row], before=node).result
    spread = graph.insert(Reshape((n, rows, columns, filters)), [product], before=node).result
    graph.set_type(node.result, node.result.type.with_order(()))  # because the matmul writes rows
    return graph.add(Transpose((0, 3, 1, 2)), spread, before=node)


def _parts(node: Node) -> tuple[Node, Value | None]:
    """Return a convolution and the bias that is added to its result, if there is one.

    Raises NoMatch: at a convolution whose bias follows, because the rule then matches at the bias.
    """
    if node.op.name == "conv":
        if single_use(node.result) and _is_bias(node.result.users[0], node.result):
            raise NoMatch("its bias follows, where the rule matches instead", node.result)
        return node, None
    for value, bias in (node.operands, node.operands[::-1]):
        if value.node is not None and made_by(value, Conv) and single_use(value) and _is_bias(node, value):
            return value.node, bias
    raise NoMatch("no bias of a convolution", node.result)


def _is_bias(node: Node, value: Value) -> bool:
    """Tell if a node adds one number per channel to a value."""
    if node.op.name != "add" or len(set(node.operands)) != 2:
        return False
    other = next(v for v in node.operands if v is not value)
    channels, shape = value.type.shape[1], (1,) * (value.type.rank - other.type.rank) + other.type.shape
    return len(shape) == value.type.rank and shape == (1, channels, *(1,) * (value.type.rank - 2))


class PatchEmbedding(RulePass):
    """Replace patch convolutions by matmuls."""

    name = "patch_embedding"
    rules = (_cut_into_patches,)

    def run(self, graph: Graph, options: Options) -> None:
        set_input_orders(graph, options)
        super().run(graph, options)
