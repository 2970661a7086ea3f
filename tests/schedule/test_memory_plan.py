"""Test the memory plan: values alive together do not overlap, views are inside their operands, little is wasted."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runtime import executable

from fusec.ir import DType, Graph, TensorType
from fusec.ops import pw
from fusec.schedule.memory_plan import ALIGNMENT_BYTES, Life, _live_bytes, _place, live_bytes, plan_memory

LIVES = st.lists(st.tuples(st.integers(0, 5000), st.integers(-1, 20), st.integers(0, 6)), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(LIVES, st.randoms(use_true_random=False))
def test_values_alive_together_do_not_overlap(sizes: list[tuple[int, int, int]], random: object) -> None:
    graph = Graph("g")
    lives = [
        Life(graph.add_input(f"x{i}", TensorType((n,), DType.U8)), n, first, first + length)
        for i, (n, first, length) in enumerate(sizes)
    ]
    order = list(range(len(lives)))
    random.shuffle(order)  # type: ignore[attr-defined]
    offsets, top = _place(lives, order)
    for (a, at), (b, bt) in combinations(zip(lives, offsets.tolist(), strict=True), 2):
        together = a.first <= b.last and b.first <= a.last
        apart = at + a.nbytes <= bt or bt + b.nbytes <= at
        assert apart or not together or not (a.nbytes and b.nbytes)
    assert all(at % ALIGNMENT_BYTES == 0 for at in offsets)
    assert top >= max(at + life.nbytes for life, at in zip(lives, offsets.tolist(), strict=True))
    assert top >= _live_bytes(lives, 30)


def test_views_are_inside_their_operand_and_prolong_its_life() -> None:
    net = executable(
        """graph "g" (%x: f32[4,64]) {
  %a = cosh(%x)
  %p, %q = split(%a) {axis=0, sizes=[1, 3]}
  %b = cosh(%p)
  %c = cosh(%b)
  %d = cosh(%q)
  return %c, %d
}"""
    )
    plan, values = net.memory, {v.name: v for v in net.compiled.graph.values()}
    assert plan.offsets[values["p"]] == plan.offsets[values["a"]]
    assert plan.offsets[values["q"]] == plan.offsets[values["a"]] + 256
    assert values["p"] not in {life.value for life in plan.lives}
    (whole,) = (life for life in plan.lives if life.value is values["a"])
    assert whole.last == max(i for i, s in enumerate(net.compiled.program.steps) if values["q"] in s.inputs)


def test_a_chain_needs_two_slots() -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType((1024, 1024), DType.F32))
    for _ in range(10):
        x = graph.add(pw("cosh"), x)
    graph.set_outputs([x], ["y"])
    from fusec.text import parse

    net = executable(str(parse(str(graph))))
    assert net.memory.nbytes == net.memory.live_bytes == 2 * 4 * 1024 * 1024
    assert live_bytes(net.compiled.program) == net.memory.live_bytes


def test_elements_below_8_bits_share_bytes_except_in_numpy() -> None:
    """A mask of 2 bits that counted as bytes would take four times its memory on a GPU."""
    net = executable(
        """graph "g" (%x: f16[64,1024]) {
  %o = constant [0.0] : f16[]
  %p = cmp_gt(%x, %o)
  %k = cast(%p) {to=u2}
  %y = cosh(%x)
  return %k, %y
}"""
    )
    program = net.compiled.program
    mask = program.graph.outputs[0]
    for plan, nbytes in ((plan_memory(program), 16 << 10), (net.memory, 64 << 10)):
        assert {life.value: life.nbytes for life in plan.lives}[mask] == nbytes
    assert plan_memory(program).nbytes < net.memory.nbytes
    x = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float16)
    positive, y = net.run(None, {"x": x})
    assert np.array_equal(positive.astype(bool), x > 0)
    assert np.all(y >= 1)


@pytest.mark.parametrize("seed", range(3))
def test_waste_is_small_in_graphs_with_long_lives(seed: int) -> None:
    """A UNet of sorts: every second value on the way down is read again on the way up."""
    rng = np.random.default_rng(seed)
    graph = Graph("g")
    lives: list[Life] = []
    for i in range(60):
        size = int(rng.integers(1, 40)) * 4096
        last = 119 - i if i % 2 else i + 1
        lives.append(Life(graph.add_input(f"d{i}", TensorType((size,), DType.U8)), size, i, last))
    for i in range(60, 120):
        size = int(rng.integers(1, 40)) * 4096
        lives.append(Life(graph.add_input(f"u{i}", TensorType((size,), DType.U8)), size, i, i + 1))
    orders = [sorted(range(120), key=lambda i: (-lives[i].nbytes, i)), list(range(120))]
    best = min(_place(lives, order)[1] for order in orders)
    assert best <= 1.1 * _live_bytes(lives, 130)


def test_an_empty_program_needs_nothing() -> None:
    plan = plan_memory(executable('graph "g" (%x: f32[0]) {\n  return %x\n}').compiled.program)
    assert plan.nbytes == plan.live_bytes == 0
