"""Test the proof for batches: a row that may be batched is the same at any place, next to any other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops.cases import CASES

from fusec.dynamic_shapes.batch_proof import require_batches
from fusec.errors import ModelError, VerifyError
from fusec.ir import Constant, DType, Graph, Literal, TensorType
from fusec.reference import evaluate
from fusec.text import parse

ROWS = 4


def batch_of(op: Any, arrays: list[np.ndarray], which: set[int]) -> Graph:
    """The op on inputs `which`, with all other operands as constants."""
    graph = Graph("g")
    operands = []
    for i, array in enumerate(arrays):
        type = TensorType(array.shape, DType.of(array.dtype))
        if i in which:
            operands.append(graph.add_input(f"x{i}", type))
        else:
            operands.append(graph.insert(Constant(Literal(type, lambda array=array: array)), []).result)
    results = graph.insert(op, operands).results
    graph.set_outputs(results, [f"y{i}" for i in range(len(results))])
    return graph


@pytest.mark.parametrize("name", sorted(CASES))
def test_rows_that_pass_may_be_in_any_order(name: str, rng: np.random.Generator) -> None:
    """For every op, with any of its operands as inputs, the others as constants."""
    for case in CASES[name]:
        arrays = list(case.arrays(rng))
        for which in ({0}, {0, 1}, set(range(len(arrays)))):
            inputs = {i for i in which if i < len(arrays)}
            sizes = {arrays[i].shape[0] if arrays[i].ndim else 0 for i in inputs}
            if not inputs or len(sizes) > 1 or not sizes.isdisjoint((0, 1)):
                continue
            try:
                graph = batch_of(case.op, arrays, inputs)
                require_batches([graph])
            except (ModelError, VerifyError):
                continue
            feeds = {f"x{i}": arrays[i] for i in inputs}
            want, got = evaluate(graph, feeds), evaluate(graph, {k: v[::-1].copy() for k, v in feeds.items()})
            for output in want:
                np.testing.assert_allclose(got[output][::-1], want[output], rtol=1e-5, atol=1e-6, err_msg=name)


def graph(text: str) -> Graph:
    return parse('graph "g" ' + text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(%x: f32[4,3]) { %y = gen_index(%x) {axis=0} return %y }", "depends on the number of its row"),
        ("(%x: f32[4,3]) { %y = softmax(%x) {axis=0} return %y }", "softmax works along it"),
        (
            '(%x: f32[4,3]) { %y = scan(%x) {body=graph "b" (%h: f32[4,3]) { %i = gen_index(%h) {axis=0}'
            " %z = add(%h, %i) return %z }, steps=3, states=1} return %y }",
            "depends on the number of its row",
        ),
        ("(%x: f32[4,3], %w: f32[3,2]) { %y = matmul(%x, %w) return %y }", "input %w f32.3,2. has no batch of 4"),
        ("(%x: f32[4,3]) { %y = transpose(%x) {perm=[1, 0]} return %y }", "has no batch of 4 as dim 0"),
        ("(%x: f32[4,4]) { %y = transpose(%x) {perm=[1, 0]} return %y }", "does not have the batch as dim 0"),
    ],
)
def test_what_is_no_batch(text: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        require_batches([graph(text)])


LOOP = """(%x: f32[4,2,3]) {{
  %s = constant [{}] : f32[4,1]
  %w = constant [{}] : f32[4,1]
  %t = transpose(%x) {{perm=[1,0,2]}}
  %z, %r = scan(%s, %t, %w) {{body=graph "body" (%s: f32[4,1], %x: f32[4,3], %w: f32[4,1]) {{
    %a = reduce(%x) {{kind="sum", axes=[1]}}
    %b = mul(%s, %a)
    %z = {}
    return %z, %b
  }}, steps=2, states=1, sequences=1}}
  %y = transpose(%r) {{perm=[1,0,2]}}
  return {}
}}"""
SAME, OTHERS = "0.5, 0.5, 0.5, 0.5", "1.0, 2.0, 3.0, 4.0"


def test_rows_of_a_loop_are_a_batch() -> None:
    require_batches([graph(LOOP.format(SAME, SAME, "identity(%b)", "%z, %y"))])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((OTHERS, SAME, "identity(%b)", "%z, %y"), "rows meet different numbers of operand %s"),
        ((SAME, SAME, "add(%b, %w)", "%z, %y"), "rows meet different numbers of operand %w"),
        ((SAME, SAME, "gen_index(%b) {axis=0}", "%z, %y"), "depends on the number of its row"),
    ],
)
def test_loops_whose_rows_are_no_batch(values: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        require_batches([graph(LOOP.format(*values))])


def test_a_state_that_loses_its_rows_is_no_batch() -> None:
    text = """(%h: f32[4,1]) {
  %w = constant [1.0, 1.0, 1.0, 1.0] : f32[4,1]
  %z, %y = scan(%h, %w) {body=graph "body" (%h: f32[4,1], %w: f32[4,1]) { return %w, %h }, steps=2, states=1}
  %r = slice(%y) {starts=[0,0,0], sizes=[1,4,1], steps=[1,1,1]}
  %a = reshape(%r) {shape=[4,1]}
  return %a
}"""
    with pytest.raises(ModelError, match="a step of a loop moves it"):
        require_batches([graph(text)])


def test_rows_of_a_loop_that_begins_with_equal_states_pass() -> None:
    text = """(%x: f32[SIZE,9,2]) {
      %c = constant [0.5] : f32[1,1]
      %h = expand(%c) {shape=[SIZE, 2]}
      %t = transpose(%x) {perm=[1, 0, 2]}
      %y = scan(%h, %t) {body=graph "b" (%h: f32[SIZE,2], %r: f32[SIZE,2]) {
        %z = max(%h, %r)
        return %z
      }, steps=9, states=1, sequences=1}
      return %y
    }"""
    require_batches([graph(text.replace("SIZE", size)) for size in "24"])


def test_two_sizes_must_compute_the_same() -> None:
    def scaled(size: int, by: float) -> Graph:
        one = Graph("g")
        x = one.add_input("x", TensorType((size, 3), DType.F32))
        literal = Literal(TensorType((), DType.F32), lambda: np.array(by, np.float32))
        factor = one.insert(Constant(literal), []).result
        text = graph("(%a: f32[2], %b: f32[2]) { %y = mul(%a, %b) return %y }")
        one.set_outputs(one.insert(next(iter(text.nodes)).op, [x, factor]).results, ["y"])
        return one

    require_batches([scaled(2, 0.5), scaled(4, 0.5)])
    with pytest.raises(ModelError, match="a number depends on it"):
        require_batches([scaled(2, 0.5), scaled(4, 0.25)])
