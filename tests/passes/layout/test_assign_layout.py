"""Test layout on random graphs: same meaning, no cuDNN graph over mixed orders, few copies, linear time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusec.ir import Constant, DType, Graph, Node, TensorType, Value
from fusec.lowering.packing import pack, unpack
from fusec.ops import (
    AvgPool,
    Cast,
    Concat,
    Conv,
    ConvTranspose,
    InstanceNorm,
    LayerNorm,
    MatMul,
    MaxPool,
    Pointwise,
    Reduce,
    Relayout,
    Reshape,
    Slice,
    Softmax,
    Split,
    Transpose,
    pw,
)
from fusec.passes.base import Options, run
from fusec.passes.layout.assign_layout import AssignLayout
from fusec.passes.layout.op_layouts import tied_operands
from fusec.reference import evaluate
from fusec.schedule.aliasing import is_view, same_storage, view_offset
from fusec.text import parse

LOWERED = (Pointwise, Cast, InstanceNorm)


def laid_out(graph: Graph) -> Graph:
    return run((AssignLayout(),), graph, Options())


def copying(graph: Graph) -> list[str]:
    """List the names of ops that move elements and compute nothing."""
    moves = (Relayout, Reshape, Transpose, Slice, Split)
    return [n.op.name for n in graph.nodes if isinstance(n.op, moves) and not is_view(n)]


def assert_one_order(graph: Graph) -> None:
    """cuDNN graphs read operands of the whole shape in the result's order; outputs are row-major."""
    for node in graph.nodes:
        if isinstance(node.op, LOWERED):
            for index in tied_operands(node):
                operand, result = node.operands[index].type, node.results[0].type
                assert same_storage(result.shape, operand.order, result.order), node
    for value in graph.outputs:
        assert same_storage(value.type.shape, value.type.order, ()), value


def run_packed(graph: Graph, feeds: dict[str, Any]) -> dict[str, Any]:
    """Run the graph on flat buffers, because `evaluate` ignores memory orders. Views share their operand's buffer."""
    buffers = {v: pack(np, feeds[v.name], v.type) for v in graph.inputs}
    for node in graph.nodes:
        if is_view(node):
            for i, value in enumerate(node.results):
                start = view_offset(node, i)
                buffers[value] = buffers[node.operands[0]][start : start + value.type.size]
            continue
        arrays = node.op.reference(np, *(unpack(buffers[v], v.type) for v in node.operands))
        buffers.update({v: pack(np, a, v.type) for v, a in zip(node.results, arrays, strict=True)})
    # the caller reads rows, whatever order the output's type names
    return {n: buffers[v].reshape(v.type.shape) for n, v in zip(graph.output_names, graph.outputs, strict=True)}


# random graphs -----------------------------------------------------------------------------------------


def convolution(graph: Graph, x: Value, out: int) -> Value:
    spatial = x.type.rank - 2
    w = graph.constant(np.ones((out, x.type.shape[1], *(1,) * spatial), np.float32) / x.type.shape[1])
    return graph.add(Conv((1,) * spatial, (0,) * 2 * spatial, (1,) * spatial), x, w)


def draw_step(draw: Any, graph: Graph, values: list[Value]) -> None:
    """One more node on a value drawn; ops that do not fit it become a relu."""
    x = draw(st.sampled_from(values))
    shape, rank = x.type.shape, x.type.rank
    kind = draw(st.sampled_from(KINDS))
    image = rank in (3, 4) and min(shape) > 0
    if kind == "conv" and image:
        values.append(convolution(graph, x, draw(st.sampled_from([1, 4]))))
    elif kind == "pool" and rank == 4:
        pool = draw(st.sampled_from([MaxPool, AvgPool]))
        values.append(graph.add(pool((1, 1), draw(st.sampled_from([(1, 1), (2, 2)])), (0,) * 4, (1, 1)), x))
    elif kind == "binary":
        like = [v for v in values if v.type == x.type]
        values.append(graph.add(pw(draw(st.sampled_from(["add", "mul"]))), x, draw(st.sampled_from(like))))
    elif kind == "constant":
        cut = draw(st.integers(0, rank))
        array = np.arange(int(np.prod(shape[cut:])), dtype=np.float32).reshape(shape[cut:]) % 7 / 7
        values.append(graph.add(pw("add"), x, graph.constant(array)))
    elif kind == "concat" and rank:
        axis = draw(st.integers(0, rank - 1))
        if x.type.size < 2000:
            values.append(graph.add(Concat(axis), x, draw(st.sampled_from([v for v in values if v.type == x.type]))))
    elif kind == "transpose":
        values.append(graph.add(Transpose(tuple(draw(st.permutations(range(rank))))), x))
    elif kind == "reshape":
        values.append(graph.add(Reshape(draw(st.sampled_from(shapes_of(x.type)))), x))
    elif kind == "cut" and rank:
        axis = draw(st.integers(0, rank - 1))
        if shape[axis] > 1:
            first = draw(st.integers(1, shape[axis] - 1))
            values.extend(graph.insert(Split(axis, (first, shape[axis] - first)), [x]).results)
    elif kind == "norm" and rank >= 2:
        if draw(st.booleans()):
            values.append(graph.add(Softmax(-1), x))
        else:
            values.append(graph.add(LayerNorm(-1), x, graph.constant(np.ones(shape[-1], np.float32))))
    elif kind == "matmul" and rank >= 2:
        k = graph.constant(np.eye(shape[-1], dtype=np.float32))
        values.append(graph.add(MatMul(), x, k))
    elif kind == "reduce" and rank:
        values.append(graph.add(Reduce("mean", (rank - 1,), draw(st.booleans())), x))
    else:
        values.append(graph.add(pw("relu"), x))


