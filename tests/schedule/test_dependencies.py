"""Test which steps wait for others: for data and for memory, but not for other parts of one concat."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from lowering.lowers_judge import LowersJudge

from fusec.passes.base import Options
from fusec.passes.partition import kernels_only, partition
from fusec.passes.partition.concat_in_place import concat_in_place
from fusec.schedule.dependencies import lanes, waits
from fusec.schedule.memory_plan import plan_memory
from fusec.schedule.program import Kind, Program
from fusec.targets.target import load
from fusec.text import parse

TEXT = """graph "g" (%x: f32[2,16,4,4]{0,2,3,1}) {
  %a = exp(%x)
  %b = tanh(%x)
  %c = concat(%a, %b) {axis=1}
  %d = sqrt(%c)
  %e = reshape(%d) {shape=[2,512]}
  return %e
}"""


def program(text: str) -> Program:
    return concat_in_place(kernels_only(parse(text)), LowersJudge(), Options())


def by_name(of: Program) -> dict[str, tuple[str, ...] | None]:
    found = waits(of, plan_memory(of))
    assert found is not None
    names = [step.outputs[0].name for step in of.steps]
    return {name: None if w is None else tuple(names[i] for i in w) for name, w in zip(names, found, strict=True)}


def test_parts_of_a_concat_are_written_side_by_side() -> None:
    of = program(TEXT)
    assert by_name(of) == {"a": (), "b": (), "c": None, "d": ("a", "b"), "e": ("a", "b", "d")}  # e where a and b were
    found = waits(of, plan_memory(of))
    assert found is not None
    assert lanes(found) == (0, 1, -1, 1, 1)
    assert lanes(found, 1) == (0, 0, -1, 0, 0)


REUSED = """graph "g" (%x: f32[2,16,4,4]{0,2,3,1}, %z: f32[1,32,4,4]{0,2,3,1}) {
  %a = exp(%x)
  %b = tanh(%x)
  %c = concat(%a, %b) {axis=1}
  %d = sqrt(%c)
  %e = neg(%a)
  %f = exp(%z)
  %g = tanh(%z)
  %h = concat(%f, %g) {axis=1}
  %i = sqrt(%h)
  return %d, %e, %i
}"""


def test_parts_of_a_later_concat_in_the_same_memory_have_other_rows() -> None:
    """%a has the first half of rows of 128 bytes; %g the second half of rows of 256, where the second row of %a is."""
    of = program(REUSED)
    plan = plan_memory(of)
    at = {v.name: plan.offsets[v] for v in of.graph.values() if v in plan.offsets}
    assert (at["a"], at["f"], at["g"]) == (at["c"], at["c"], at["c"] + 128), "one piece of memory"
    found = by_name(of)
    for name in "fg":
        assert {"d", "e"} <= set(found[name] or ()), "those that read what was there"
    assert "f" not in (found["g"] or ())


def test_a_part_reaches_to_its_last_row() -> None:
    """The rows of %a have gaps. A later step that gets memory in the last gap waits for the readers of %a."""
    of = program(TEXT.replace("%e = reshape(%d) {shape=[2,512]}\n  return %e", "%e = neg(%a)\n  return %d, %e"))
    plan, values = plan_memory(of), {v.name: v for v in of.graph.values()}
    last_row = plan.offsets[values["a"]] + values["a"].type.nbytes + 64  # in the row after as many bytes as it has
    assert last_row < plan.offsets[values["a"]] + values["a"].type.span * 4
    moved = dataclasses.replace(plan, offsets={**plan.offsets, values["d"]: last_row})
    found = waits(of, moved)
    assert found is not None
    names = [step.outputs[0].name for step in of.steps]
    assert names.index("d") in (found[names.index("e")] or ())


def test_memory_that_is_used_again_is_waited_for() -> None:
    """%d and %e can have the memory of %a, which %b reads."""
    text = """graph "g" (%x: f32[64]) {
      %a = exp(%x)
      %b = tanh(%a)
      %c = sqrt(%b)
      %d = neg(%c)
      return %d
    }"""
    of = program(text)
    plan = plan_memory(of)
    names = {v.name: v for v in of.graph.values()}
    again = [n for n in "bcd" if plan.offsets[names[n]] == plan.offsets[names["a"]]]
    assert again, "the plan has slots that are used again"
    found = by_name(of)
    for name in again:
        assert "b" in (found[name] or ()) or name == "b"


@pytest.mark.parametrize("wide", [True, False])
def test_a_random_order_that_keeps_to_them_gives_the_same(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, wide: bool
) -> None:
    """Steps in any order that the waits allow compute the same as in program order, on the simulator."""
    from gpu.autotune.dense_block import dense_block

    from fusec.execution.compilation import Compiled
    from fusec.passes import PIPELINE
    from fusec.passes.base import run
    from fusec.passes.partition import partition
    from fusec.runtime import Executable, SimulatorBackend
    from fusec.targets.target import load

    monkeypatch.setattr(SimulatorBackend, "side_by_side", wide)
    source, judge, target = dense_block(1, 16, 4, 16, 3), LowersJudge(), load("h200")
    graph = run(PIPELINE, source.clone(), Options())
    of = concat_in_place(partition(graph, judge, target), judge, Options())
    net = Executable(Compiled(source, of, target, Options(), judge), SimulatorBackend())
    x = rng.standard_normal((1, 16, 8, 8)).astype(np.float32)
    want = net(x)
    found = waits(of, net.memory)
    assert found is not None
    for _ in range(5):
        left = [i for i, w in enumerate(found) if w is not None]
        done: set[int] = set()
        net.input_buffers["x"][...] = x
        while left:
            ready = [i for i in left if set(found[i] or ()) <= done]
            index = int(rng.choice(ready))
            net._launches[index]()
            done.add(index)
            left.remove(index)
        got = net._fetchers[0](None, True)
        np.testing.assert_array_equal(got, want)


TOWERS = """graph "g" (%x: f32[1024]) {
  %a = exp(%x)
  %b = tanh(%a)
  %c = neg(%b)
  %d = sin(%a)
  %e = neg(%d)
  %f = cos(%a)
  %g = neg(%f)
  %h = add(%c, %e)
  %i = add(%h, %g)
  return %i
}"""


def test_memory_for_steps_side_by_side_holds_none_of_them_back() -> None:
    of = kernels_only(parse(TOWERS))
    plans = {which: plan_memory(of, side_by_side=which) for which in (False, True)}
    assert plans[False].nbytes < plans[True].nbytes <= 2 * plans[False].nbytes
    narrow, wide = (waits(of, plans[which]) for which in (False, True))
    assert narrow is not None and wide is not None
    assert (max(lanes(narrow)), max(lanes(wide))) == (0, 2)
    names = [step.outputs[0].name for step in of.steps]
    needs = {"b": "a", "c": "b", "d": "a", "e": "d", "f": "a", "g": "f", "h": "ce", "i": "hg"}
    needed: dict[str, set[str]] = {"a": set()}
    for name in names[1:]:
        needed[name] = set(needs[name]).union(*(needed[n] for n in needs[name]))
    for name, waited in zip(names, wide, strict=True):
        assert {names[i] for i in waited or ()} <= needed[name], "for what it needs at first or second hand alone"


@pytest.mark.parametrize("most", [1, 2, 3])
def test_lanes_never_hold_steps_back_that_wait_for_nothing_in_them(most: int) -> None:
    chain = ((), (0,), (0,), (1, 2), (3,), (3,), (4, 5))
    found = lanes(chain, most)
    assert max(found) == min(most, 2) - 1
    for index, lane in enumerate(found):
        assert 0 <= lane < most, index


def test_the_branches_of_a_residual_block_run_side_by_side() -> None:
    """The convolution at the end of the long branch takes the sum, wherever the exporter wrote the short one."""
    block = """graph "g" (%x: f16[1,8,16,16]{0,2,3,1}) {
      %w = constant weight("w") : f16[8,8,1,1]{0,2,3,1}
      %h = relu(%x) : f16[1,8,16,16]{0,2,3,1}
      %a = conv(%h, %w) {strides=[1,1], pads=[0,0,0,0], dilations=[1,1], groups=1} : f16[1,8,16,16]{0,2,3,1}
      %c = conv(%a, %w) {strides=[1,1], pads=[0,0,0,0], dilations=[1,1], groups=1} : f16[1,8,16,16]{0,2,3,1}
      %d = conv(%h, %w) {strides=[1,1], pads=[0,0,0,0], dilations=[1,1], groups=1} : f16[1,8,16,16]{0,2,3,1}
      %s = add(%c, %d) : f16[1,8,16,16]{0,2,3,1}
      return %s, %h
    }"""
    weight = np.random.default_rng(2).standard_normal((8, 8, 1, 1)).astype(np.float16)
    of = partition(parse(block, {"w": weight}), LowersJudge(), load("h200"))
    assert [step.signature for step in of.steps if step.kind is Kind.CUDNN][-1] == "conv+add"
    found = waits(of, plan_memory(of, side_by_side=True))
    assert found is not None
    lane = {step.outputs[0].name: place for step, place in zip(of.steps, lanes(found), strict=True)}
    assert lane["d"] != lane["a"]
