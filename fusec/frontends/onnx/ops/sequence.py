"""Import ops on sequences of tensors. All are resolved at import, because lengths are known."""

from __future__ import annotations

import itertools

import numpy as np
from onnx import GraphProto, TypeProto

from fusec.frontends.onnx.emission.emit import Emitter, ModelValue, Table, TensorList
from fusec.frontends.onnx.model_file.tensors import dtype_of
from fusec.frontends.onnx.ops.control import row, stacked, tensor
from fusec.frontends.onnx.ops.loop_rows import last_place
from fusec.ir import Value
from fusec.ops import Concat
from fusec.ops.spec import normalize_axis, require


def sequence_empty(g: Emitter, /, *, dtype: int = 1) -> ModelValue:
    return TensorList((), dtype_of(dtype))


def sequence_construct(g: Emitter, /, *items: Value) -> ModelValue:
    return TensorList(tuple(items))


def sequence_at(g: Emitter, sequence: TensorList, position: Value, /) -> ModelValue:
    items = _items(sequence)
    return items[_index(g, position, len(items), len(items))]


def sequence_length(g: Emitter, sequence: TensorList, /) -> ModelValue:
    return g.constant(np.array(len(_items(sequence)), np.int64))


def sequence_insert(g: Emitter, sequence: TensorList, item: Value, position: Value | None = None, /) -> ModelValue:
    items = list(_items(sequence))
    at = len(items) if position is None else _index(g, position, len(items), len(items) + 1)
    items.insert(at, tensor(item))
    return TensorList(tuple(items))


def sequence_erase(g: Emitter, sequence: TensorList, position: Value | None = None, /) -> ModelValue:
    items = list(_items(sequence))
    require(bool(items), "an empty sequence has nothing to erase")
    del items[len(items) - 1 if position is None else _index(g, position, len(items), len(items))]
    return TensorList(tuple(items))


def concat_from_sequence(g: Emitter, sequence: TensorList, /, *, axis: int, new_axis: int = 0) -> ModelValue:
    items = _items(sequence)
    require(bool(items), "an empty sequence cannot be joined")
    rank = items[0].type.rank
    if sequence.stack is not None:
        axis = normalize_axis(axis, rank + bool(new_axis))
        whole, shape = last_place(g, sequence.stack, axis), items[0].type.shape
        return whole if new_axis else g.reshape(whole, (*shape[:axis], len(items) * shape[axis], *shape[axis + 1 :]))
    if new_axis:
        return stacked(g, items, normalize_axis(axis, rank + 1))
    return items[0] if len(items) == 1 else g(Concat(normalize_axis(axis, rank)), *items)


def split_to_sequence(
    g: Emitter, x: Value, split: Value | None = None, /, *, axis: int = 0, keepdims: int = 1
) -> ModelValue:
    axis = normalize_axis(axis, tensor(x).type.rank)
    dim = x.type.shape[axis]
    if split is None:
        g.require_room(dim)
        with g.unrolling():
            parts = [row(g, x, axis, i) if not keepdims else g.window(x, axis, i, 1) for i in range(dim)]
        return TensorList(tuple(parts), x.type.dtype)
    given = g.ints(split, "split")
    if split.type.rank == 0:
        require(given[0] > 0, f"split is {given[0]}")
        g.require_room(-(-dim // given[0]))
        sizes = [min(given[0], dim - start) for start in range(0, dim, given[0])]
    else:
        sizes = list(given)
    require(all(s >= 0 for s in sizes) and sum(sizes) == dim, f"sizes {sizes} do not add up to {dim}")
    starts = [end - size for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
    with g.unrolling():
        windows = tuple(g.window(x, axis, start, size) for start, size in zip(starts, sizes, strict=True))
    return TensorList(windows, x.type.dtype)


def sequence_map(g: Emitter, sequence: TensorList, /, *more: ModelValue, body: GraphProto) -> tuple[ModelValue, ...]:
    items = _items(sequence)
    results: list[list[Value]] = [[] for _ in range(g.outputs)]
    for i, item in enumerate(items):
        given: list[ModelValue] = [item]
        for other in more:
            if isinstance(other, TensorList):
                require(len(other.items) == len(items), "sequences of different lengths")
                given.append(other.items[i])
            else:
                given.append(other)
        with g.unrolling():
            made = g.subgraph(body, given)
        for items_so_far, result in zip(results, made, strict=False):
            items_so_far.append(tensor(result))
    return tuple(TensorList(tuple(r)) for r in results)


def optional(g: Emitter, element: ModelValue | None = None, /, *, type: TypeProto | None = None) -> ModelValue:
    """Import Optional: an optional value with an element is the element."""
    require(element is not None or type is not None, "needs an element, or the type of the missing one")
    return TensorList((), present=False) if element is None else element


def optional_get_element(g: Emitter, value: ModelValue, /) -> ModelValue:
    require(not isinstance(value, TensorList) or value.present, "the optional value has no element")
    return value


def optional_has_element(g: Emitter, value: ModelValue | None = None, /) -> ModelValue:
    absent = value is None or (isinstance(value, TensorList) and not value.present)
    return g.constant(np.array(not absent))


def _items(sequence: ModelValue) -> tuple[Value, ...]:
    require(isinstance(sequence, TensorList), "takes a sequence, not a tensor")
    assert isinstance(sequence, TensorList)
    require(sequence.present, "the optional sequence has no element")
    return sequence.items


def _index(g: Emitter, position: Value, length: int, end: int) -> int:
    at = int(g.number(tensor(position), "the position"))
    require(-length <= at < end, f"position {at} in a sequence of {length}")
    return at + length if at < 0 else at


TABLE: Table = {
    ("SequenceEmpty", 11): sequence_empty,
    ("SequenceConstruct", 11): sequence_construct,
    ("SequenceAt", 11): sequence_at,
    ("SequenceLength", 11): sequence_length,
    ("SequenceInsert", 11): sequence_insert,
    ("SequenceErase", 11): sequence_erase,
    ("SequenceMap", 17): sequence_map,
    ("ConcatFromSequence", 11): concat_from_sequence,
    ("Optional", 15): optional,
    ("OptionalGetElement", 15): optional_get_element,
    ("OptionalHasElement", 15): optional_has_element,
    ("SplitToSequence", 11): split_to_sequence,
}