KINDS = (
    *("conv", "pool", "binary", "binary", "constant", "constant", "concat", "transpose", "transpose"),
    *("reshape", "reshape", "cut", "norm", "matmul", "reduce", "relu"),
)


def shapes_of(type: TensorType) -> list[tuple[int, ...]]:
    """The shape with two neighbours merged, or an even dim split."""
    shape = type.shape
    merged = [(*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :]) for i in range(len(shape) - 1)]
    split = [(*shape[:i], 2, d // 2, *shape[i + 1 :]) for i, d in enumerate(shape) if d % 2 == 0 and len(shape) < 6]
    return [shape, *merged, *split]


@st.composite
def graphs(draw: Any) -> Graph:
    graph = Graph("g")
    shape = draw(st.sampled_from([(2, 4, 2, 4), (1, 4, 4, 4), (2, 4, 1, 1), (2, 6, 4)]))
    values = [graph.add_input(n, TensorType(shape, DType.F32)) for n in ("x", "y")]
    if draw(st.booleans()):
        values.append(convolution(graph, values[0], 4))
    for _ in range(draw(st.integers(1, 14))):
        draw_step(draw, graph, values)
    unused = [v for v in values if not v.uses]
    graph.set_outputs(unused, [f"y{i}" for i in range(len(unused))])
    return graph


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_random_graphs(graph: Graph) -> None:
    rng = np.random.default_rng(0)
    after = laid_out(graph.clone())
    assert_one_order(after)
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs}
    got, want = run_packed(after, feeds), evaluate(graph, feeds)
    assert got.keys() == want.keys()
    for name, array in want.items():  # an order is no arithmetic, but NumPy may sum strided rows otherwise
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5)
    again = laid_out(after.clone())
    assert str(again) == str(after)
    no_convolution = not any(isinstance(n.op, (Conv, ConvTranspose)) for n in graph.nodes)
    if no_convolution and not any(isinstance(n.op, (Reshape, Transpose)) for n in graph.nodes):
        assert str(after) == str(graph), "nothing asks for another order than row-major"


def test_random_graphs_reach_regions_copies_and_mixed_orders() -> None:
    """The generator reaches regions of other orders, copies, and orders that meet."""
    seen: set[str] = set()

    @settings(max_examples=150, deadline=None, database=None, derandomize=True)
    @given(graphs())
    def look(graph: Graph) -> None:
        after = laid_out(graph)
        seen.update(n.op.name for n in after.nodes)
        seen.update("view" for n in after.nodes if isinstance(n.op, (Reshape, Transpose)) and n.result.type.order)
        seen.update("constant in order" for n in after.nodes if isinstance(n.op, Constant) and n.result.type.order)

    look()
    assert {"conv", "relayout", "concat", "split", "matmul", "view", "constant in order"} <= seen


# what single cases cost --------------------------------------------------------------------------------

HEAD = """graph "g" (%x: f32[2,6,4,4]) {
  %w = constant weight("w") : f32[6,6,1,1]
  %c = conv(%x, %w) {strides=[1,1], pads=[0,0,0,0], dilations=[1,1]}
"""
TAIL = '  %z = reduce(%last) {kind="max", axes=[1,2,3], keepdims=true}\n  return %z\n}'


@pytest.mark.parametrize(
    ("body", "copies"),
    [
        ("%last = relu(%c)", []),
        ("%last = add(%c, %x)", ["relayout"]),
        ("%a = add(%c, %x)\n %last = mul(%a, %x)", ["relayout"]),
        ("%a = relu(%x)\n %last = add(%c, %a)", ["relayout"]),
        # split channels, swap, merge: only the merge moves
        (
            "%a = reshape(%c) {shape=[2,2,3,4,4]}\n %b = transpose(%a) {perm=[0,2,1,3,4]}\n"
            "%d = reshape(%b) {shape=[2,6,4,4]}\n %last = conv(%d, %w) "
            "{strides=[1,1], pads=[0,0,0,0], dilations=[1,1]}",
            ["reshape"],
        ),
        # a pointwise op inside the shuffle follows
        (
            "%a = reshape(%c) {shape=[2,2,3,4,4]}\n %b = transpose(%a) {perm=[0,2,1,3,4]}\n %e = relu(%b)\n"
            "%d = reshape(%e) {shape=[2,6,4,4]}\n %last = add(%d, %c)",
            ["reshape"],
        ),
        # a map as rows of channels
        (
            "%a = reshape(%c) {shape=[2,6,16]}\n %b = transpose(%a) {perm=[0,2,1]}\n"
            "%last = reshape(%b) {shape=[2,4,4,6]}",
            [],
        ),
        ("%a = reshape(%c) {shape=[2,96]}\n %last = reshape(%a) {shape=[2,6,4,4]}", ["reshape"]),
    ],
)  # fmt: skip
def test_copies(body: str, copies: list[str]) -> None:
    weights = {"w": np.ones((6, 6, 1, 1), np.float32)}
    assert copying(laid_out(parse(HEAD + body + "\n" + TAIL, weights))) == copies


