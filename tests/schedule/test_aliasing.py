"""Test views: the memory of the operand holds the result of a node that is called a view."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusec.errors import LoweringError
from fusec.ir import DType, Graph, Node, Op, TensorType
from fusec.lowering.dim_folding import backward
from fusec.lowering.packing import pack
from fusec.ops import Cast, Concat, Expand, Pad, Relayout, Reshape, Slice, Split, Transpose, pw
from fusec.schedule.aliasing import (
    is_view,
    joins_in_place,
    operand_order,
    result_order,
    same_storage,
    view_offset,
    would_view,
)

CL = (0, 2, 3, 1)


def node_of(op: Op, shape: tuple[int, ...], order: tuple[int, ...] = (), out: Any = None) -> Node:
    """One node on an operand stored in `order`; `out` is the order of every result, by default as inferred."""
    graph = Graph("g")
    x = graph.add_input("x", TensorType(shape, DType.F32, order))
    node = graph.insert(op, [x])
    graph.set_outputs(node.results)
    for value in node.results:
        if out is not None:
            graph.set_type(value, value.type.with_order(out))
    return node


VIEWS = {
    "reshape": node_of(Reshape((6, 4)), (2, 3, 4)),
    "reshape of nothing": node_of(Reshape((0, 4)), (2, 0)),
    "reshape to one": node_of(Reshape(()), (1, 1, 1), (2, 0, 1)),
    "reshape splits the channels": node_of(Reshape((2, 2, 3, 4, 4)), (2, 6, 4, 4), CL, (0, 3, 4, 1, 2)),
    "reshape merges the pixels": node_of(Reshape((2, 6, 16)), (2, 6, 4, 4), CL, (0, 2, 1)),
    "reshape drops ones": node_of(Reshape((2, 6)), (2, 6, 1, 1), CL),
    "transpose": node_of(Transpose((0, 2, 3, 1)), (2, 3, 4, 5), CL),
    "transpose with an order": node_of(Transpose((0, 3, 1, 2)), (2, 4, 5, 3), (), CL),
    "transpose of ones": node_of(Transpose((1, 0, 2)), (1, 3, 4)),
    "relayout of one pixel": node_of(Relayout(CL), (2, 3, 1, 1)),
    "relayout to its own": node_of(Relayout(CL), (2, 3, 4, 4), CL),
    "identity": node_of(pw("identity"), (2, 3), (1, 0)),
    "expand to its own shape": node_of(Expand((2, 3)), (2, 3)),
    "slice of the outermost": node_of(Slice((1, 0), (2, 4), (1, 1)), (5, 4)),
    "slice of the outermost in memory": node_of(Slice((0, 2), (5, 1), (1, 1)), (5, 4), (1, 0)),
    "slice of one element's row": node_of(Slice((2, 1), (1, 2), (1, 1)), (5, 4)),
    "split": node_of(Split(0, (2, 3)), (5, 4)),
    "split in three": node_of(Split(0, (1, 3, 2)), (6, 4)),
    "split channels of one image": node_of(Split(1, (2, 3)), (1, 5, 2, 2)),
}
COPIES = {
    "reshape merges the channels": node_of(Reshape((2, 96)), (2, 6, 4, 4), CL),
    "reshape into another order": node_of(Reshape((6, 4)), (2, 3, 4), (), (1, 0)),
    "transpose": node_of(Transpose((1, 0)), (3, 4)),
    "transpose with the wrong order": node_of(Transpose((2, 0, 1)), (3, 4, 5), (), (2, 0, 1)),
    "relayout": node_of(Relayout(CL), (2, 3, 4, 4)),
    "identity into another order": node_of(pw("identity"), (2, 3), (1, 0), ()),
    "another pointwise op": node_of(pw("relu"), (2, 3)),
    "cast": node_of(Cast(DType.F16), (2, 3)),
    "expand": node_of(Expand((2, 3)), (1, 3)),
    "expand by rank": node_of(Expand((1, 3)), (3,)),
    "expand into another order": node_of(Expand((2, 3)), (2, 3), (1, 0), ()),
    "slice of the innermost": node_of(Slice((0, 1), (5, 2), (1, 1)), (5, 4)),
    "slice with steps": node_of(Slice((0, 0), (2, 4), (2, 1)), (5, 4)),
    "slice backwards": node_of(Slice((4, 0), (5, 4), (-1, 1)), (5, 4)),
    "slice of nothing": node_of(Slice((0, 0), (0, 4), (1, 1)), (5, 4)),
    "slice into another order": node_of(Slice((1, 0), (2, 4), (1, 1)), (5, 4), (), (1, 0)),
    "split of the innermost": node_of(Split(1, (1, 3)), (5, 4)),
    "split channels of two images": node_of(Split(1, (2, 3)), (2, 5, 2, 2)),
    "split with an empty piece": node_of(Split(0, (0, 5)), (5, 4)),
    "pad by nothing": node_of(Pad((0, 0, 0, 0)), (5, 4)),
}


def assert_reads(node: Node) -> None:
    """Check that the packed results are in the operand's packed buffer, at `view_offset`."""
    source = node.operands[0].type
    array = np.arange(1, source.size + 1, dtype=np.float32).reshape(source.shape)
    buffer = pack(np, array, source)
    for index, (value, want) in enumerate(zip(node.results, node.op.reference(np, array), strict=True)):
        start = view_offset(node, index)
        assert 0 <= start <= start + value.type.size <= buffer.size
        np.testing.assert_array_equal(buffer[start : start + value.type.size], pack(np, want, value.type))


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    assert is_view(VIEWS[name])
    assert_reads(VIEWS[name])


