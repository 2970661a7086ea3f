"""Test each property: it holds for correct code, and fails on a planted fault."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar
from unittest import SkipTest

import numpy as np
import pytest
from helpers import HEALTH_CHECKS
from hypothesis import given, settings
from hypothesis import strategies as st

from fusec import ir, lower_cudnn
from fusec.errors import TargetError
from fusec.execution import simulator_backend
from fusec.execution import step_binding as steps
from fusec.graph import printer
from fusec.ir import Constant, DType, Graph, Node, Value
from fusec.lowering.pointwise import CallWriter
from fusec.lowering.simulator import simulate
from fusec.ops import Cast, Softmax, pw
from fusec.passes.base import Options
from fusec.passes.cleanup.simplify import Simplify
from fusec.passes.folding.reorder_bias_first import ReorderBiasFirst
from fusec.passes.partition.equivalent_spellings import FOR_ENGINES, REWRITES
from fusec.passes.rewriting.rewriter import local
from fusec.schedule import memory_plan
from fusec.schedule.program import Kind, Program, body_of
from fusec.system import json_child
from fusec.testing.case import Case, MismatchError, Property, Trust
from fusec.testing.example_codec import relabelled
from fusec.testing.properties import compiling, on_device, reproducible
from fusec.testing.properties.compiling import (
    compile_is_deterministic,
    lowered_as_simulated,
    partition_is_sound,
    spellings_keep_meaning,
    verification_agrees,
)
from fusec.testing.properties.fixtures import CASE, Prepared, compile_once, prepared
from fusec.testing.properties.onnx_round_trip import onnx_round_trip, onnxruntime_agrees
from fusec.testing.properties.reproducible import TWIN, digest
from fusec.testing.properties.running import buffers_never_alias, executable_agrees
from fusec.testing.properties.table import (
    PROPERTIES,
    keeps_meaning,
    passes_keep_meaning,
    pipeline_keeps_meaning,
    rules_keep_meaning,
    text_round_trip,
)
from fusec.testing.strategies import cases, graphs
from fusec.text import parse

Array = np.ndarray[Any, Any]
W = np.random.default_rng(0).standard_normal((8, 4, 1, 1)).astype(np.float32)
# A convolution with bias, a residual that comes after it, an activation, and an op no engine takes.
TEXT = """graph "g" (%x: f32[2,4,5,5], %z: f32[2,8,5,5]) {
  %w = constant weight("w") : f32[8,4,1,1]
  %v = conv(%x, %w) {strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1], groups=1} : f32[2,8,5,5]
  %b = constant [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8] : f32[8,1,1]
  %a = add(%v, %b) : f32[2,8,5,5]
  %s = add(%a, %z) : f32[2,8,5,5]
  %r = relu(%s) : f32[2,8,5,5]
  %m = softmax(%r) {axis=1, log=false} : f32[2,8,5,5]
  %n = mul(%m, %r) : f32[2,8,5,5]
  %t = tanh(%n) : f32[2,8,5,5]
  return %r, %t
}"""
OFFLINE = [p for p in PROPERTIES.values() if not p.needs]


def example() -> Graph:
    return parse(TEXT, {"w": W})


def plant(graph: Graph, case: Case = CASE, **known: Any) -> Prepared:
    """Store the shared results of a graph before properties run."""
    shared = prepared(graph, case)
    shared.__dict__.update(known)
    return shared


def fails(check: Callable[[Graph, Case], None], graph: Graph, case: Case = CASE, match: str = "") -> None:
    with pytest.raises(MismatchError, match=match):
        check(graph, case)


# healthy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checked", OFFLINE, ids=lambda p: p.name)
@pytest.mark.parametrize("judge", ["lowers", "runtime", "moody", "anchors"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_properties_hold_for_a_convolution_with_epilogue(checked: Property, judge: str, precision: str) -> None:
    checked.check(example(), Case(judge=judge, precision=precision))


@settings(max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=HEALTH_CHECKS)
@given(graphs(), cases(), st.sampled_from(OFFLINE))
def test_properties_hold_for_random_graphs(graph: Graph, case: Case, checked: Property) -> None:
    text = str(graph)
    with suppress(SkipTest):  # else one graph of which nothing is said would end the test
        checked.check(graph, case)
    assert str(graph) == text, "the graph is not changed"


def test_gradients_skip_infinite_constants() -> None:
    graph = Graph("masked")
    x = graph.add_input("x", ir.TensorType((2, 2), DType.F32))
    mask = graph.constant(np.array([[0, -np.inf], [0, 0]], np.float32))
    graph.set_outputs([graph.add(pw("add"), x, mask)])
    PROPERTIES["gradients"].check(graph, Case(seed=2))  # which leaves constants what they are
    with pytest.raises(SkipTest, match="infinities"):
        PROPERTIES["gradients"].check(graph, Case(seed=3))


def test_every_property_has_a_summary_and_its_functions_name() -> None:
    for name, checked in PROPERTIES.items():
        assert checked.name == name == getattr(checked.check, "__name__", "")
        assert len(checked.summary) > 30


def test_results_for_a_graph_are_shared_until_it_changes() -> None:
    graph = example()
    first = prepared(graph, CASE)
    assert prepared(graph, CASE) is first
    assert prepared(graph, Case()) is not first
    first = prepared(graph, CASE)
    graph.set_op(next(n for n in graph.nodes if n.op.name == "softmax"), Softmax(2))
    assert prepared(graph, CASE) is not first


# passes ----------------------------------------------------------------------------------------------------


def dropping_bias(self: object, graph: Graph, options: Options) -> None:
    """A pass that drops every constant addend."""
    for node in list(graph.nodes):
        if node.op.name == "add" and node.operands[1].literal is not None:
            graph.replace(node.result, node.operands[0])


def test_text_that_loses_digits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, plain = example(), printer.print_attribute
    monkeypatch.setattr(printer, "print_attribute", lambda v: f"{v:.1f}" if isinstance(v, float) else plain(v))
    graph.set_op(
        next(n for n in graph.nodes if n.result.name == "b"),
        Constant(ir.Literal.of(np.full((8, 1, 1), 0.17, np.float32), "b")),
    )
    fails(text_round_trip, graph, match="a constant reads otherwise")


def test_constants_of_one_label_survive_text() -> None:
    graph = example()
    for node in list(graph.nodes):
        if isinstance(node.op, Constant):
            graph.set_op(node, Constant(ir.Literal.of(node.op.literal.array, "same")))
    text_round_trip(graph)
    assert relabelled(relabelled(graph)) is not graph
    assert [n.op.literal.label for n in relabelled(graph).nodes if isinstance(n.op, Constant)] == ["w", "b"]


def test_message_names_a_pass_that_changes_the_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReorderBiasFirst, "run", dropping_bias)
    fails(passes_keep_meaning, example(), match="pass reorder_bias_first: r differs")
    fails(pipeline_keeps_meaning, example(), match="the pipeline: r differs")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_passes_before_narrowing_are_checked_in_full_precision(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    def nearly(self: object, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if node.op.name == "tanh" and node.result.type.dtype is DType.F32:
                scale = graph.constant(np.array(1 + 1e-4, np.float32), before=node)
                graph.set_input(node, 0, graph.add(pw("mul"), node.operands[0], scale, before=node))

    monkeypatch.setattr(Simplify, "run", nearly)
    fails(passes_keep_meaning, example(), Case(precision=precision), match="pass simplify: t differs")


def test_pass_that_changes_the_interface_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrowing(self: object, graph: Graph, options: Options) -> None:
        if graph.outputs[0].type.dtype is DType.F32:
            graph.set_outputs([graph.add(Cast(DType.F16), v) for v in graph.outputs], graph.output_names)

    monkeypatch.setattr(ReorderBiasFirst, "run", narrowing)
    fails(passes_keep_meaning, example(), match=r"pass reorder_bias_first: output r is f16\[2,8,5,5\] instead of f32")


@local("relu", equation="relu(x) = x")
def relu_is_nothing(graph: Graph, node: Node) -> Value | None:
    return node.operands[0]


@local("tanh", equation="tanh(x) = 2 sigmoid(2x) - 1")
def tanh_by_sigmoid(graph: Graph, node: Node) -> Value | None:
    two, one = (graph.constant(np.array(n, np.float32), before=node) for n in (2.0, 1.0))
    inner = graph.add(pw("sigmoid"), graph.add(pw("mul"), node.operands[0], two, before=node), before=node)
    return graph.add(pw("sub"), graph.add(pw("mul"), inner, two, before=node), one, before=node)


def test_message_names_a_wrong_rule_and_its_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simplify, "rules", (*Simplify.rules, relu_is_nothing))
    fails(rules_keep_meaning, example(), match=r"rule relu_is_nothing \(relu\(x\) = x\): r differs")


def test_rules_are_tried_on_the_graph_that_their_pass_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass makes the ops that the rule of another pass matches; the source graph has none."""
    graph = parse('graph "g" (%x: f32[2]) {\n%c = constant [0.0] : f32[]\n%y = max(%x, %c) : f32[2]\nreturn %y\n}')
    met: list[str] = []

    @local("relu", equation="relu(x) = relu(x)")
    def look(graph: Graph, node: Node) -> Value | None:
        met.append(node.op.name)
        return None

    monkeypatch.setattr(ReorderBiasFirst, "rules", (look,))
    monkeypatch.setattr(ReorderBiasFirst, "run", lambda self, graph, options: graph.rename(graph.outputs[0], "other"))
    rules_keep_meaning(graph)
    assert met == ["relu"]


