"""Recognise weights that are dequantised from constant integers of 4 or 8 bits, in blocks along the depth or whole."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np

from fusec.ir import HALVES, Array, DType, Graph, Node, Op, TensorType, Value
from fusec.ops import Cast, Reshape, Slice, Transpose
from fusec.ops.matmul import CODES
from fusec.passes.rewriting.computations import recorded
from fusec.passes.rewriting.derived_constants import derive, folded
from fusec.system.dataclass import dataclass

SIGNED = {DType.U4: DType.I4, DType.U8: DType.I8}
Dim = tuple[int, ...]  # the dims of the dequantised tensor that were merged into one


@dataclass(frozen=True)
class PackedWeights:
    """A matrix [depth, columns] that views make of (codes - zero) * scale.

    views: ops from the dequantised tensor to the matrix, in order.
    column: the dim of the dequantised tensor that counts columns.
    blocks: the dim that counts blocks of the depth; None if each column has one scale.
    size: neighbours along the depth that share a scale.
    """

    codes: Value
    scale: Value
    zero: Value | None
    shape: tuple[int, int]
    views: tuple[Op, ...]
    column: int
    blocks: int | None
    size: int

    def operands(self, graph: Graph, before: Node) -> list[Value] | None:
        """Insert the constants of a packed product; None if the zero points are no integers of the codes' type."""
        dtype, number = self.codes.type.dtype, self._zero_number()
        depth, columns = self.shape
        offset = 0
        zeros: list[Value] = []
        middle = 1 << (dtype.bits - 1)
        if dtype in SIGNED and number == middle:
            offset, dtype = middle, SIGNED[dtype]
        elif self.zero is not None and number != 0:
            integers = self._integer_zeros(graph, self.zero, before)
            if integers is None:
                return None
            zeros = [self._by_block(graph, integers, before)]
        source = folded(graph, self.codes, before)
        assert source is not None and source.literal is not None
        arranged = partial(_arranged, views=self.views, offset=offset, name=dtype.value)
        type = TensorType((columns, depth), dtype)
        codes = derive(graph, before, type, [source.literal], arranged, source.literal)
        return [codes, self._by_block(graph, self.scale, before), *zeros]

    def _zero_number(self) -> float | None:
        """Return the zero point if it is one known number."""
        if self.zero is None:
            return 0.0
        literal = self.zero.literal
        return float(literal.array.reshape(-1)[0]) if literal is not None and literal.type.size == 1 else None

    def _integer_zeros(self, graph: Graph, zero: Value, before: Node) -> Value | None:
        """Return zero points in the type of the codes. Their data is read, because floats need not be whole numbers."""
        dtype, source = self.codes.type.dtype, folded(graph, zero, before)
        assert source is not None and source.literal is not None
        numbers, info = source.literal.array, ml_dtypes.iinfo(dtype.numpy)
        inside = (numbers >= int(info.min)) & (numbers <= int(info.max)) & (numbers == np.rint(numbers))
        if not inside.all():
            return None
        type = zero.type.with_dtype(dtype)
        return derive(graph, before, type, [source.literal], _same, source.literal)

    def _by_block(self, graph: Graph, value: Value, before: Node) -> Value:
        """Return scales or zero points as a matrix [columns, blocks]."""
        source = folded(graph, value, before)
        assert source is not None and source.literal is not None
        depth, columns = self.shape
        shape = (columns, -(-depth // self.size))
        rank = self.codes.type.rank
        dims = (self.column, self.blocks) if self.blocks is not None else (self.column,)
        by_block = partial(_by_block, rank=rank, dims=dims, shape=np.array(shape, np.int64))
        return derive(graph, before, TensorType(shape, value.type.dtype), [source.literal], by_block, source.literal)


def packed_weights(weight: Value) -> PackedWeights | None:
    """Return the packed weights of a matrix [depth, columns]; None if it is not dequantised from integers."""
    if weight.type.rank != 2:
        return None
    views: list[Op] = []
    at = weight
    while (node := at.node) is not None and node.op.name != "mul":
        if isinstance(node.op, (Reshape, Slice, Transpose)):
            views.insert(0, node.op)
        elif not (isinstance(node.op, Cast) and node.operands[0].type.dtype.is_float):
            return None
        at = node.operands[0]
    if at.node is None:
        return None
    for numbers, scale in (at.node.operands, at.node.operands[::-1]):
        found = _codes(numbers)
        if found is not None and _is_known(scale) and scale.type.dtype.is_float:
            codes, zero = found
            if codes.type.shape != at.type.shape:
                return None
            return _in_blocks(codes, _as_given(scale), zero, views, weight)
    return None


def _codes(numbers: Value) -> tuple[Value, Value | None] | None:
    """Return the integers and their zero point, if any, of which a value is the difference."""
    zero: Value | None = None
    if numbers.node is not None and numbers.node.op.name == "sub":
        numbers, zero = numbers.node.operands
    if numbers.node is None or not isinstance(numbers.node.op, Cast) or (zero is not None and not _is_known(zero)):
        return None
    codes = numbers.node.operands[0]
    return (codes, zero) if codes.type.dtype in CODES and _is_known(codes) else None


def _is_known(value: Value) -> bool:
    """Tell if a value depends on constants alone."""
    node = value.node
    return value.literal is not None or (
        node is not None and bool(node.operands) and all(map(_is_known, node.operands))
    )


def _as_given(scale: Value) -> Value:
    """Return scales of 16 bits before they are cast to fp32."""
    node = scale.node
    wide = node is not None and isinstance(node.op, Cast) and node.operands[0].type.dtype in HALVES
    return node.operands[0] if wide and node is not None else scale


def _in_blocks(codes: Value, scale: Value, zero: Value | None, views: list[Op], weight: Value) -> PackedWeights | None:
    shape = codes.type.shape
    dims = _followed(shape, views)
    if dims is None or len(dims) != 2 or len(dims[1]) != 1 or len(dims[0]) not in (1, 2):
        return None
    inner, (column,) = dims[0], dims[1]
    depth, columns = weight.type.shape
    blocks, size = (inner[0], shape[inner[1]]) if len(inner) == 2 else (None, depth)
    varying = {column: shape[column], **({blocks: shape[blocks]} if blocks is not None else {})}
    for value in (scale, *([] if zero is None else [zero])):
        own = (1,) * (len(shape) - value.type.rank) + value.type.shape
        if len(own) != len(shape) or any(d != 1 and varying.get(i) != d for i, d in enumerate(own)):
            return None
    return PackedWeights(codes, scale, zero, (depth, columns), tuple(views), column, blocks, size)


def _followed(shape: tuple[int, ...], views: list[Op]) -> list[Dim] | None:
    """Return the dims that each dim after some views merges; None if a view mixes or divides dims."""
    dims: list[Dim] = [(i,) for i in range(len(shape))]
    sizes = list(shape)
    for op in views:
        if isinstance(op, Transpose):
            dims, sizes = [dims[p] for p in op.perm], [sizes[p] for p in op.perm]
        elif isinstance(op, Slice):
            if any(op.starts) or any(step != 1 for step in op.steps):
                return None
            cut = [len(d) for d, old, new in zip(dims, sizes, op.sizes, strict=True) if old != new]
            if any(count != 2 for count in cut):
                return None
            sizes = list(op.sizes)
        elif isinstance(op, Reshape):
            merged = _merged(dims, sizes, op.shape)
            if merged is None:
                return None
            dims, sizes = merged, list(op.shape)
    return dims


def _merged(dims: list[Dim], sizes: list[int], shape: tuple[int, ...]) -> list[Dim] | None:
    """Return the dims after a reshape that merges neighbours, and does nothing else."""
    result: list[Dim] = []
    at = 0
    for size in shape:
        if at == len(sizes):
            return None
        dim, have = dims[at], sizes[at]
        at += 1
        while have < size and at < len(sizes):
            dim, have, at = (*dim, *dims[at]), have * sizes[at], at + 1
        if have != size:
            return None
        result.append(dim)
    return result if at == len(sizes) else None


@recorded
def _arranged(array: Array, views: tuple[Op, ...], offset: int, name: str) -> Array:
    """Return codes as [columns, depth], less an offset."""
    for op in views:
        (array,) = op.reference(np, array)
    array = np.ascontiguousarray(array.T)
    if not offset:
        return array
    codes = array.view(np.uint8) ^ np.uint8(offset)  # subtracts half the range, as the highest bit becomes the sign
    return codes.view(DType(name).numpy)


@recorded
def _same(array: Array) -> Array:
    return array


@recorded
def _by_block(array: Array, rank: int, dims: tuple[int, ...], shape: Array) -> Array:
    """Return factors as [columns, blocks], from the shape in which they broadcast with codes of that rank."""
    own = (1,) * (rank - array.ndim) + array.shape
    order = (*dims, *(d for d in range(rank) if d not in dims))
    matrix = array.reshape(own).transpose(order).reshape([*(own[d] for d in dims), *(1,) * (2 - len(dims))])
    return np.broadcast_to(matrix, shape)
