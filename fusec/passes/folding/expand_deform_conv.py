"""Expand deformable convolutions of few windows and deep filters, which the op's kernel runs on few processors.

The kernel splits its work by windows and filters, so that a block adds up all channels. Of few windows with many
channels there are few blocks. The parts are a grid_sample of all elements of all windows, and a product.
"""

from __future__ import annotations

import math

import numpy as np

from fusec.ir import Constant, DType, Graph, Literal, Node, Op, Value
from fusec.ops import Cast, Concat, DeformConv, GridSample, MatMul, Reshape, Slice, pw
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.rewriter import erase_unused

# Blocks for each processor, and products for each result, between those that were measured on an H200
# (benchmarks/results/deformable.json).
LEAST_BLOCKS: float = 2
MOST_PRODUCTS = 512
WINDOWS, FILTERS = 64, 256  # of a block


class ExpandDeformConv(Pass):
    """Expand deformable convolutions where that is faster."""

    name = "expand_deform_conv"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if isinstance(node.op, DeformConv) and not options.as_source and _is_narrow(node, options):
                _expand(graph, node, node.op)


def _is_narrow(node: Node, options: Options) -> bool:
    """Tell if there are few blocks for the processors, and each has much to add up."""
    filters, *products = node.operands[1].type.shape
    batch, _, *out = node.result.type.shape
    assert isinstance(node.op, DeformConv)
    groups = node.op.groups
    blocks = math.ceil(batch * math.prod(out) / WINDOWS) * groups * math.ceil(filters / groups / FILTERS)
    return math.prod(products) > MOST_PRODUCTS and blocks < LEAST_BLOCKS * options.target.processors


def _expand(graph: Graph, node: Node, op: DeformConv) -> None:
    """Replace a node by a grid_sample and a product. Places are computed in fp32, because 16 bits do not hold them."""
    x, w, offset, *mask = node.operands
    (batch, channels, *image), (filters, of_group, *window) = x.type.shape, w.type.shape
    out, taps, images = offset.type.shape[2:], math.prod(window), batch * op.offset_groups
    exact = DType.F64 if offset.type.dtype is DType.F64 else DType.F32

    def add(made: Op, *operands: Value) -> Value:
        return graph.insert(made, operands, before=node, origin=node.origin).result

    def shaped(value: Value, *shape: int) -> Value:
        return value if value.type.shape == shape else add(Reshape(shape), value)

    moves = shaped(offset, images, taps, 2, *out)
    tap, places = np.indices(window).reshape(2, taps), np.indices(out)
    along: list[Value] = []
    for d in (1, 0):  # a grid has the last dim first
        moved = add(Slice((0, 0, d, 0, 0), (images, taps, 1, *out), (1,) * 5), moves)
        moved = moved if moved.type.dtype is exact else add(Cast(exact), moved)
        start = places[d] * op.strides[d] - op.pads[d] + tap[d].reshape(1, taps, 1, 1, 1) * op.dilations[d]
        label = f"{node.result.name}.{'columns' if d else 'rows'}"
        at = add(pw("add"), moved, add(Constant(Literal.of(start.astype(exact.numpy), label))))
        along.append(shaped(at, images, taps * out[0], out[1], 1))
    grid = add(Concat(3), *along)
    read = add(GridSample("linear", "zeros", "pixels"), shaped(x, images, channels // op.offset_groups, *image), grid)
    if mask:
        read = add(pw("mul"), read, shaped(mask[0], images, 1, taps * out[0], out[1]))
    read = shaped(read, batch, op.groups, of_group * taps, math.prod(out))
    matrix = shaped(w, 1, op.groups, filters // op.groups, of_group * taps)
    result = shaped(add(MatMul(), matrix, read), *node.result.type.shape)
    name = node.result.name
    graph.replace(node.result, result)
    erase_unused(graph, node)
    graph.rename(result, name)