def test_keeps_meaning_refuses_what_it_could_not_check() -> None:
    with pytest.raises(TypeError, match="returned a graph: a rewrite changes the graph that it gets, in place"):
        keeps_meaning(example(), lambda graph: graph.clone())
    a_class: Any = ReorderBiasFirst
    with pytest.raises(TypeError, match=r"ReorderBiasFirst is a class: give an instance of the pass"):
        keeps_meaning(example(), a_class)


def test_keeps_meaning_takes_passes_rules_and_functions() -> None:
    def nothing(graph: Graph) -> None:
        """A function that leaves the graph as it is."""

    def wrong(graph: Graph) -> None:
        dropping_bias(None, graph, Options())

    class Own:
        name: ClassVar[str] = "own"

        def run(self, graph: Graph, options: Options) -> None:
            wrong(graph)

    keeps_meaning(example(), nothing)
    keeps_meaning(example(), tanh_by_sigmoid)
    keeps_meaning(example(), [nothing, ReorderBiasFirst(), tanh_by_sigmoid], Case(style="wide"))
    for step, name in ((wrong, "wrong"), (Own(), "own"), (relu_is_nothing, "relu_is_nothing")):
        with pytest.raises(MismatchError, match=f"^{name}: "):
            keeps_meaning(example(), step)
        with pytest.raises(MismatchError, match=f"^{name}: "):
            keeps_meaning(example(), [nothing, step])