@pytest.mark.parametrize("name", COPIES)
def test_copies(name: str) -> None:
    assert not is_view(COPIES[name])
    with pytest.raises(AssertionError, match="is no view"):
        _ = [view_offset(COPIES[name], index) for index in range(len(COPIES[name].results))]


def test_offsets() -> None:
    assert view_offset(VIEWS["slice of the outermost"], 0) == 4
    assert view_offset(VIEWS["slice of the outermost in memory"], 0) == 10
    assert view_offset(VIEWS["slice of one element's row"], 0) == 9
    assert [view_offset(VIEWS["split"], i) for i in (0, 1)] == [0, 8]
    assert [view_offset(VIEWS["split channels of one image"], i) for i in (0, 1)] == [0, 8]


PART = TensorType((2, 4, 3, 3), DType.F32, CL, (2, 10, 3, 3))  # four channels of ten


@pytest.mark.parametrize(
    ("op", "result", "place"),
    [
        (Relayout(CL), TensorType((2, 4, 3, 3), DType.F32, CL), None),  # the same order, but packed
        (pw("identity"), TensorType((2, 4, 3, 3), DType.F32, CL), None),
        (Transpose((0, 2, 3, 1)), TensorType((2, 3, 3, 4), DType.F32), None),  # packed it does not lie there
        (Slice((0, 1, 0, 0), (2, 1, 3, 3), (1, 1, 1, 1)), TensorType((2, 1, 3, 3), DType.F32, CL), None),
        (Slice((1, 1, 2, 2), (1, 3, 1, 1), (1, 1, 1, 1)), TensorType((1, 3, 1, 1), DType.F32, CL), 90 + 80 + 1),
    ],
)
def test_a_part_of_something_larger_is_not_packed(op: Op, result: TensorType, place: int | None) -> None:
    assert would_view(node_of(op, PART.shape, CL), PART, result) == place


@pytest.mark.parametrize("order", [CL, (), (0, 1, 3, 2)])
def test_a_concat_finds_its_parts_in_its_own_memory_order(order: tuple[int, ...]) -> None:
    graph = Graph("g")
    parts = [graph.add_input(name, TensorType((2, 4, 3, 3), DType.F32, order)) for name in "ab"]
    node = graph.insert(Concat(1), parts, types=[TensorType((2, 8, 3, 3), DType.F32, CL)])
    assert not joins_in_place(node)
    for value in parts:
        graph.set_type(value, TensorType((2, 4, 3, 3), DType.F32, order, (2, 8, 3, 3)))
    assert joins_in_place(node) == (order == CL)


def test_two_operands_are_no_view() -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType((2, 3), DType.F32))
    assert not is_view(graph.insert(pw("add"), [x, x]))


def test_same_storage() -> None:
    assert same_storage((2, 3, 1, 1), CL, ())
    assert same_storage((2, 1, 4, 4), CL, ())
    assert not same_storage((2, 3, 4, 1), CL, ())
    assert same_storage((2, 3, 4), (2, 1, 0), (2, 1, 0))


# random nodes ------------------------------------------------------------------------------------------


