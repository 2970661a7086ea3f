"""Test rounding as in the model: values inside a step that are not rounded prevent the step."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import one_program
from passes.partition.judges import AcceptAll

from fusec import driver
from fusec.errors import FusecError
from fusec.ir import Graph, Value
from fusec.lowering.virtual_rounding import OWN, ROUNDED, SAME, WIDE, value_uses
from fusec.passes import REROUNDING, names
from fusec.passes.partition import partition
from fusec.passes.partition.strict_rounding import StrictRounding
from fusec.plans.verdict import Refused
from fusec.reference import evaluate_node
from fusec.targets.target import load
from fusec.text import parse

HEAD = 'graph "g" (%x: f16[4,8], %y: f16[8,8], %z: f16[4,8], %f: f32[4,8])'
KEPT = {
    "  %a = matmul(%x, %y)\n  %b = relu(%a)": SAME,
    "  %a = matmul(%x, %y)\n  %b = gelu(%a)": WIDE,
    "  %a = matmul(%x, %y)\n  %b = add(%a, %z)": WIDE,
    "  %a = matmul(%x, %y)\n  %b = max(%a, %z)": SAME,
    "  %a = matmul(%x, %y)\n  %b = clip(%a) {min=0.0, max=6.0}": SAME,
    "  %a = matmul(%x, %y)\n  %b = clip(%a) {min=0.0, max=0.1}": WIDE,
    "  %a = matmul(%x, %y)\n  %c = constant [0.0] : f16[1]\n  %b = add(%a, %c)": SAME,
    "  %a = matmul(%x, %y)\n  %b = cast(%a) {to=f32}": WIDE,
    "  %a = exp(%x)\n  %b = matmul(%a, %y)": ROUNDED,
    "  %a = exp(%f)\n  %b = neg(%a)": OWN,
    "  %a = cast(%f) {to=f16}\n  %b = exp(%a)": WIDE,
}


@pytest.mark.parametrize("body", KEPT)
def test_values_between_two_ops(body: str) -> None:
    graph = parse(f"{HEAD} {{\n{body}\n  return %b\n}}")
    assert [(e.value.name, e.user.result.name, e.rounding) for e in value_uses(list(graph.nodes))] == [
        ("a", "b", KEPT[body])
    ]


def test_only_bodies_that_keep_the_rounding_are_judged() -> None:
    bodies = [parse(f"{HEAD} {{\n{body}\n  return %b\n}}") for body in KEPT]
    inner = AcceptAll()
    verdicts = StrictRounding(inner).judge(bodies)
    wide = [kept == WIDE for kept in KEPT.values()]
    assert [isinstance(v, Refused) for v in verdicts] == wide
    assert len(inner.asked) == wide.count(False)
    first = next(v for v in verdicts if isinstance(v, Refused))
    assert first.message == "%a would not be rounded to f16 before gelu, as --rounding source demands"


def test_the_longest_step_that_keeps_the_rounding_is_taken() -> None:
    graph = parse(f"{HEAD} {{\n  %a = matmul(%x, %y)\n  %b = relu(%a)\n  %c = gelu(%b)\n  return %c\n}}")
    program = partition(graph, StrictRounding(AcceptAll()), load("h200"))
    assert [step.signature for step in program.steps] == ["matmul+relu", "gelu"]
    assert any(isinstance(r.reason, Refused) and r.reason.code == "FUSEC_ROUNDING" for r in program.refusals)


def op_by_op(graph: Graph, feeds: dict[str, np.ndarray]) -> np.ndarray:
    held: dict[Value, np.ndarray] = {v: feeds[v.name] for v in graph.inputs}
    for node in graph.nodes:
        held.update(zip(node.results, evaluate_node(node, [held[v] for v in node.operands]), strict=True))
    return held[graph.outputs[0]]


@pytest.mark.cudnn
def test_a_model_of_16_bits_gives_what_its_ops_give_one_by_one(rng: np.random.Generator) -> None:
    """Sums of small integers are exact in fp32, so that only the roundings between ops can tell the two apart."""
    graph = parse("""graph "g" (%x: f16[16,64], %b: f16[16,32], %z: f16[16,32]) {
  %w = constant weight("w") : f16[64,32]
  %m = matmul(%x, %w)
  %s = add(%m, %b)
  %t = mul(%s, %z)
  %r = relu(%t)
  return %r
}""", {"w": rng.integers(-40, 40, (64, 32)).astype(np.float16)})  # fmt: skip
    feeds = {v.name: rng.integers(-40, 40, v.type.shape).astype(np.float16) for v in graph.inputs}
    want = op_by_op(graph, feeds)
    source = one_program(driver.compile(graph, target="h200", rounding="source"))
    assert all(not step.virtual or step.signature == "mul+relu" for step in source.compiled.program.steps)
    np.testing.assert_array_equal(source(**feeds), want)
    fused = one_program(driver.compile(graph, target="h200"))
    assert (fused(**feeds) != want).any(), "the data show no rounding"
    assert fused.compiled.program.launches < source.compiled.program.launches


@pytest.mark.cudnn
def test_rewrites_that_round_otherwise_are_left_out_in_16_bits_only() -> None:
    assert names() >= REROUNDING
    graph = parse('graph "g" (%x: f32[4]) {\n  %s = sigmoid(%x)\n  %y = mul(%x, %s)\n  return %y\n}')
    for precision, op in (("fp32", "swish"), ("fp16", "mul")):
        compiled = driver.build(graph, target="h200", precision=precision, rounding="source", disable=["precision"])
        assert any(n.op.name == op for n in compiled.graph.nodes), precision
    with pytest.raises(FusecError, match="rounding is one of fused, source, fastest, not 'exact'"):
        driver.build(graph, rounding="exact")