# compiling -------------------------------------------------------------------------------------------------


def test_message_names_a_wrong_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(body: Graph) -> Graph | None:
        copy = body.clone()
        adds = [n for n in copy.nodes if n.op.name == "add"]
        if not adds:
            return None
        copy.replace(adds[0].result, adds[0].operands[0])
        copy.prune()
        return copy

    graph = example()
    spellings_keep_meaning(graph, Case(judge="runtime"))
    for known in (FOR_ENGINES, REWRITES):
        monkeypatch.setitem(known, "zero_bias", wrong)
    case = Case(judge="anchors")
    compiled = compile_once(graph, Case(disable=frozenset({"reorder_bias_first"})))
    plant(graph, case, optimised=compiled.graph, compiled=compiled)
    fails(spellings_keep_meaning, graph, case, match="spelling zero_bias: r differs")


def cut(graph: Graph, *groups: tuple[str, ...], drop: str = "") -> Program:
    """Build the example's program: each group is a cuDNN step, in this order, and every other node is alone."""
    compiled = compile_once(graph, CASE)
    nodes = {n.results[0].name: n for n in compiled.graph.nodes if not isinstance(n.op, Constant)}
    left = [n for n in nodes if n != drop and not any(n in g for g in groups)]
    step = compiled.program.steps[0]
    steps = []
    for group in sorted([*groups, *((n,) for n in left)], key=lambda g: list(nodes).index(g[0])):
        members = tuple(nodes[n] for n in group)
        body = body_of(compiled.graph, members)
        kind = Kind.CUDNN if len(members) > 1 else Kind.KERNEL
        steps.append(dataclasses.replace(step, nodes=members, kind=kind, body=body, spelling=(), verdict=None))
    return dataclasses.replace(compiled.program, steps=tuple(steps))


