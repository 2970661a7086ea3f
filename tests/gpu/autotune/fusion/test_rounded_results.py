"""Test that a norm (or attention) and the rounding of its result are proposed as one kernel, next to two steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from gpu.autotune.candidates.test_step_candidates import signatures
from gpu.autotune.squeeze_excite_text import drawn
from gpu.kernels.cases import FIGURES
from gpu.kernels.emulator import Emulator, needs_compiler
from lowering.lowers_judge import LowersJudge

from fusec.gpu.autotune.candidates.step_candidates import candidates
from fusec.gpu.autotune.fusion.fusion_proposals import is_joint_work, may_begin
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.gpu.autotune.step_choices import has_candidates
from fusec.gpu.kernels import find
from fusec.ir import Graph
from fusec.passes.partition import partition
from fusec.plans.verdict import Refused, Verdict
from fusec.reference import evaluate_node
from fusec.schedule.program import Kind, Partition, Program, body_of
from fusec.targets.target import load
from fusec.text import parse

TEXT = """graph "g" (%x: f32[6,64], %z: f32[6,64]) {
  %g = constant weight("g") : f32[64]
  %b = constant weight("b") : f32[64]
  %s = constant [21.7] : f32[]
  %n = NORM
  %q = mul(%n, %s)
  %r = round(%q)
  %c = clip(%r) {min=-128.0, max=127.0}
  %i = cast(%c) {to=i8}
  %t = reshape(%i) {shape=[64, 6]}
  %a = add(%n, %z)
  %p = softmax(%a) {axis=1}
  return %t, %p
}"""
NORMS = ["layer_norm(%x, %g, %b)", "rms_norm(%x, %g)"]


class NormsAlone(LowersJudge):
    """Judges a norm with other ops illegal, as cuDNN does where the result is rounded."""

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        verdicts = super().judge(bodies)
        names = [[n.op.name for n in body.nodes if n.op.name != "constant"] for body in bodies]
        return [
            Refused("plan", "FUSEC", "a norm alone") if len(each) > 1 and any("norm" in n for n in each) else verdict
            for each, verdict in zip(names, verdicts, strict=True)
        ]


def fused(norm: str) -> tuple[Program, Program]:
    """Partition the graph, and fuse its steps."""
    text = TEXT.replace("NORM", norm)
    program = partition(parse(text, drawn(text)), NormsAlone(), load("h200"))
    return program, fuse_steps(program, FIGURES, products=True)


@needs_compiler
@pytest.mark.parametrize("norm", NORMS)
def test_one_kernel_stores_both_results(norm: str, rng: np.random.Generator) -> None:
    _, program = fused(norm)
    step = program.steps[0]
    assert step.kind is Kind.KERNEL and step.signature.endswith("norm+mul+round+clip+cast")
    kernel = find(step.nodes, step.outputs, FIGURES)
    assert kernel is not None and len(step.outputs) == 2
    known = {v: v.literal.array for v in program.graph.values() if v.literal is not None}
    known |= {v: rng.standard_normal(v.type.shape).astype(np.float32) for v in program.graph.inputs}
    norm_result, integers = Emulator([kernel]).run(kernel, known, step.outputs)
    for node in step.nodes:
        known.update(zip(node.results, evaluate_node(node, [known[v] for v in node.operands]), strict=True))
    np.testing.assert_allclose(norm_result, known[step.outputs[0]], rtol=1e-5, atol=1e-6)
    assert (np.abs(integers.astype(int) - known[step.outputs[1]]) <= 1).all()
    assert (integers == known[step.outputs[1]]).mean() > 0.99


@pytest.mark.parametrize("norm", NORMS)
def test_it_competes_with_the_norm_and_the_rounding(norm: str) -> None:
    before, program = fused(norm)
    assert has_candidates(program.steps[0])
    found = candidates(program.graph, program.steps[0], "quick", FIGURES)
    assert [[(s.kind, len(s.nodes)) for s in each] for each in found] == [
        [(Kind.KERNEL, 5)],
        [(Kind.CUDNN, 1), (Kind.KERNEL, 4)],
        [(Kind.KERNEL, 1), (Kind.KERNEL, 4)],
    ]
    assert signatures(before)[0] == norm.partition("(")[0]


def test_a_norm_and_the_cast_of_its_result_to_fp32_are_one_kernel_next_to_two_steps() -> None:
    """As at the end of a model with outputs in fp32."""
    text = 'graph "g" (%x: f16[6,64]) {\n  %g = constant weight("g") : f16[64]\n  %b = constant weight("b") : f16[64]\n'
    text += "  %n = layer_norm(%x, %g, %b)\n  %y = cast(%n) {to=f32}\n  return %y\n}"
    weights = {name: np.ones(64, np.float16) for name in "gb"}
    program = fuse_steps(partition(parse(text, weights), NormsAlone(), load("h200")), FIGURES, products=True)
    assert signatures(program) == ["layer_norm+cast"]
    found = candidates(program.graph, program.steps[0], "quick", FIGURES)
    assert [[(s.kind, len(s.nodes)) for s in each] for each in found] == [
        [(Kind.KERNEL, 2)],
        [(Kind.CUDNN, 1), (Kind.KERNEL, 1)],
        [(Kind.KERNEL, 1), (Kind.KERNEL, 1)],
    ]


ATTENTION = """graph "g" (%x: f16[2,20,96]) {
  %s = constant [21.7] : f32[]
  %a = slice(%x) {starts=[0, 0, 0], sizes=[2, 20, 32], steps=[1, 1, 1]}
  %b = slice(%x) {starts=[0, 0, 32], sizes=[2, 20, 32], steps=[1, 1, 1]}
  %c = slice(%x) {starts=[0, 0, 64], sizes=[2, 20, 32], steps=[1, 1, 1]}
  %d = reshape(%a) {shape=[2, 1, 20, 32]}
  %e = reshape(%b) {shape=[2, 1, 20, 32]}
  %f = reshape(%c) {shape=[2, 1, 20, 32]}
  %y = attention(%d, %e, %f) {scale=0.2}
  %w = cast(%y) {to=f32}
  %q = mul(%w, %s)
  %r = round(%q)
  %l = clip(%r) {min=-128.0, max=127.0}
  %i = cast(%l) {to=i8}
  return %i
}"""


def test_attention_that_reads_parts_of_a_projection_is_rounded_by_its_kernel() -> None:
    graph = parse(ATTENTION, {})
    nodes = tuple(n for n in graph.nodes if n.op.name != "constant")
    assert is_joint_work(nodes) and all(may_begin(nodes[:n], FIGURES) for n in range(7, len(nodes) + 1))
    step = Partition(nodes, Kind.KERNEL, body_of(graph, nodes))
    kernel = find(nodes, step.outputs, FIGURES)
    assert kernel is not None and len(kernel.written) == 1
    found = candidates(graph, step, "quick", FIGURES)
    assert [[(s.kind, len(s.nodes)) for s in each] for each in found] == [
        [(Kind.KERNEL, 12)],
        [(Kind.CUDNN, 7), (Kind.KERNEL, 5)],
        [(Kind.KERNEL, 7), (Kind.KERNEL, 5)],
    ]


def test_a_norm_whose_result_stays_in_floats_is_no_proposal() -> None:
    _, program = fused(NORMS[0])
    nodes = program.steps[0].nodes
    assert may_begin(nodes[:3], FIGURES) and is_joint_work(nodes)
    assert not any(is_joint_work(nodes[:n]) for n in range(1, len(nodes)))


def test_kernels_that_round_to_bytes_begin_early_and_read_nothing_before_they_wait() -> None:
    """The product after them then copies its weights while they run."""
    graph = parse(ATTENTION, {})
    nodes = tuple(n for n in graph.nodes if n.op.name != "constant")
    _, program = fused(NORMS[0])
    for some, outputs in ((nodes, nodes[-1].results), (program.steps[0].nodes, program.steps[0].outputs)):
        kernel = find(some, outputs, FIGURES)
        assert kernel is not None
        for (launch,) in (each.launches for each in (kernel, *kernel.others)):
            body = launch.source.partition(f"{launch.entry}(")[2].partition("{\n")[2]
            assert launch.dependent and body.lstrip().startswith("wait_for_launches();")
            read = [i for i, a in enumerate(launch.arguments) if a.value is not None and a.value.literal is None]
            names = [f"a{i}" for i in read if launch.parameters[i].startswith("const")]
            assert names and all(f"{name} = from_here({name});" in body for name in names)
    plain = find(program.steps[0].nodes[:1], program.steps[0].nodes[0].results, FIGURES)
    assert plain is not None and "next_may_begin" not in plain.launches[0].source
