"""Export loops as ONNX: onnxruntime gives the same numbers, and the front end imports a loop again."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers import assert_close

from fusec import frontends
from fusec.errors import LoweringError
from fusec.exporters.onnx import to_onnx
from fusec.ir import Graph, HostArray
from fusec.reference import evaluate
from fusec.text import parse

WEIGHTS = """graph "g" (%x0: f32[2,3], %c: f32[2,3], %y0: f32[9,2,3], %w: f32[3,3]) {
  %v = mul(%c, %c)
  %out, %d, %t, %k = scan(%x0, %v, %y0, %w) {body=graph "body" (%x0: f32[2,3], %v: f32[2,3],
      %t_1: f32[2,3], %w: f32[3,3]) {
    %half = constant [0.5] : f32[1]
    %p = matmul(%x0, %w)
    %s = add(%p, %t_1)
    %out = swish(%s) {beta=1.5}
    %m = mul(%v, %half)
    %n = add(%m, %out)
    return %out, %n, %s, %s as "again"
  }, steps=9, states=2, sequences=1}
  %t0 = add(%out, %d)
  return %out, %t0 as "t_1", %t, %k
}"""
COUNTED = """graph "g" (%x: f32[4], %i: i64[]) {
  %y, %j, %r = scan(%x, %i) {body=graph "body" (%x: f32[4], %i: i64[]) {
    %one = constant [1] : i64[]
    %j = add(%i, %one)
    %f = cast(%j) {to=f32}
    %d = div(%x, %f)
    return %d, %j, %x
  }, steps=11, states=2}
  return %y, %j, %r
}"""
PASSED_ON = """graph "g" (%s: f32[], %x: f32[8], %y: bool[8,2], %w: f32[2]) {
  %a, %b, %c, %d, %e = scan(%s, %x, %y, %w) {body=graph "body" (%s: f32[], %x: f32[], %y: bool[2], %w: f32[2]) {
    %two = constant [2] : f32[1]
    %z = sub(%s, %x)
    %q = where(%y, %w, %two)
    return %z, %x, %w, %two, %q
  }, steps=8, states=1, sequences=2}
  return %a, %b, %c, %d, %e
}"""
NESTED = """graph "g" (%s: f32[3], %x: f32[8,3], %w: f32[3]) {
  %y = scan(%s, %x, %w) {body=graph "body" (%s: f32[3], %x: f32[3], %w: f32[3]) {
    %p = mul(%s, %w)
    %y = scan(%p, %w, %x) {body=graph "body" (%s: f32[3], %w: f32[3], %x: f32[3]) {
      %p = mul(%s, %w)
      %y = sub(%x, %p)
      return %y
    }, steps=2, states=1}
    return %y
  }, steps=8, states=1, sequences=1}
  return %y
}"""
FEW_STEPS = PASSED_ON.replace("[8", "[2").replace("steps=8", "steps=2")
SMALL = {"weights": WEIGHTS, "counted": COUNTED, "passed on": PASSED_ON, "nested": NESTED, "few steps": FEW_STEPS}


def feeds_of(graph: Graph, rng: np.random.Generator) -> dict[str, HostArray]:
    made: dict[str, HostArray] = {}
    for value in graph.inputs:
        type = value.type
        drawn = rng.uniform(-2, 2, type.shape) if type.dtype.is_float else rng.integers(0, 2, type.shape)
        made[value.name] = drawn.astype(type.dtype.numpy)
    return made


@pytest.mark.parametrize("name", SMALL)
def test_an_exported_loop_gives_the_same_numbers(name: str, rng: np.random.Generator) -> None:
    graph = parse(SMALL[name])
    model = to_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    feeds = feeds_of(graph, rng)
    want = evaluate(graph, feeds)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    back = frontends.load(model.SerializeToString())
    back.verify()
    again = evaluate(back, feeds)
    for output, got in zip(graph.output_names, session.run(list(graph.output_names), feeds), strict=True):
        array = np.asarray(got)
        assert array.dtype == want[output].dtype == again[output].dtype
        assert_close(array, want[output], 1e-5)
        assert_close(again[output], want[output], 1e-5)


@pytest.mark.parametrize(("name", "loops"), [("weights", 1), ("counted", 1), ("passed on", 1), ("few steps", 0)])
def test_a_loop_is_imported_as_a_loop(name: str, loops: int) -> None:
    back = frontends.load(to_onnx(parse(SMALL[name])).SerializeToString())
    assert [node.op.name for node in back.nodes].count("scan") == loops


def test_names_of_a_model_are_all_different() -> None:
    """ONNX lets a body see the names outside of it, so that an equal name inside would be another value."""
    graph = to_onnx(parse(NESTED)).graph
    names = [v.name for v in graph.input]
    todo = [graph]
    while todo:
        each = todo.pop()
        names += [o for n in each.node for o in n.output] + [t.name for t in each.initializer]
        names += [] if each is graph else [v.name for v in each.input]
        todo += [a.g for n in each.node for a in n.attribute if a.type == onnx.AttributeProto.GRAPH]
    assert len(names) > 15
    assert len(names) == len(set(names))


def test_a_body_that_onnx_cannot_express_is_refused() -> None:
    graph = parse("""graph "g" (%s: u64[2], %x: f32[4]) {
  %y = scan(%x, %s) {body=graph "body" (%x: f32[4], %s: u64[2]) {
    %r = random_bits(%s) {shape=[4]}
    %f = cast(%r) {to=f32}
    %y = add(%x, %f)
    return %y
  }, steps=8, states=1}
  return %y
}""")
    with pytest.raises(LoweringError, match="no random bits that follow from a state"):
        to_onnx(graph)