CHAIN = 'graph "g" (%x: f32[4,6]) {{\n{}\nreturn %d\n}}'.format(
    "%a = relu(%x) : f32[4,6]\n%b = softmax(%a) {axis=1, log=false} : f32[4,6]\n"
    "%c = add(%a, %b) : f32[4,6]\n%d = tanh(%c) : f32[4,6]"
)


@pytest.mark.parametrize(
    ("groups", "drop", "match"),
    [
        ([("a", "c", "d")], "", "read before it is made|not convex"),
        ([("c", "d"), ("d", "d")], "", "is in steps"),
        ([], "d", "is in no step"),
        ([("b", "c")], "", "a step that the judge refuses"),
    ],
)
def test_unsound_program_is_found(groups: list[tuple[str, ...]], drop: str, match: str) -> None:
    graph = parse(CHAIN)
    compiled = compile_once(graph, CASE)
    program = cut(graph, *groups, drop=drop)
    plant(graph, optimised=program.graph, compiled=dataclasses.replace(compiled, program=program))
    fails(partition_is_sound, graph, match=match)


def test_step_that_is_not_convex_is_found() -> None:
    graph = parse(CHAIN)
    program = cut(graph, ("a", "c", "d"))
    compiled = dataclasses.replace(compile_once(graph, CASE), program=program)
    with pytest.raises(MismatchError, match=r"is not convex: %b = softmax\(%a\)"):
        compiling._is_convex(compiled)


def test_body_that_differs_from_its_nodes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = example()
    compiled = compile_once(graph, CASE)
    steps = list(compiled.program.steps)
    where = next(i for i, s in enumerate(steps) if s.kind is Kind.CUDNN and len(s.nodes) > 1)
    wrong = steps[where].body.clone()
    dropping_bias(None, wrong, Options())
    wrong.prune()
    steps[where] = dataclasses.replace(steps[where], body=wrong)
    program = dataclasses.replace(compiled.program, steps=tuple(steps))
    plant(graph, optimised=program.graph, compiled=dataclasses.replace(compiled, program=program))
    fails(partition_is_sound, graph, match="the bodies in a row: r differs")


def test_canonical_key_of_two_different_graphs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = example()
    monkeypatch.setattr(compiling, "canonical_key", lambda body: "the same")
    fails(partition_is_sound, graph, Case(precision="fp16"), match="one canonical key but lower")


def as_abs(builder: Any, node: Node) -> None:
    steps = CallWriter(builder, node)
    steps.last("abs", *steps.operands)


def test_wrong_lowering_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = example()
    monkeypatch.setitem(lower_cudnn.LOWER, "relu", as_abs)
    fails(lowered_as_simulated, graph, match="r differs")
    fails(executable_agrees, graph, match="the executable: r differs")
    fails(verification_agrees, graph, match="verify: lowered")


