"""Test that attention and flipped convolutions that cuDNN refuses are expanded: the meaning and the reason stay."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_close
from passes.partition.judges import RUNTIME, AcceptAll

from fusec.ir import DType, Graph, TensorType
from fusec.ops import Attention, FlippedConv
from fusec.passes import EARLY_PASSES
from fusec.passes.attention.expand_attention import expand
from fusec.passes.base import Options, run
from fusec.passes.layout.assign_layout import AssignLayout
from fusec.passes.partition import partition
from fusec.passes.partition.refused_ops import expand_refused
from fusec.plans.verdict import UNASKED, Refused, Verdict
from fusec.reference import evaluate
from fusec.schedule.program import Program
from fusec.targets.target import load
from fusec.text import parse

MODEL = """graph "g" (%x: f16[2,5,32], %k: f16[2,4,5,8], %b: f16[5,5]) {
  %q = reshape(%x) {shape=[2,5,4,8]}
  %t = transpose(%q) {perm=[0,2,1,3]}
  %first = attention(%t, %k, %k) {scale=0.5, causal=true}
  %second = attention(%first, %k, %first, %b) {scale=0.25}
  %m = transpose(%second) {perm=[0,2,1,3]}
  %y = reshape(%m) {shape=[2,5,32]}
  return %y
}"""


class NoBias(AcceptAll):
    """Refuses attention with a bias."""

    def verdict(self, body: Graph) -> Verdict:
        biased = any(isinstance(n.op, Attention) and len(n.operands) == 4 for n in body.nodes)
        return Refused("plan", "NOT_SUPPORTED", "no bias here") if biased else RUNTIME


def settled(oracle: AcceptAll, model: str = MODEL) -> tuple[Graph, Program, Program]:
    source, options = parse(model), Options()

    def cut(graph: Graph) -> Program:
        return partition(graph, oracle, load("h200"))

    unlaid = run(EARLY_PASSES, source.clone(), options)
    first = cut(run((AssignLayout(),), unlaid.clone(), options))
    return source, first, expand_refused(first, lambda: unlaid.clone(), cut, oracle, options)


def test_refused_attention_is_expanded_and_the_rest_stays(rng: np.random.Generator) -> None:
    source, before, after = settled(NoBias())
    assert [n.op.name for n in before.graph.nodes].count("attention") == 2
    names = [n.op.name for n in after.graph.nodes]
    assert names.count("attention") == 1 and names.count("softmax") == 1
    (refusal,) = [r for r in after.refusals if isinstance(r.reason, Refused)]
    assert refusal.reason == Refused("plan", "NOT_SUPPORTED", "no bias here")
    assert [n.op.name for n in refusal.nodes] == ["matmul", "softmax", "matmul"]
    assert "attention" in [n.op.name for n in refusal.body.nodes]
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float16) for v in source.inputs}
    (want,) = evaluate(source, feeds, precision=DType.F64).values()
    (got,) = evaluate(after.graph, feeds, precision=DType.F64).values()
    assert_close(got, want, 1e-12)


def test_accepted_attention_is_not_expanded() -> None:
    _, before, after = settled(AcceptAll())
    assert after is before


def test_attention_that_no_time_was_left_to_ask_about_is_not_expanded() -> None:
    """One kernel runs it. Its products would run as kernels as well."""

    class Spent(AcceptAll):
        def verdict(self, body: Graph) -> Verdict:
            return UNASKED

    _, before, after = settled(Spent())
    assert after is before and {r.reason for r in after.refusals if isinstance(r.reason, Refused)} == {UNASKED}


FLIPPED = """graph "g" (%x: f16[2,4,5,6], %v: f16[6,2,3,2], %u: f16[6,6,1,2]) {
  %w = mul(%v, %v)
  %first = conv_flipped(%x, %w) {strides=[1,2], pads=[1,0,2,1], dilations=[2,1], groups=2}
  %h = tanh(%first)
  %second = conv_flipped(%h, %u) {strides=[1,1], pads=[0,0,0,0], dilations=[1,1]}
  return %second
}"""


def flipped(body: Graph) -> list[int]:
    """The groups of the flipped convolutions of a body."""
    return [n.op.groups for n in body.nodes if isinstance(n.op, FlippedConv)]


def check_meaning(source: Graph, after: Program, rng: np.random.Generator) -> None:
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float16) for v in source.inputs}
    (want,) = evaluate(source, feeds, precision=DType.F64).values()
    (got,) = evaluate(after.graph, feeds, precision=DType.F64).values()
    assert_close(got, want, 1e-12)


def test_a_refused_flipped_convolution_reads_filters_that_a_kernel_reverses(rng: np.random.Generator) -> None:
    why = Refused("plan", "NOT_SUPPORTED", "no groups here")

    class NoGroups(AcceptAll):
        def verdict(self, body: Graph) -> Verdict:
            return why if 2 in flipped(body) else RUNTIME

    source, before, after = settled(NoGroups(), FLIPPED)
    assert [n.op.name for n in before.graph.nodes].count("conv_flipped") == 2
    assert [s.signature for s in after.steps] == ["mul", "slice", "conv+tanh", "conv_flipped", "relayout"]
    (refusal,) = [r for r in after.refusals if r.reason == why]
    assert [n.op.name for n in refusal.nodes] == ["slice", "conv"] and flipped(refusal.body) == [2]
    check_meaning(source, after, rng)


def test_a_flipped_convolution_that_no_time_was_left_to_ask_about_is_expanded(rng: np.random.Generator) -> None:
    """Kernels run a plain convolution; none runs a flipped one."""

    class Spent(AcceptAll):
        def verdict(self, body: Graph) -> Verdict:
            return UNASKED

    source, _, after = settled(Spent(), FLIPPED)
    assert flipped(after.graph) == []
    check_meaning(source, after, rng)


class NoEpilogue(AcceptAll):
    """Refuses a flipped convolution next to other ops, and plain ones too if `also_plain`."""

    def __init__(self, also_plain: bool = False):
        super().__init__()
        self.also_plain = also_plain

    def verdict(self, body: Graph) -> Verdict:
        products = [n for n in body.nodes if n.op.name == "conv" or isinstance(n.op, FlippedConv)]
        fused = bool(products) and len(body) > len(products)
        return Refused("plan", "", "alone only") if fused and (self.also_plain or flipped(body)) else RUNTIME


def test_filters_are_reversed_by_a_kernel_for_the_sake_of_an_epilogue(rng: np.random.Generator) -> None:
    """It moves fewer bytes than a step that reads the result again."""
    source, _, after = settled(NoEpilogue(), FLIPPED)
    assert "conv+tanh" in [s.signature for s in after.steps]
    check_meaning(source, after, rng)
    _, before, after = settled(NoEpilogue(also_plain=True), FLIPPED)
    assert after is before, "a plain convolution would gain nothing"


def test_filters_larger_than_the_result_are_not_moved_for_an_epilogue() -> None:
    large = FLIPPED.replace("2,4,5,6", "1,4,3,3").replace("f16[6,2,3,2]", "f16[64,2,3,2]").replace("[6,6", "[6,64")
    _, before, after = settled(NoEpilogue(), large)
    assert after is before and len(flipped(after.graph)) == 2


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("bias", [None, (5, 6), (2, 1, 1, 6)])
@pytest.mark.parametrize(
    "op",
    [
        Attention(),
        Attention(0.25, causal=True),
        Attention(0.5, guarded=True),
        Attention(2.0, causal=True, hides=True, guarded=True),
        Attention(hides=True),
    ],
    ids=lambda op: "-".join(k for k, v in op.attributes.items() if v is True) or "plain",
)
def test_expanded_attention_keeps_its_meaning(
    op: Attention, bias: tuple[int, ...] | None, groups: int, rng: np.random.Generator
) -> None:
    """NaN, infinities and queries without keys too."""
    graph = Graph("g")
    shapes = [(2, 4, 5, 8), (2, groups, 6, 8), (2, groups, 6, 3), *([bias] if bias else [])]
    operands = [graph.add_input(n, TensorType(s, DType.F32)) for n, s in zip("qkvb", shapes, strict=False)]
    graph.set_outputs([graph.add(op, *operands, name="y")])
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in operands}
    feeds["k"][0, 0, 3, 1] = np.nan
    if bias:
        feeds["b"][rng.random(bias) < 0.4] = -np.inf
    written = graph.clone()
    assert set(expand(written, {"y"})) == {"y"}
    written.verify()
    assert all(n.op.name != "attention" for n in written.nodes)
    with np.errstate(invalid="ignore"):
        (want,), (got,) = (evaluate(g, feeds, precision=DType.F64).values() for g in (graph, written))
    np.testing.assert_allclose(got, want, rtol=1e-12, equal_nan=True)
    assert (op.guarded or op.hides or np.isnan(want).any()) and not np.isnan(want).all()
