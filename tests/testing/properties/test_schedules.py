"""Test the properties of schedules: they find missing waits, and state that is replaced too early."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fusec.ir import Graph, Value
from fusec.schedule.dependencies import Waits, waits
from fusec.schedule.program import Program
from fusec.testing.case import Case, MismatchError
from fusec.testing.properties import schedules
from fusec.testing.properties.schedules import any_order_agrees, state_is_read_in_time
from fusec.text import parse

CASE = Case(seed=3)
TOWERS = """graph "g" (%x: f32[4,64]) {
  %a = softmax(%x)
  %b = cumulate(%a) {kind="sum", axis=1}
  %c = softmax(%b)
  %d = cumulate(%x) {kind="sum", axis=0}
  %e = softmax(%d)
  %f = add(%c, %e)
  %g = softmax(%f)
  return %g
}"""
STATE = """graph "g" (%a: f32[4,4], %b: f32[4,4]) {
  %n = sub(%a, %b)
  %m = sub(%b, %a)
  return %n, %m
}"""
ROW = """graph "g" (%a: f32[4,4], %x: f32[4,4]) {
  %r = slice(%a) {starts=[0,0], sizes=[1,4], steps=[1,1]}
  %n = mul(%r, %x)
  return %n
}"""


@pytest.mark.parametrize("text", [TOWERS, STATE, ROW])
def test_correct_program_passes(text: str) -> None:
    graph = parse(text)
    any_order_agrees(graph, CASE)
    state_is_read_in_time(graph, CASE)


def test_missing_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(program: Program, plan: object) -> Waits | None:
        told = waits(program, plan)  # type: ignore[arg-type]
        assert told is not None
        last = max(i for i, before in enumerate(told) if before)
        return tuple(None if before is None else () if i == last else before for i, before in enumerate(told))

    monkeypatch.setattr(schedules, "waits", forgetful)
    graph = parse(TOWERS)
    with pytest.raises(MismatchError, match=r"with its steps in the order \[.*\], output %g has other bits"):
        _ = [any_order_agrees(graph, Case(seed)) for seed in range(8)]


def always(program: Program, updates: Mapping[Value, Value]) -> dict[Value, Value]:
    return {new: old for old, new in updates.items()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (STATE, "is another when it is computed last|is read by sub when it is replaced"),
        (ROW, r"element \[\d, \d\] of %n is another when it is computed last, with %n in place of %a"),
        (STATE.replace("return %n, %m", "%k = exp(%a)\n  return %n, %m, %k"), "is read by .* when it is replaced"),
        (ROW.replace("return %n", "return %n, %r"), "is returned when it is replaced"),
        (
            STATE.replace("%n = sub(%a, %b)", "%t = transpose(%a) {perm=[1,0]}\n  %n = sub(%t, %b)"),
            "is another when|is read",
        ),
    ],
)
def test_state_that_is_replaced_too_early_is_found(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph: Graph = parse(text)
    state_is_read_in_time(graph, CASE)
    monkeypatch.setattr(schedules, "in_place", always)
    with pytest.raises(MismatchError, match=message):
        state_is_read_in_time(graph, CASE)
