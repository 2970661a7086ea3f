"""Test which writes of rows are one step, and what else belongs to it: text in, steps out."""

from __future__ import annotations

import pytest

from fusec.ir import Graph
from fusec.passes.partition import kernels_only
from fusec.schedule.row_writes import match_row_writes, row_write_steps
from fusec.text import parse

HEAD = "%i = constant [3, 0] : i64[2]\n  %j = constant [1, 2] : i64[2]\n"
ROTARY = "%r = rotary(%x, %c, %c)\n"
PART = "%p = slice(%r) {starts=[1,0], sizes=[2,4], steps=[1,1]}\n"
KEYS = '%k = scatter(%a, %i, %p) {reduction="none"}\n'
VALUES = '%v = scatter(%b, %i, %u) {reduction="none"}\n'

# nodes, and the steps that are more than one node
CASES: dict[str, tuple[list[str], str, str]] = {
    "keys and values": ([ROTARY, PART, KEYS, VALUES], "%r, %k, %v", "r p k v"),
    "keys": ([ROTARY, PART, KEYS], "%r, %k", "r p k"),
    "values alone": ([VALUES], "%v", ""),
    "two writes": ([VALUES, VALUES.replace("%v", "%w").replace("%b", "%a")], "%v, %w", "v w"),
    "other indices": ([ROTARY, PART, KEYS, VALUES.replace("%i", "%j")], "%k, %v", "r p k"),
    "a part that is also read elsewhere": ([ROTARY, PART, KEYS, "%y = exp(%p)"], "%k, %y", ""),
    "rows that are a copy": (
        [ROTARY, "%p = slice(%r) {starts=[0,0], sizes=[2,4], steps=[2,1]}\n", KEYS],
        "%k",
        "",
    ),
    "rows that depend on a write": (
        [ROTARY, PART, KEYS, "%y = slice(%k) {starts=[2,0], sizes=[2,4], steps=[1,1]}", VALUES.replace("%u", "%y")],
        "%k, %v",
        "r p k",
    ),
    "queries": (["%q = rotary(%x, %c, %c)\n", ROTARY.replace("%x", "%d"), PART, KEYS], "%q, %k", "q r p k"),
    "queries with other angles": (
        ["%q = rotary(%x, %z, %c)\n", ROTARY.replace("%x", "%d"), PART, KEYS],
        "%q, %k",
        "r p k",
    ),
    "queries of a written row": (
        [ROTARY, PART, KEYS, "%n = neg(%k)", "%q = rotary(%n, %c, %c)"],
        "%q",
        "r p k",
    ),
    "a write over a write": ([VALUES, VALUES.replace("%v", "%w").replace("%b", "%v")], "%w", ""),
    "sums": ([ROTARY, PART, KEYS.replace("none", "add")], "%k", ""),
    "an embedding of a written row": (
        [VALUES, ROTARY.replace("%x", "%v"), "%p = slice(%r) {starts=[1,0], sizes=[2,4], steps=[1,1]}", KEYS],
        "%k",
        "r p k",
    ),
    "one embedding for two groups": (
        [
            ROTARY,
            PART,
            KEYS,
            PART.replace("%p", "%q"),
            KEYS.replace("%k", "%l").replace("%p", "%q").replace("%i", "%j"),
        ],
        "%k, %l",
        "r p k",
    ),
}
CROSSED = """graph "crossed" (%a: f32[5,4], %b: f32[5,4], %c: f32[5,4], %d: f32[5,4], %u: f32[2,4]) {
  %i = constant [3, 0] : i64[2]
  %j = constant [1, 2] : i64[2]
  %s = scatter(%a, %i, %u) {reduction="none"}
  %t = scatter(%b, %j, %u) {reduction="none"}
  %x = slice(%s) {starts=[0,0], sizes=[2,4], steps=[1,1]}
  %y = slice(%t) {starts=[0,0], sizes=[2,4], steps=[1,1]}
  %v = scatter(%c, %j, %x) {reduction="none"}
  %w = scatter(%d, %i, %y) {reduction="none"}
  return %v, %w
}"""


def graph(parts: list[str], returned: str) -> Graph:
    inputs = "%a: f32[5,4], %b: f32[5,4], %c: f32[4], %z: f32[4], %d: f32[5,4], %x: f32[5,4], %u: f32[2,4]"
    body = "\n  ".join(part.strip() for part in [HEAD, *parts])
    return parse(f'graph "g" ({inputs}) {{\n  {body}\n  return {returned}\n}}')


@pytest.mark.parametrize("what", CASES)
def test_steps(what: str) -> None:
    parts, returned, wanted = CASES[what]
    steps = row_write_steps(graph(parts, returned))
    assert [" ".join(node.result.name for node in step) for step in steps] == ([wanted] if wanted else [])


def test_groups_do_not_wait_for_each_other() -> None:
    """Two groups of which each reads what the other writes would be a cycle."""
    steps = row_write_steps(parse(CROSSED))
    assert len(steps) == 1


def test_many_rows_are_no_such_step() -> None:
    text = 'graph "g" (%a: f32[900,4], %i: i64[300], %u: f32[300,4]) {\n  %k = scatter(%a, %i, %u) {reduction="none"}\n'
    made = parse(text + "  return %k\n}")
    assert match_row_writes(list(made.nodes)) is None


def test_a_step_with_another_op_does_more() -> None:
    made = graph([ROTARY, PART, KEYS, "%y = exp(%r)"], "%k, %y")
    (*writes, other) = [node for step in kernels_only(made).steps for node in step.nodes]
    assert other.op.name == "exp" and match_row_writes(writes) is not None
    assert match_row_writes([*writes, other]) is None