def test_ten_thousand_nodes_in_three_seconds() -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType((1, 8, 4, 4), DType.F32))
    w = graph.constant(np.ones((8, 8, 1, 1), np.float32))
    value, early = x, x
    for i in range(1250):
        conv = graph.add(Conv((1, 1), (0,) * 4, (1, 1)), value, w)
        five = graph.add(Reshape((1, 2, 4, 4, 4)), conv)
        swapped = graph.add(Transpose((0, 2, 1, 3, 4)), five)
        merged = graph.add(Reshape((1, 8, 4, 4)), swapped)
        a = graph.add(pw("relu"), merged)
        b = graph.add(pw("add"), a, early)  # one region of a thousand adds, one value with as many users
        turned = graph.add(Transpose((0, 2, 3, 1)), b)
        value = graph.add(Transpose((0, 3, 1, 2)), turned)
        early = b if i == 0 else early
    graph.set_outputs([value])
    assert len(list(graph.nodes)) > 10_000
    start = time.process_time()
    AssignLayout().run(graph, Options())
    assert time.process_time() - start < 3
    assert_one_order(graph)


def joined(count: int) -> Graph:
    """A concat of as many operands as there are nodes."""
    graph = Graph("g")
    x = graph.add_input("x", TensorType((1, 2, 2, 2), DType.F32))
    turned = graph.add(Transpose((0, 2, 3, 1)), x)
    graph.set_outputs([graph.add(Concat(0), *(graph.add(pw("relu"), turned) for _ in range(count)))])
    return graph


def sharing_a_filter(count: int) -> Graph:
    """Convolutions by one filter, which has another use, so that none of them may reorder it."""
    graph = Graph("g")
    value = graph.add_input("x", TensorType((1, 8, 2, 2), DType.F32))
    filters = graph.constant(np.ones((8, 8, 3, 3), np.float32))
    other = graph.add(pw("relu"), filters)
    for _ in range(count):
        value = graph.add(Conv((1, 1), (1,) * 4, (1, 1)), value, filters)
    graph.set_outputs([value, other])
    return graph


@pytest.mark.parametrize("build", [joined, sharing_a_filter])
def test_wide_graphs_take_linear_time(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: operand and use lists, made anew when asked for, are not asked for once per element."""
    made = 0

    def counting(getter: Any) -> property:
        def get(self: Any) -> Any:
            nonlocal made
            items = getter(self)
            made += len(items)
            return items

        return property(get)

    for cls, name in ((Node, "operands"), (Value, "uses")):
        monkeypatch.setattr(cls, name, counting(getattr(cls, name).fget))
    work: list[int] = []
    for count in (400, 1600):
        graph = build(count)
        made = 0
        AssignLayout().run(graph, Options())
        work.append(made)
    assert work[1] < 5 * work[0]


@pytest.mark.parametrize(("shape", "order"), [((32, 48), (1, 0)), ((32, 40), ()), ((40, 48), ())])
@pytest.mark.parametrize("dtype", [DType.I8, DType.F8E4M3])
def test_weights_of_8_bits_are_stored_by_columns_of_whole_pieces(
    dtype: DType, shape: tuple[int, int], order: tuple[int, ...], rng: np.random.Generator
) -> None:
    """Tensor cores read them so. Engines copy 16 bytes at a time, so other sizes stay as they are."""
    text = f"""graph "g" (%x: {dtype.value}[24,{shape[0]}]) {{
      %w = constant weight("w") : {dtype.value}[{shape[0]},{shape[1]}]
      %m = matmul(%x, %w)
      return %m
    }}"""
    weights = rng.integers(-9, 9, shape).astype(dtype.numpy)
    graph, x = parse(text, {"w": weights}), rng.integers(-9, 9, (24, shape[0])).astype(dtype.numpy)
    made = laid_out(graph)
    product = next(node for node in made.nodes if isinstance(node.op, MatMul))
    assert product.operands[1].type.order == order
    np.testing.assert_array_equal(evaluate(made, {"x": x})["m"], evaluate(graph, {"x": x})["m"])
