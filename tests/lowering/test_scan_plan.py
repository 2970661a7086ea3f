"""Test the plan of a scan: phases, what is stored, rows of a batch, and which bodies no block runs."""

from __future__ import annotations

import pytest

from fusec.ir import Graph
from fusec.lowering.scan_plan import ADDENDS, MOST_WORK, SHARED_BYTES, ScanPlan, scan_plan
from fusec.lowering.scan_rows import row_dims
from fusec.ops import Scan
from fusec.text import parse


def body(inputs: str, nodes: str, states: int = 1, sequences: int = 0, steps: int = 3) -> Scan:
    """Make a scan from the text of its body."""
    operands: list[str] = []
    for index, each in enumerate(inputs.split(", ")):
        name, type = each.split(": ")
        dims = type.partition("[")[2]
        row = states <= index < states + sequences
        operands.append(f"{name}: {type.partition('[')[0]}[{steps}{',' if dims != ']' else ''}{dims}" if row else each)
    names = ", ".join(each.split(":")[0] for each in operands)
    count = nodes.rpartition("return")[2].count(",") + 1
    results = ", ".join(f"%r{i}" for i in range(count))
    counts = f"steps={steps}, states={states}, sequences={sequences}"
    graph = parse(
        f'graph "g" ({", ".join(operands)}) {{ {results} = scan({names}) '
        f'{{body=graph "body" ({inputs}) {{ {nodes} }}, {counts}}} return {results} }}'
    )
    (node,) = graph.nodes
    assert isinstance(node.op, Scan)
    return node.op


def planned(op: Scan) -> ScanPlan:
    plan = scan_plan(op)
    assert plan is not None
    return plan


def names(plan: ScanPlan) -> list[list[str]]:
    return [[v.name for v in phase] for phase in plan.phases]


def test_what_one_node_reads_is_computed_there() -> None:
    plan = planned(body("%h: f32[4]", "%a = exp(%h) %b = neg(%a) %y = add(%b, %h) return %y"))
    assert names(plan) == [["y"]]
    assert plan.stored == []


def test_what_two_nodes_read_is_stored() -> None:
    plan = planned(body("%h: f32[4]", "%a = exp(%h) %b = neg(%a) %c = tanh(%a) %y = add(%b, %c) return %y"))
    assert names(plan) == [["a"], ["y"]]
    assert [v.name for v in plan.stored] == ["a"]


def test_the_next_state_needs_no_place_of_its_own() -> None:
    plan = planned(body("%h: f32[4]", "%a = exp(%h) %b = neg(%a) %c = tanh(%b) return %a, %c"))
    assert names(plan) == [["a"], ["c"]]
    assert plan.stored == []
    assert plan.shared_bytes == 32  # two places of the state


def test_views_are_computed_where_they_are_read() -> None:
    text = "%a = slice(%h) {starts=[1], sizes=[2], steps=[1]} %b = pad(%a) {pads=[1, 1]} "
    plan = planned(body("%h: f32[4]", text + "%c = exp(%b) %d = neg(%b) %y = sub(%c, %d) return %y"))
    assert names(plan) == [["y"]]


def test_sums_and_their_readers_are_in_two_phases() -> None:
    text = '%s = reduce(%h) {kind="sum", axes=[0]} %m = reduce(%h) {kind="max", axes=[0]} '
    plan = planned(body("%h: f32[4]", text + "%a = sub(%h, %s) %y = mul(%a, %m) return %y"))
    assert names(plan) == [["s", "m"], ["y"]]


@pytest.mark.parametrize(("op", "phases"), [("neg", [["s"], ["y"]]), ("exp", [["a"], ["s"], ["y"]])])
def test_what_is_read_twice_is_stored_unless_it_is_cheap(op: str, phases: list[list[str]]) -> None:
    text = f'%a = {op}(%h) %s = reduce(%a) {{kind="log_sum_exp", axes=[0]}} %y = sub(%h, %s) return %y'
    assert names(planned(body("%h: f32[4]", text))) == phases


def test_values_without_nodes_are_copied() -> None:
    plan = planned(body("%a: f32[4], %b: f32[4]", 'return %b, %a, %a as "again"', states=2))
    assert sorted(map(sorted, names(plan))) == [["a", "b"]]