def orders(rank: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.permutations(range(rank)).map(tuple)


@st.composite
def nodes(draw: Any, kinds: tuple[str, ...] = ("reshape", "transpose", "slice", "split", "relayout")) -> Node:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 6]), min_size=1, max_size=4)))
    rank, kind = len(shape), draw(st.sampled_from(kinds))
    order = draw(st.one_of(st.just(()), orders(rank)))
    op: Op
    if kind == "reshape":
        op = Reshape(draw_reshape(draw, shape))
    elif kind == "transpose":
        op = Transpose(draw(orders(rank)))
    elif kind == "relayout":
        op = Relayout(draw(orders(rank)))
    elif kind == "split":
        axis = draw(st.integers(0, rank - 1))
        first = draw(st.integers(0, shape[axis]))
        op = Split(axis, (first, shape[axis] - first))
    else:
        starts = [draw(st.integers(0, d - 1)) if draw(st.booleans()) else 0 for d in shape]
        sizes = [draw(st.integers(1, d - s)) if s else d for d, s in zip(shape, starts, strict=True)]
        op = Slice(
            tuple(starts), tuple(sizes), tuple(draw(st.sampled_from([1, 1, 1, -1])) if n == 1 else 1 for n in sizes)
        )
    node = node_of(op, shape, order)
    if kind == "relayout":
        return node
    fitting = result_order(node, node.operands[0].type) if kind in ("reshape", "transpose") else None
    for value in node.results:
        # the fitting order half the time, else views would be rare
        chosen = fitting if fitting is not None and draw(st.booleans()) else draw(orders(value.type.rank))
        if kind in ("slice", "split") and draw(st.booleans()):
            chosen = order
        node.graph.set_type(value, value.type.with_order(chosen))
    return node


def draw_reshape(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Some dims merged, then some split, then ones put in."""
    dims = list(shape)
    for _ in range(draw(st.integers(0, 3))):
        i = draw(st.integers(0, len(dims) - 1))
        if draw(st.booleans()) and i + 1 < len(dims):
            dims[i : i + 2] = [dims[i] * dims[i + 1]]
        else:
            part = draw(st.sampled_from([d for d in (1, 2, 3) if dims[i] % d == 0]))
            dims[i : i + 1] = [part, dims[i] // part]
    return tuple(dims)


@settings(max_examples=400, deadline=None)
@given(nodes())
def test_what_is_called_a_view_reads_right(node: Node) -> None:
    if is_view(node):
        assert_reads(node)


@settings(max_examples=300, deadline=None)
@given(nodes(("reshape", "transpose")))
def test_orders_that_make_views(node: Node) -> None:
    """`result_order` and `operand_order` give views, and are the only such orders (up to dims of 1)."""
    source, result = node.operands[0].type, node.result.type
    forward, back = result_order(node, source), operand_order(node, result)
    if forward is not None:
        assert would_view(node, source, result.with_order(forward)) == 0
    if back is not None:
        assert would_view(node, source.with_order(back), result) == 0
    same_forward = forward is not None and same_storage(result.shape, forward, result.order)
    same_back = back is not None and same_storage(source.shape, back, source.order)
    assert is_view(node) == same_forward == same_back


@settings(max_examples=200, deadline=None)
@given(nodes(("reshape", "transpose")))
def test_a_copy_is_called_for_only_where_memory_differs(node: Node) -> None:
    """The other direction: if the packed operand holds the packed result, the node is a view."""
    source, result = node.operands[0].type, node.result.type
    array = np.arange(source.size).reshape(source.shape)
    (want,) = node.op.reference(np, array)
    same = np.array_equal(pack(np, array, source), pack(np, want, result))
    assert is_view(node) == same


def test_the_random_nodes_are_of_both_kinds() -> None:
    seen: set[tuple[str, bool]] = set()

    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(nodes())
    def look(node: Node) -> None:
        seen.add((node.op.name, is_view(node)))

    look()
    assert seen == {(n, v) for n in ("reshape", "transpose", "slice", "split", "relayout") for v in (True, False)}


def test_backward_refuses_as_forward_does() -> None:
    node = COPIES["reshape merges the channels"]
    with pytest.raises(LoweringError, match="needs a copy"):
        backward(node_of(Reshape((2, 6, 4, 4)), (2, 96), (), CL), TensorType((2, 6, 4, 4), DType.F32, CL).strides)
    assert result_order(node, node.operands[0].type) is None
    assert operand_order(node_of(Reshape((2, 6, 4, 4)), (2, 96)), TensorType((2, 6, 4, 4), DType.F32, CL)) is None
