"""Pad channels of images in 16 bits to a multiple of eight, from convolution to convolution.

Tensor cores read eight channels of a pixel together, and cuDNN runs other counts, such as the 18 and 36 of an HRNet,
several times slower. Filters and biases get zeros, so that the channels added stay zero through the ops in between.
An infinite pixel is the exception: times zero it is NaN, which the next convolution adds to all its results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fusec.ir import HALVES, Array, Graph, Node, TensorType, Value
from fusec.ops import AvgPool, Conv, MaxPool, Pointwise, Resize, Slice
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.computations import recorded
from fusec.passes.rewriting.derived_constants import derive
from fusec.passes.rewriting.rewriter import erase_unused
from fusec.passes.rewriting.value_facts import small_constant

_TOGETHER = 8  # channels that a tensor core reads together
_ENOUGH_CHANNELS = 9  # fewer have kernels of their own
_ENOUGH_PIXELS = 32  # of an image: products of one pixel, as in squeeze-and-excitation, have a kernel of their own


class AlignChannels(Pass):
    """Pad channels of images to a multiple of eight where convolutions write and read them."""

    name = "align_channels"

    def run(self, graph: Graph, options: Options) -> None:
        regions = _regions(graph)
        chosen = {value for region in regions if _pays(region) for value in region}
        if chosen:
            _pad(graph, chosen)


def _regions(graph: Graph) -> list[set[Value]]:
    """Return the images that could be padded. Those of a region are tied by ops between convolutions."""
    region_of: dict[Value, set[Value]] = {}
    for node in graph.nodes:
        if len(node.results) != 1 or not _is_unaligned(node.result.type):
            continue
        if _has_constant_filters(node):
            region_of[node.result] = {node.result}
        elif _keeps_zeros(node, region_of):
            joined = {node.result}.union(*(region_of.get(v, ()) for v in node.operands))
            region_of.update(dict.fromkeys(joined, joined))
    return list({id(region): region for region in region_of.values()}.values())


def _is_unaligned(type: TensorType) -> bool:
    if type.rank < 3 or type.dtype not in HALVES or not type.size:
        return False
    return type.shape[1] >= _ENOUGH_CHANNELS and type.shape[1] % _TOGETHER != 0


def _aligned(channels: int) -> int:
    return channels + -channels % _TOGETHER


def _has_constant_filters(node: Node) -> bool:
    return isinstance(node.op, Conv) and node.op.groups == 1 and node.operands[1].literal is not None


def _keeps_zeros(node: Node, padded: dict[Value, set[Value]]) -> bool:
    """Tell if an op computes zeros of channels that are zeros, each channel from the same one of its operands."""
    y = node.result.type
    if isinstance(node.op, Resize) and node.op.scales[1] != 1.0:
        return False
    if isinstance(node.op, (Resize, MaxPool, AvgPool)):
        return node.operands[0] in padded and node.operands[0].type.shape[:2] == y.shape[:2]
    if not isinstance(node.op, Pointwise) or not any(v in padded for v in node.operands):
        return False
    zeros: list[Array] = []
    for value in node.operands:
        array = small_constant(value)
        is_padded = value in padded and value.type.rank == y.rank
        if is_padded or (array is not None and _channel_axis(value, y) is not None):
            zeros.append(np.zeros((), value.type.dtype.numpy))
        elif array is not None:
            zeros.append(array)
        else:
            return False
    with np.errstate(all="ignore"):
        return not np.any(node.op.reference(np, *zeros)[0])  # a NaN counts as true


def _channel_axis(value: Value, result: TensorType) -> int | None:
    """Return the dim of an operand that is aligned with the channels of a result; None if it has one number for all."""
    axis = 1 - result.rank + value.type.rank
    return axis if axis >= 0 and value.type.shape[axis] == result.shape[1] else None


def _pays(region: set[Value]) -> bool:
    """Tell if enough convolutions write and read a region. A kernel copies what others read without the padding."""
    pixels = max(math.prod(v.type.shape[2:]) for v in region)
    writers = sum(isinstance(v.node.op, Conv) for v in region if v.node is not None)
    readers = {user for v in region for user in v.users if _has_constant_filters(user) and user.operands[0] is v}
    copies = sum(any(True for _ in _other_uses(v, region)) for v in region)
    return pixels >= _ENOUGH_PIXELS and bool(readers) and writers + len(readers) >= 2 * copies


def _other_uses(value: Value, padded: set[Value]) -> Iterator[tuple[Node, int]]:
    """Yield the uses of a value by nodes that take no padded channels."""
    for user, index in value.uses:
        is_image = _has_constant_filters(user) and index == 0
        if not is_image and not (len(user.results) == 1 and user.result in padded):
            yield user, index


def _pad(graph: Graph, chosen: set[Value]) -> None:
    wide: dict[Value, Value] = {}
    replaced: list[tuple[Node, Value]] = []
    for node in list(graph.nodes):
        reads = _has_constant_filters(node) and node.operands[0] in wide
        if not reads and not any(v in chosen for v in node.results):
            continue
        y = node.result
        new = _padded_node(graph, node, wide, y in chosen)
        replaced.append((node, new))
        if y not in chosen:
            graph.set_type(new, y.type)
            graph.replace(y, new)
            continue
        wide[y] = new
        others = list(_other_uses(y, chosen))
        if others:
            shape = y.type.shape
            part = graph.add(Slice((0,) * len(shape), shape, (1,) * len(shape)), new, before=node)
            for user, index in others:
                graph.set_input(user, index, part)
    erased = set[Node]()
    for node, new in reversed(replaced):
        name = node.result.name
        if node not in erased:
            erased.update(erase_unused(graph, node))
        graph.rename(new, name)


def _padded_node(graph: Graph, node: Node, wide: dict[Value, Value], pads_result: bool) -> Value:
    """Insert the node with padded operands and, if `pads_result`, a padded result."""
    op, operands, y = node.op, [wide.get(v, v) for v in node.operands], node.result.type
    if isinstance(op, Conv):
        w = node.operands[1]
        count = _aligned(w.type.shape[0]) if pads_result else w.type.shape[0]
        operands[1] = _padded_constant(graph, node, w, (count, operands[0].type.shape[1]))
    elif isinstance(op, Resize):
        op = replace(op, sizes=(y.shape[0], _aligned(y.shape[1]), *y.shape[2:]))
    elif isinstance(op, Pointwise):
        for index, value in enumerate(node.operands):
            axis = _channel_axis(value, y)
            if value not in wide and axis is not None:
                sizes = (*value.type.shape[:axis], _aligned(y.shape[1]))
                operands[index] = _padded_constant(graph, node, value, sizes)
    return graph.insert(op, operands, before=node, origin=node.origin).result


def _padded_constant(graph: Graph, node: Node, value: Value, sizes: Sequence[int]) -> Value:
    """Derive a constant whose first dims have these sizes."""
    literal = value.literal
    assert literal is not None
    type = TensorType((*sizes, *value.type.shape[len(sizes) :]), value.type.dtype)
    if type.shape == value.type.shape:
        return value
    return derive(graph, node, type, (literal,), partial(_with_zeros, shape=type.shape), literal)


@recorded
def _with_zeros(array: Array, shape: tuple[int, ...]) -> Array:
    return np.pad(array, [(0, size - own) for size, own in zip(shape, array.shape, strict=True)])
