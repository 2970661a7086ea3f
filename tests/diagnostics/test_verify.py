"""Test that verification finds faults planted at each level, and passes what is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from helpers import one_program
from lowering.lowers_judge import LowersJudge

import fusec
from fusec.builder import Builder
from fusec.diagnostics.verify import Report, random_feeds, relative_l2, stored_error, verify
from fusec.execution.compilation import Compiled
from fusec.ir import DType, Graph
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.simulator import simulate
from fusec.ops import Conv, pw
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.reference import evaluate
from fusec.runtime import Executable, SimulatorBackend
from fusec.schedule.program import Kind, Program
from fusec.targets.target import load
from fusec.text import parse

TEXT = """
graph "net" (%x: f32[2,8,9,9], %i: i64[3]) {
  %w = constant weight("w") : f32[6,8,3,3]
  %b = constant [0.5, -0.5, 0.25, 1.0, 2.0, -1.0] : f32[6,1,1]
  %c = conv(%x, %w) {strides=[2,2], pads=[1,1,1,1], dilations=[1,1]}
  %d = add(%c, %b)
  %e = hard_swish(%d)
  %p = avg_pool(%e) {window=[5,5], strides=[1,1], pads=[0,0,0,0], dilations=[1,1]}
  %r = reshape(%p) {shape=[2,6]}
  %m = constant weight("m") : f32[6,4]
  %y = matmul(%r, %m)
  %z = gather(%y, %i) {axis=0}
  return %z, %e
}"""


def compiled(precision: str = "fp32") -> Compiled:
    rng = np.random.default_rng(1)
    weights = {
        "w": rng.standard_normal((6, 8, 3, 3)).astype(np.float32),
        "m": rng.standard_normal((6, 4)).astype(np.float32),
    }
    source, options = parse(TEXT, weights), Options(precision)
    graph = run(PIPELINE, source.clone(), options)
    target, judge = load("h200"), LowersJudge()
    return Compiled(source, partition(graph, judge, target), target, options, judge)


def failed(report: Report) -> set[str]:
    return {check.level for check in report.checks if not check.ok}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_a_correct_compilation_passes(precision: str) -> None:
    report = verify(compiled(precision), seed=4)
    assert report.ok, str(report)
    assert {check.level for check in report.checks} == {"passes", "body", "lowered"}


def test_an_empty_report_does_not_pass() -> None:
    assert not Report(()).ok


def test_a_pass_that_changes_the_meaning_is_detected() -> None:
    broken = compiled()
    twin = broken.source.clone()
    victim = next(n for n in twin.nodes if n.op.name == "hard_swish")
    twin.replace(victim.result, twin.insert(pw("swish"), victim.operands, before=victim).result)
    assert failed(verify(replace(broken, imported=twin))) == {"passes"}


def with_body(c: Compiled, change: Graph) -> Compiled:
    steps = list(c.program.steps)
    index = next(i for i, s in enumerate(steps) if s.kind is Kind.CUDNN and "conv" in s.signature)
    steps[index] = replace(steps[index], body=change)
    return replace(c, program=Program(c.program.graph, tuple(steps)))


def conv_body(c: Compiled) -> Graph:
    return next(s for s in c.program.steps if s.kind is Kind.CUDNN and "conv" in s.signature).body.clone()


def test_a_spelling_that_drops_the_bias_is_detected() -> None:
    c = compiled()
    body = conv_body(c)
    bias = next(n for n in body.nodes if n.op.name == "add")
    body.replace(bias.result, bias.operands[0])
    body.prune()
    assert failed(verify(with_body(c, body))) == {"body", "lowered"}


def test_a_lost_pad_is_detected() -> None:
    c = compiled()
    body = conv_body(c)
    conv = next(n for n in body.nodes if isinstance(n.op, Conv))
    assert isinstance(conv.op, Conv)
    body.set_op(conv, replace(conv.op, pads=(0, 1, 2, 1)))
    body.verify()
    assert "body" in failed(verify(with_body(c, body)))


def test_a_wrong_lowered_graph_is_detected() -> None:
    def transposed_filter(graph: CudnnGraph, buffers: Mapping[int, np.ndarray]) -> None:
        changed = dict(buffers)
        for tensor in graph.inputs:
            if tensor.dims[2:] == (3, 3):
                changed[tensor.uid] = buffers[tensor.uid][::-1].copy()
        simulate(graph, changed)

    assert failed(verify(compiled(), run=transposed_filter)) == {"lowered"}


def test_an_unwritten_output_is_detected() -> None:
    report = verify(compiled(), run=lambda graph, buffers: None)
    assert failed(report) == {"lowered"}
    assert not any(check.ok for check in report.checks if check.level == "lowered")
    assert report.to_json()["checks"][-1]["error"] is None


def test_an_off_by_one_element_is_detected() -> None:
    def shifted(graph: CudnnGraph, buffers: Mapping[int, np.ndarray]) -> None:
        simulate(graph, buffers)
        for tensor in graph.outputs:
            buffers[tensor.uid][...] = np.roll(buffers[tensor.uid], 1)

    assert failed(verify(compiled(), run=shifted)) == {"lowered"}


def test_infinities_and_huge_numbers_have_a_distance() -> None:
    assert relative_l2(np.array([np.inf, 1.0]), np.array([np.inf, 1.0])) == 0.0
    assert relative_l2(np.array([np.inf, 1.0]), np.array([-np.inf, 1.0])) != 0.0
    assert relative_l2(np.array([np.inf, 1.0]), np.array([2.0, 1.0])) == np.inf
    assert np.isnan(relative_l2(np.array([np.nan, 1.0]), np.array([np.nan, 1.0])))
    assert relative_l2(np.array([1e300, 0.0]), np.array([1e300, 1e297])) == pytest.approx(1e-3)  # squares overflow


def test_underflow_in_storage_is_no_error() -> None:
    tiny, zero = np.array([3e-9, 0.0]), np.zeros(2, np.float16)
    assert relative_l2(zero, tiny) == 1.0
    assert stored_error(zero, tiny, DType.F16) == 0.0
    assert stored_error(zero, tiny, DType.F32) == 1.0  # which holds it
    assert stored_error(zero, np.array([3e-4, 0.0]), DType.F16) == 1.0
    assert stored_error(zero, np.array([2, 0]), DType.I32) == 1.0
    assert np.isnan(stored_error(np.array([np.nan, 0.0]), tiny, DType.F16))
    assert stored_error(np.array([np.inf, 0.0]), np.array([np.inf, 0.0]), DType.F16) == 0.0


def test_few_integers_next_to_a_tie_may_be_rounded_to_the_other_side() -> None:
    want = np.arange(-128, 128).astype(np.int8)
    other = want.copy()
    other[7] += 1
    assert stored_error(other, want, DType.I8) == 0.0
    assert stored_error(other, want, DType.I32) > 0.0
    other[8] += 2
    assert stored_error(other, want, DType.I8) > 0.0
    other = np.minimum(want, 126) + np.int8(1)  # all are truncated to the other side
    assert stored_error(other, want, DType.I8) > 0.0


# as it runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_each_step_of_an_executable_is_checked(precision: str, rng: np.random.Generator) -> None:
    net = Executable(compiled(precision), SimulatorBackend())
    report = net.verify(seed=4)
    assert report.ok, str(report)
    executed = [check.what for check in report.checks if check.level == "executed"]
    assert list(dict.fromkeys(executed)) == [
        f"{i} {step.signature}" for i, step in enumerate(net.compiled.program.steps)
    ]
    x = rng.standard_normal((2, 8, 9, 9)).astype(np.float32)
    feeds = {"x": x, "i": np.array([1, 0, 1])}
    first, second = net.run(None, feeds), Executable(compiled(precision), SimulatorBackend()).run(None, feeds)
    for got, want in zip(first, second, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("fault", ["nothing", "something else"])
def test_a_wrong_step_is_detected(fault: str) -> None:
    net = Executable(compiled(), SimulatorBackend())
    net._allocate()
    index = next(i for i, s in enumerate(net.compiled.program.steps) if s.signature == "avg_pool")
    (result,), launch = net.compiled.program.steps[index].outputs, net._launches[index]

    def wrong() -> None:
        if fault == "something else":
            launch()
            net._steps.buffer(result)[3] += 1

    net._launches[index] = wrong
    bad = [check.what for check in net.verify().checks if not check.ok]
    assert bad == [f"{index} avg_pool"], "each step starts from what is right"


def test_a_check_leaves_state_unchanged() -> None:
    b = Builder()
    x, total = b.input("x", (4, 3)), b.parameter("total", np.full((4, 3), 2.0, np.float32))
    b.update(total, total * 0.5 + x)
    b.output(y=total * 2.0)
    exe = one_program(fusec.compile(b, target="cpu"))
    assert exe.verify().ok
    np.testing.assert_array_equal(exe.value("total"), np.full((4, 3), 2.0))
    y = exe.step(np.ones((4, 3), np.float32))
    np.testing.assert_array_equal(exe.value("total"), np.full((4, 3), 2.0))
    np.testing.assert_array_equal(y, np.full((4, 3), 4.0))


def test_random_indices_that_a_loop_reads_are_in_range() -> None:
    graph = parse("""graph "g" (%x: f32[1,2], %i: i64[5,9]) {
      %l, %r = scan(%x, %i) {body=graph "body" (%h: f32[1,2], %i: i64[9]) {
        %y = gather(%h, %i) {axis=0}
        return %h, %y
      }, steps=5, states=1, sequences=1}
      return %r
    }""")
    feeds = random_feeds(np.random.default_rng(0), graph)
    assert evaluate(graph, feeds)["r"].shape == (5, 9, 2)  # raises where an index is out of range