def write_half(graph: Any, buffers: Mapping[int, Array]) -> None:
    held = {t.uid: buffers[t.uid].copy() for t in graph.outputs}
    simulate(graph, buffers)
    for uid, old in held.items():
        buffers[uid][: old.size // 2] = old[: old.size // 2]


def write_inputs(graph: Any, buffers: Mapping[int, Array]) -> None:
    simulate(graph, buffers)
    buffers[graph.inputs[0].uid][0] += 1


@pytest.mark.parametrize(("run", "match"), [(write_half, "what its memory held before"), (write_inputs, "was written")])
def test_wrong_writes_of_a_lowered_graph_are_found(monkeypatch: pytest.MonkeyPatch, run: Any, match: str) -> None:
    monkeypatch.setattr(compiling, "simulate", run)
    fails(lowered_as_simulated, example(), match=match)


@pytest.mark.parametrize(
    ("second", "trust"),
    [([1.0, -3e4], Trust.REFERENCE), ([1.0, 3.0], Trust.SIMULATOR)],
    ids=["an element was not written", "a sum in another order"],
)
def test_an_unwritten_element_is_no_doubt(second: list[float], trust: Trust) -> None:
    runs = np.array([1.0, np.nan], np.float16), np.array(second, np.float16)
    compiling.require_same_bits("a step", DType.F16, "y", (runs[0], runs[0].copy()))
    with pytest.raises(MismatchError, match="y depends on what its memory held before") as caught:
        compiling.require_same_bits("a step", DType.F16, "y", runs)
    assert caught.value.oracle is trust


def test_verify_errors_that_rounding_explains_are_ignored() -> None:
    """Its bounds ignore cancellation, and NaN from logarithms of negative numbers."""
    lines = "%c = constant [40000.1] : f32[]\n%a = mul(%x, %c) : f32[8]\n%y = sin(%a) : f32[8]\n%l = log(%x) : f32[8]"
    graph = parse(f'graph "g" (%x: f32[8]) {{\n{lines}\nreturn %y, %l\n}}')
    case = Case(precision="bf16")
    assert not compiling.verify(prepared(graph, case).compiled).ok
    verification_agrees(graph, case)


# determinism -----------------------------------------------------------------------------------------------


def test_second_compilation_with_another_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compile_once", lambda graph, case: compile_once(graph, Case(judge="anchors")))
    fails(compile_is_deterministic, example(), match="compiled twice in one process")


def test_other_process_with_another_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TWIN, "ask", lambda graph, case: digest(compile_once(graph, Case(judge="anchors"))))
    fails(compile_is_deterministic, example(), match="compiled in another process")


def test_twin_is_reused_and_replaced_when_it_dies() -> None:
    graph, child = example(), reproducible.Twin()
    want = digest(compile_once(graph, CASE))
    try:
        assert child.ask(graph, CASE) == want
        first = child.pid
        assert first is not None
        assert child.ask(graph, Case(judge="anchors")) != want
        assert child.pid == first
        os.kill(first, signal.SIGKILL)
        assert child.ask(graph, CASE) == want
        assert child.pid != first
    finally:
        child.close()


def test_twin_reports_errors_and_ends_with_its_input() -> None:
    graph, child = example(), reproducible.Twin()
    try:
        with pytest.raises(MismatchError, match="fails in another process"):
            child.ask(graph, Case(target="no such GPU"))
        process = child._alive()._process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=20) == 0
    finally:
        child.close()


def test_twin_that_always_dies_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    child = reproducible.Twin()
    monkeypatch.setattr(json_child.sys, "executable", "/bin/false")
    with pytest.raises(MismatchError, match="died twice"):
        child.ask(example(), CASE)


def test_generated_names_do_not_change_the_digest() -> None:
    """A parsed graph starts to number new values at 0; the decisions are the same."""
    graph = example()
    for _ in range(7):
        graph.fresh_name()
    case = Case(precision="fp16")
    assert digest(compile_once(graph, case)) == digest(compile_once(example(), case))
    assert reproducible.decisions(compile_once(graph, case)) != reproducible.decisions(compile_once(example(), case))


# running ---------------------------------------------------------------------------------------------------


def test_wrong_view_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "%a, %b = split(%x) {axis=0, sizes=[4, 4]} : f32[4,4], f32[4,4]\n%y = sub(%a, %b) : f32[4,4]"
    graph = parse(f'graph "g" (%x: f32[8,4]) {{\n{lines}\nreturn %y\n}}')
    executable_agrees(graph)
    monkeypatch.setattr(memory_plan, "view_offset", lambda node, index: 0)
    fails(executable_agrees, graph, match="the executable: y differs")


