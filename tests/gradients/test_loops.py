"""Test gradients of loops: a loop backward where a kernel runs it, else the ops of all steps; both give the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np
import pytest
from gpu.kernels.cases import build, check
from gpu.kernels.emulator import needs_compiler
from gpu.kernels.recurrent.test_scan import alignments, averages, best_tags, cell, drawn, rows, scan_op
from helpers import assert_close

import fusec
from fusec.errors import VerifyError
from fusec.gradients import grad, loops
from fusec.ir import DType, Graph, Op, TensorType
from fusec.ops import Reduce, Scan, pw
from fusec.reference import evaluate
from fusec.text import parse

F32, BOOL = DType.F32, DType.BOOL
CASES: dict[str, Callable[[], tuple[Op, list[TensorType]]]] = {
    "average": lambda: scan_op(9, [rows(F32, 3, 5), rows(F32, 3, 5), rows(F32)], 1, 1, averages),
    "alignments": lambda: scan_op(9, [rows(F32, 3, 7), rows(F32, 3, 7), rows(BOOL, 3, 7)], 1, 1, alignments),
    "tags": lambda: scan_op(6, [rows(F32, 3, 5), rows(F32, 3, 5), rows(F32, 5, 5)], 1, 1, best_tags),
    "cell": lambda: scan_op(5, [rows(F32, 2, 6), rows(F32, 2, 6), rows(F32, 2, 24), rows(F32, 6, 24)], 2, 1, cell),
    "large weights": lambda: scan_op(
        4, [rows(F32, 2, 40), rows(F32, 2, 40), rows(F32, 2, 160), rows(F32, 40, 160)], 2, 1, cell
    ),
}


def loop_of(name: str) -> Graph:
    """A graph of a scan, and of the sum of the squares of all its results."""
    op, types = CASES[name]()
    graph = Graph("loop")
    results = graph.insert(op, [graph.add_input(f"x{index}", type) for index, type in enumerate(types)]).results
    floats = [v for v in results if v.type.dtype.is_float]
    squares = [graph.add(Reduce("sum_square", tuple(range(v.type.rank)), False), v) for v in floats]
    graph.set_outputs([reduce(lambda a, b: graph.add(pw("add"), a, b), squares)], ["loss"])
    return graph


def gradients_of(graph: Graph) -> Graph:
    """Add the gradients by all floats."""
    return grad(graph, "loss", [v.name for v in graph.inputs if v.type.dtype.is_float])


@pytest.mark.parametrize("name", CASES)
def test_both_ways_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    graph = loop_of(name)
    backward = gradients_of(graph)
    with monkeypatch.context() as patched:
        patched.setattr(loops, "scan_plan", lambda op: None)
        written_out = gradients_of(graph)
    feeds = {v.name: drawn(rng, v.type) for v in backward.inputs}
    want = evaluate(written_out, feeds)
    for output, array in evaluate(backward, feeds).items():
        assert_close(array, want[output], 1e-5)
    executable = fusec.compile(backward, target="h200", tune="none")
    assert isinstance(executable, fusec.Executable)
    used = [step.signature for step in executable.compiled.program.steps]
    assert used.count("scan") == (1 if name == "large weights" else 3)
    assert len(used) < 24 or name == "large weights"


@needs_compiler
@pytest.mark.parametrize("name", [name for name in CASES if name != "large weights"])
def test_kernels_run_loops_backward(name: str, rng: np.random.Generator) -> None:
    made = [node for node in gradients_of(loop_of(name)).nodes if isinstance(node.op, Scan)]
    assert len(made) == 3
    check(
        [
            build(
                f"{name} {k}", [v.type for v in node.operands], lambda g, *v, op=node.op: g.insert(op, v).results, drawn
            )
            for k, node in enumerate(made)
        ],
        rng,
    )


def long_loop(op: str) -> Graph:
    return parse(f"""graph "g" (%x: f32[2], %a: f32[2]) {{
  %y = scan(%x, %a) {{body=graph "body" (%x: f32[2], %a: f32[2]) {{
    %m = mul(%x, %a)
    %y = {op}
    return %y
  }}, steps=6000, states=1}}
  return %y
}}""")


def test_a_loop_backward_may_have_any_number_of_steps() -> None:
    graph = grad(long_loop("tanh(%m)"), "y", ["a"], seed=True)
    found = evaluate(
        graph, {"x": np.ones(2, np.float32), "a": np.full(2, 2, np.float32), "y.seed": np.ones(2, np.float32)}
    )
    y = 0.9575040240772687  # tanh(2 y) = y
    slope = 1 - y**2
    np.testing.assert_allclose(found["a.grad"], y * slope / (1 - 2 * slope), rtol=1e-4)


def test_a_loop_of_too_many_steps_that_are_written_out_has_no_gradient() -> None:
    graph = long_loop('cumulate(%m) {kind="sum", axis=0}')
    with pytest.raises(VerifyError, match="a gradient over 6000 steps; up to 4096 are supported"):
        grad(graph, "y", ["x"], seed=True)
