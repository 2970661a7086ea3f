"""Test whole programs: coverage, order, determinism, questions to the oracle, and time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from helpers import quick
from hypothesis import given, settings
from hypothesis import strategies as st
from passes.partition.graphs import CONV, random_graphs, resnet50
from passes.partition.judges import FAST, RUNTIME, AcceptAll, Measured, OneConvolution, Recorded

from fusec.ir import Constant, DType, Graph, TensorType
from fusec.ops import pw
from fusec.passes.partition import canonical_key, partition
from fusec.plans.verdict import Legal, Refused
from fusec.reference import evaluate
from fusec.schedule.program import Kind, Program
from fusec.targets.target import load
from fusec.text import parse

TARGET = load("h200")


def run_steps(program: Program, feeds: dict[str, Any]) -> dict[str, Any]:
    """Evaluate the bodies in order, in float64; each reads only values that earlier ones stored."""
    held = dict(feeds)
    for step in program.steps:
        held |= evaluate(step.body, held, precision=DType.F64)
    graph = program.graph
    return {n: held[v.name] for n, v in zip(graph.output_names, graph.outputs, strict=True)}


@given(random_graphs(), st.sampled_from([AcceptAll, Measured, OneConvolution]))
@settings(max_examples=60, deadline=None)
def test_programs_of_random_graphs(graph: Graph, oracle: type[AcceptAll]) -> None:
    before = str(graph)
    asked = oracle()
    program = partition(graph, asked, TARGET)
    assert str(graph) == before
    program.verify()
    # every node but constants once
    covered = [n for step in program.steps for n in step.nodes]
    assert sorted(map(id, covered)) == sorted(id(n) for n in graph.nodes if not isinstance(n.op, Constant))
    # the condensation is acyclic and the steps follow it
    place = {n: s for s, step in enumerate(program.steps) for n in step.nodes}
    edges = {(place[v.node], place[n]) for n in covered for v in n.operands if v.node in place}
    assert nx.is_directed_acyclic_graph(nx.DiGraph([e for e in edges if e[0] != e[1]]))
    assert all(a <= b for a, b in edges)
    # what is virtual is not seen outside its step
    for step in program.steps:
        for value in step.virtual:
            assert value not in step.outputs
            assert all(user in step.nodes for user in value.users)
        assert (step.verdict is not None) == (step.kind is Kind.CUDNN)
    # each body, or one that is the same question, was accepted
    accepted = {canonical_key(b) for b in asked.asked if isinstance(asked.verdict(b), Legal)}
    assert all(canonical_key(s.body) in accepted for s in program.steps if s.kind is Kind.CUDNN)
    # the bodies, in their spellings, compute what the graph does
    feeds = {v.name: np.random.default_rng(1).standard_normal(v.type.shape) for v in graph.inputs}
    want, got = evaluate(graph, feeds, precision=DType.F64), run_steps(program, feeds)
    for name in want:
        assert np.linalg.norm(got[name] - want[name]) <= 1e-9 * np.linalg.norm(want[name])
    assert str(partition(graph.clone(), oracle(), TARGET)) == str(program)


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16])
def test_resnet50_has_53_convolution_steps_of_57(batch: int, dtype: DType) -> None:
    oracle = Measured()
    program = partition(resnet50(batch, dtype), oracle, TARGET)
    convs = [s for s in program.steps if s.signature.startswith("conv")]
    assert len(convs) == 53
    assert all(s.verdict is not None and s.verdict.kind == "precompiled" for s in convs)
    assert sum(s.signature == "conv+bias+add+relu" for s in convs) == 16
    assert sum(s.signature == "conv+bias+relu" for s in convs) == 33
    assert sum(s.signature == "conv+bias" for s in convs) == 4  # the shortcuts with a convolution
    others = [s.signature for s in program.steps if s not in convs and s.kind is not Kind.VIEW]
    assert others == ["max_pool", "reduce", "matmul+bias", "softmax"]
    assert program.launches == 57
    assert oracle.waves <= 3
    assert len(oracle.asked) < 40  # equal blocks are judged once


def test_recorded_answers_are_enough() -> None:
    graph = resnet50()
    first = Measured()
    program = partition(graph, first, TARGET)
    recording = {canonical_key(body): first.verdict(body) for body in first.asked}
    assert len(recording) == len(first.asked)
    assert str(partition(graph, Recorded(recording), TARGET)) == str(program)


def test_no_other_spelling_is_judged_after_a_fast_one() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType((2, 4, 4, 4), DType.F32))
    graph.set_outputs([graph.add(pw("relu"), graph.add(CONV, x, graph.constant(np.ones((4, 4, 3, 3), np.float32))))])

    class Slow(AcceptAll):
        def verdict(self, body: Graph):
            return RUNTIME

    class OnlyAsItIs(AcceptAll):
        def verdict(self, body: Graph):
            return Refused("plan", "", "no") if "zero_bias" in str(body) else FAST

    class FastAsItIs(AcceptAll):
        def verdict(self, body: Graph):
            return RUNTIME if "zero_bias" in str(body) else FAST

    cases = [
        (AcceptAll(), 1, "zero_bias"),
        (Slow(), 2, "zero_bias"),
        (OnlyAsItIs(), 2, ""),
        (FastAsItIs(), 2, ""),
    ]
    for oracle, asked, spelling in cases:
        (step,) = partition(graph, oracle, TARGET).steps
        assert len(oracle.asked) == asked
        assert "".join(step.spelling) == spelling


def test_the_longest_accepted_prefix_is_found_by_bisection() -> None:
    graph = Graph()
    v = graph.add_input("x", TensorType((2, 4, 4, 4), DType.F32))
    for name in ("exp", "neg", "erf", "sqrt", "tanh", "abs"):
        v = graph.add(pw(name), v)
    graph.set_outputs([v])

    class Lengths(AcceptAll):
        def __init__(self, *lengths: int) -> None:
            super().__init__()
            self.lengths = lengths

        def verdict(self, body: Graph):
            return FAST if len(body) in self.lengths else Refused("plan", "", "no")

    def lengths(oracle: AcceptAll) -> list[int]:
        return [len(s.nodes) for s in partition(graph, oracle, TARGET).steps if s.kind is Kind.CUDNN]

    assert lengths(Lengths(1, 2, 3, 4, 5)) == [5, 1]
    assert lengths(Lengths(5, 1)) == [1, 5]  # nothing longer than the refused 3 is asked for the first node
    assert lengths(Lengths(1, 2, 3)) == [3, 3]
    assert lengths(Lengths()) == []
    oracle = Lengths(1, 2, 3, 4, 5)
    partition(graph, oracle, TARGET)
    assert [len(b) for b in oracle.asked] == [6, 3, 4, 5, 1]


def test_a_call_that_broadcasts_both_operands_is_a_step_alone() -> None:
    """cuDNN refuses every pointwise graph with such a call, so that no other op is asked about together with it."""
    graph = Graph()
    x = graph.add_input("x", TensorType((8, 64, 1), DType.F32))
    y = graph.add_input("y", TensorType((8, 1, 32), DType.F32))
    outer = graph.add(pw("mul"), graph.add(pw("exp"), x), y)
    last = graph.add(pw("neg"), graph.add(pw("tanh"), graph.add(pw("add"), outer, graph.constant(np.float32(2)))))
    graph.set_outputs([last])
    oracle = AcceptAll()
    steps = [[n.op.name for n in s.nodes] for s in partition(graph, oracle, TARGET).steps]
    assert steps == [["exp"], ["mul"], ["add", "tanh", "neg"]]
    assert oracle.waves == 1


def test_a_refusal_of_fusec_itself_takes_no_question_and_no_round() -> None:
    graph = Graph()
    v = graph.add_input("x", TensorType((2, 4, 4, 4), DType.F32))
    for name in ("exp", "neg", "erf", "tanh", "abs"):
        v = graph.add(pw(name), v)
    graph.set_outputs([v])

    class WithoutErf(AcceptAll):
        def refusal(self, body: Graph) -> Refused | None:
            has = any(n.op.name == "erf" for n in body.nodes)
            return Refused("lower", "FUSEC", "erf: refused here") if has else None

    oracle = WithoutErf()
    program = partition(graph, oracle, TARGET)
    assert [[n.op.name for n in s.nodes] for s in program.steps] == [["exp", "neg"], ["erf"], ["tanh", "abs"]]
    assert [s.kind for s in program.steps] == [Kind.CUDNN, Kind.KERNEL, Kind.CUDNN]
    assert oracle.waves == 1 and len(oracle.asked) == 2
    assert all(getattr(r.reason, "code", "") == "FUSEC" for r in program.refusals) and program.refusals


def test_the_length_after_a_refusal_of_fusec_takes_no_second_round() -> None:
    """Costs choose among the lengths that fusec does not refuse before cuDNN is asked, so that one is asked about."""
    graph = Graph()
    x = graph.add_input("x", TensorType((1024, 1024), DType.F32))
    narrow = graph.add_input("narrow", TensorType((1, 1024), DType.F32))
    branches = [graph.add(pw("add"), graph.add(pw(name), x), narrow) for name in ("exp", "neg", "abs")]
    joined = graph.add(pw("erf"), graph.add(pw("mul"), branches[0], branches[1]))
    graph.set_outputs([graph.add(pw("mul"), joined, branches[2])])

    class WithoutErf(AcceptAll):
        def refusal(self, body: Graph) -> Refused | None:
            refused = len(body) > 1 and any(n.op.name == "erf" for n in body.nodes)
            return Refused("lower", "FUSEC", "erf: refused with others") if refused else None

    oracle = WithoutErf()
    program = partition(graph, oracle, TARGET)
    assert oracle.waves == 1
    assert len(oracle.asked) == sum(s.kind is Kind.CUDNN for s in program.steps)


def test_a_step_of_pointwise_ops_has_few_tensors_in_memory() -> None:
    """The time to build a plan grows with the square of the tensors."""
    graph = Graph()
    kind = TensorType((2, 4, 4, 4), DType.F32)
    v, stored = graph.add_input("x", kind), []
    for place in range(20):
        v = graph.add(pw("add"), v, graph.add_input(f"x{place}", kind))
        stored.append(v)
    graph.set_outputs(stored)
    steps = partition(graph, AcceptAll(), TARGET).steps
    assert [len(s.nodes) for s in steps] == [15, 5]
    assert [len(s.inputs) + len(s.outputs) for s in steps] == [31, 11]


def test_an_op_that_cudnn_never_runs_joins_no_candidate() -> None:
    """Candidates grow around it, so that none is refused because of it; it is refused alone, with its reason."""
    graph = Graph()
    x = graph.add_input("x", TensorType((2, 4, 4, 4), DType.F32))
    start = graph.add(pw("exp"), x)
    turned = graph.add(pw("sin"), start)
    other = graph.add(pw("neg"), graph.add(pw("abs"), start))
    graph.set_outputs([turned, other])

    class WithoutSin(AcceptAll):
        def refusal(self, body: Graph) -> Refused | None:
            has = any(n.op.name == "sin" for n in body.nodes)
            return Refused("lower", "FUSEC", "sin: cuDNN's mode loses digits") if has else None

    oracle = WithoutSin()
    program = partition(graph, oracle, TARGET)
    assert [[n.op.name for n in s.nodes] for s in program.steps] == [["exp", "abs", "neg"], ["sin"]]
    assert [[n.op.name for n in r.nodes] for r in program.refusals] == [["sin"]]
    assert len(oracle.asked) == 1


def test_equal_nodes_with_another_output_are_another_question() -> None:
    graph = Graph()
    weight = graph.constant(np.ones((4, 4, 3, 3), np.float32))
    bias = graph.constant(np.ones((1, 4, 1, 1), np.float32))
    outputs = []
    for stored in (False, True):
        x = graph.add_input(f"x{stored}", TensorType((2, 4, 4, 4), DType.F32))
        biased = graph.add(pw("add"), graph.add(CONV, x, weight), bias)
        outputs += [*([biased] if stored else []), graph.add(pw("relu"), biased)]
    graph.set_outputs(outputs)
    oracle = Measured()
    program = partition(graph, oracle, TARGET)
    assert len(oracle.asked) == 2
    assert [s.verdict.kind for s in program.steps if s.verdict is not None] == ["precompiled", "runtime"]


def test_progress_reaches_its_total() -> None:
    seen: list[tuple[int, int]] = []
    partition(resnet50(), OneConvolution(), TARGET, lambda done, total: seen.append((done, total)))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] > 0
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)


SCRIPT = """
from passes.partition.graphs import resnet50
from passes.partition.judges import OneConvolution
from fusec.passes.partition import partition
from fusec.targets.target import load
from fusec.text import parse
print(partition(resnet50(), OneConvolution(), load("t4")))
"""


def test_the_hash_seed_does_not_matter() -> None:
    tests = Path(__file__).parents[2]
    printed = set()
    for seed in "0", "77":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        printed.add(run.stdout)
    assert len(printed) == 1


def long_graph(kind: str, count: int) -> Graph:
    graph = Graph(kind)
    v = x = graph.add_input("x", TensorType((1, 8, 8, 8), DType.F32, (0, 2, 3, 1)))
    w = graph.constant(np.ones((8, 8, 3, 3), np.float32))
    b = graph.constant(np.ones((1, 8, 1, 1), np.float32))
    hub = graph.add(pw("sigmoid"), x)
    while len(graph) < count:
        if kind == "chain":
            v = graph.add(pw("relu"), v)
        elif kind == "residual":
            y = graph.add(pw("relu"), graph.add(pw("add"), graph.add(CONV, v, w), b))
            v = graph.add(pw("relu"), graph.add(pw("add"), graph.add(pw("add"), graph.add(CONV, y, w), b), v))
        else:  # one value that everything uses
            v = graph.add(pw("add"), graph.add(CONV, v, w), hub)
    graph.set_outputs([v])
    return graph


@pytest.mark.parametrize("kind", quick(["chain", "residual", "hub"], ["residual"]))
def test_ten_thousand_nodes(kind: str) -> None:
    graph, oracle = long_graph(kind, 10_000), Measured()
    start = time.process_time()
    program = partition(graph, oracle, TARGET)
    assert time.process_time() - start < 12
    assert len(oracle.asked) <= 4
    assert program.launches < 6000


def test_an_empty_graph_has_no_steps() -> None:
    graph = Graph()
    graph.set_outputs([graph.add_input("x", TensorType((4,), DType.F32))])
    oracle = AcceptAll()
    assert partition(graph, oracle, TARGET).steps == ()
    assert oracle.waves == 0


def test_a_recomputed_value_is_no_epilogue() -> None:
    """Rematerialisation computed it again for a distant reader."""
    graph = parse("""graph "g" (%x: f32[1,8,16], %w: f32[1,16,16], %c: f32[16], %d: f32[1,8,16]) {
  %m = matmul(%x, %w)
  %a = add(%m, %c)
  %g = gelu(%a)
  %again = add(%m, %c)
  %late = gelu_backward(%d, %again)
  return %g, %late
}""")
    program = partition(graph, AcceptAll(), load("h200"))
    assert [s.signature for s in program.steps] == ["matmul+add+gelu", "add+gelu_backward"]