@pytest.mark.parametrize(
    ("inputs", "nodes", "blocks"),
    [
        ("%h: f32[5,4]", "%y = exp(%h) return %y", 5),
        ("%h: f32[1,4]", "%y = exp(%h) return %y", 4),
        ("%h: f32[4,5]", '%s = reduce(%h) {kind="sum", axes=[0]} %y = sub(%h, %s) return %y', 5),
        ("%h: f32[4,5]", '%s = reduce(%h) {kind="sum", axes=[1]} %y = sub(%h, %s) return %y, %s', 4),
        ("%h: f32[4,5]", '%s = reduce(%h) {kind="sum", axes=[0, 1]} %y = sub(%h, %s) return %y', 1),
        ("%h: f32[256,2]", "%y = exp(%h) return %y", 256),
        ("%h: f32[1024,2]", "%y = exp(%h) return %y", 256),
        ("%h: f32[4,5]", "%y = slice(%h) {starts=[0, 4], sizes=[4, 5], steps=[1, -1]} return %y", 4),
        ("%h: f32[4,5]", "%y = slice(%h) {starts=[3, 0], sizes=[4, 5], steps=[-1, 1]} return %y", 5),
        ("%h: f32[4,4]", "%y = transpose(%h) {perm=[1, 0]} return %y", 1),
        ("%h: f32[4,5], %w: f32[5,5]", "%y = matmul(%h, %w) return %y", 4),
        ("%h: f32[4,5], %w: f32[4,4]", "%y = matmul(%w, %h) return %y", 5),
        ("%h: f32[4,5], %i: i64[5]", "%y = gather(%h, %i) {axis=1} return %y", 4),
        ("%h: f32[4,5], %i: i64[4]", "%y = gather(%h, %i) {axis=0} return %y", 5),
        ("%h: f32[4,6]", "%a = reshape(%h) {shape=[4, 2, 3]} %y = reshape(%a) {shape=[4, 6]} return %y", 4),
        ("%h: f32[4,6]", "%a = reshape(%h) {shape=[6, 4]} %y = reshape(%a) {shape=[4, 6]} return %y", 1),
        ("%h: f32[4,5]", "%a = concat(%h, %h) {axis=1} %y = slice(%a) "
         "{starts=[0, 2], sizes=[4, 5], steps=[1, 1]} return %y", 4),
    ],
)  # fmt: skip
def test_a_block_runs_a_row_where_rows_do_not_meet(inputs: str, nodes: str, blocks: int) -> None:
    op = body(inputs, nodes)
    assert planned(op).blocks == blocks
    assert bool(row_dims(op)) == (blocks > 1)


def test_rows_of_a_sequence_are_whole_where_they_meet() -> None:
    text = '%s = reduce(%x) {kind="sum", axes=[0]} %y = add(%h, %s) return %y'
    op = body("%h: f32[4,5], %x: f32[4,5]", text, sequences=1)
    assert {v.name for v in row_dims(op)} == {"h", "y"}


@pytest.mark.parametrize(
    ("inputs", "nodes"),
    [
        ("%h: f32[2,4]", '%y = cumulate(%h) {kind="sum", axis=1} return %y'),
        ("%h: f32[2,4]", '%y = pad(%h) {pads=[0, 1, 0, 0], mode="edge"} return %h, %y'),
        ("%h: f32[2,4]", "%y = concat(%h, %h, %h, %h, %h) {axis=1} return %h, %y"),
        ("%h: f32[4]", "%c = constant [1, 2, 3, 4] : f32[4] %y = add(%h, %c) return %y"),
        ("%h: i32[4]", '%s = reduce(%h) {kind="mean", axes=[0]} %y = add(%h, %s) return %y'),
        ("%h: i32[4,4]", "%y = matmul(%h, %h) return %y"),
        ("%h: f32[0]", "%y = exp(%h) return %y"),
        ("%h: f8e4m3[4]", "return %h"),
        (f"%h: f32[1,{SHARED_BYTES // 8 + 1}], %i: i64[1]", "%y = gather(%h, %i) {axis=1} return %h, %y"),
    ],
)
def test_bodies_that_no_block_runs(inputs: str, nodes: str) -> None:
    assert scan_plan(body(inputs, nodes)) is None


def test_a_body_with_much_work_is_left_to_more_blocks() -> None:
    def product(depth: int) -> Scan:
        return body(f"%h: f32[1,1024], %v: f32[1,{depth}], %w: f32[{depth},1024]", "%p = matmul(%v, %w) return %p")

    small, large = scan_plan(product(ADDENDS * (MOST_WORK - 1))), scan_plan(product(ADDENDS * MOST_WORK + 1))
    assert small is not None and small.work <= MOST_WORK
    assert large is None


@pytest.mark.parametrize(
    ("shape", "axis", "lanes"),
    [
        ((3, 3), 1, 1),
        ((3, 31), 1, 4),
        ((3, 32), 1, 32),
        ((300, 32), 1, 32),
        ((200, 32, 1), 1, 32),
        ((15, 9), 0, 2),
        ((16, 9), 0, 4),
        ((100, 9), 0, 4),
        ((100, 256), 0, 4),
        ((100, 257), 0, 2),
        ((40, 513), 0, 1),
        ((7, 8), 0, 1),
        ((100, 8), 0, 16),
        ((128, 8), 0, 32),
    ],
)
def test_threads_share_long_sums(shape: tuple[int, ...], axis: int, lanes: int) -> None:
    """A warp does where their addends are side by side, or sums are few; otherwise a few threads do."""
    wanted = ",".join("1" if d == axis else str(size) for d, size in enumerate(shape))
    inputs = f"%h: f32[{wanted}], %v: f32[{','.join(map(str, shape))}]"
    text = f'%s = reduce(%v) {{kind="max", axes=[{axis}]}} %n = neg(%s) %m = add(%h, %n) %y = sub(%m, %s) return %y'
    plan = planned(body(inputs, text))
    (total,) = plan.phases[0]
    assert plan.lanes(total) == lanes
    assert plan.depth(total) == shape[axis]


def test_bodies_are_equal_by_their_text() -> None:
    one, two = (body("%h: f32[4]", "%y = exp(%h) return %y") for _ in range(2))
    other = body("%h: f32[4]", "%y = neg(%h) return %y")
    assert one == two and hash(one) == hash(two) and one != other
    assert isinstance(one.body.graph, Graph)
    assert one.body != one.body.text