def test_kernel_that_writes_its_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = steps.evaluate_node

    def in_place(node: Node, operands: list[Array], xp: Any) -> tuple[Array, ...]:
        results = plain(node, operands, xp)
        operands[0][...] = 1.0
        return results

    lines = "%y = softmax(%x) {axis=1, log=false} : f32[4,6]\n%z = cosh(%x)"
    graph = parse(f'graph "g" (%x: f32[4,6]) {{\n{lines}\nreturn %y, %z\n}}')
    monkeypatch.setattr(steps, "evaluate_node", in_place)
    fails(executable_agrees, graph, match="the executable: z differs")
    fails(buffers_never_alias, graph, match="wrote to %x, which is still needed")


def test_result_that_changes_from_run_to_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)

    def shaky(graph: Any, buffers: Mapping[int, Array]) -> None:
        simulate(graph, buffers)
        for tensor in graph.outputs:
            buffers[tensor.uid][...] *= 1 + 1e-7 * rng.standard_normal(buffers[tensor.uid].shape)

    monkeypatch.setattr(simulator_backend, "simulate", shaky)
    fails(executable_agrees, example(), match="run a second time, output %r has other bits")


def test_write_to_a_needed_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator_backend, "simulate", write_inputs)
    fails(buffers_never_alias, example(), match="which is still needed")


def test_memory_reused_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = memory_plan._lives

    def early(*of: Any) -> list[memory_plan.Life]:
        return [dataclasses.replace(life, last=life.first) for life in plain(*of)]

    monkeypatch.setattr(memory_plan, "_lives", early)
    fails(buffers_never_alias, example(), match="which is still needed|other bits")


def test_read_of_freed_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime that reads freed memory gets the numbers that were written over it."""
    operands: list[Value] = []
    plain = steps.Steps._bound_reference

    def hoarding(self: Any, step: Any) -> Callable[[], None]:
        run = plain(self, step)
        (node,) = step.nodes
        operands.append(node.operands[0])

        def hoarded() -> None:
            run()
            if node.op.name == "sign":
                self.buffer(node.result)[...] = np.sign(self.buffer(operands[0])[-1:])

        return hoarded

    lines = '%a = cosh(%x)\n%b = reduce(%a) {kind="mean", axes=[0], keepdims=true}\n%y = sign(%b)'
    graph = parse(f'graph "g" (%x: f32[4096]) {{\n{lines}\nreturn %y\n}}')
    monkeypatch.setattr(steps.Steps, "_bound_reference", hoarding)
    fails(buffers_never_alias, graph, match="with memory that nothing needs overwritten, output %y has other bits")


def test_graphs_that_onnx_cannot_express_are_skipped() -> None:
    resize = '{sizes=[1, 1, 5, 3], scales=[1.0, 1.0, 1.5, 1.0], mode="linear"}'
    graph = parse(f'graph "g" (%x: f32[1,1,3,3]) {{\n%v = resize(%x) {resize}\nreturn %v\n}}')
    for check in (onnx_round_trip, onnxruntime_agrees):
        with pytest.raises(SkipTest, match="ONNX has no Resize"):
            check(graph)


# a GPU -----------------------------------------------------------------------------------------------------


def test_gpu_properties_raise_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device.device, "is_present", lambda target: False)
    with pytest.raises(TargetError, match="no GPU that is a h200"):
        on_device.device_agrees(example())
    assert PROPERTIES["device_agrees"].needs == "gpu"


@pytest.mark.gpu
@settings(max_examples=15, deadline=None, database=None, derandomize=True, suppress_health_check=HEALTH_CHECKS)
@given(graphs(), cases())
def test_a_gpu_agrees_on_random_graphs(graph: Graph, case: Case) -> None:
    on_device.device_agrees(graph, case)


def test_properties_are_fast() -> None:
    """All properties run on one graph. The limit is generous because other processes run, too."""
    graph, case = example(), Case(3)
    compile_is_deterministic(graph, case)  # starts the twin
    before = time.process_time()
    for checked in OFFLINE:
        checked.check(graph, case)
    assert time.process_time() - before < 2.0
