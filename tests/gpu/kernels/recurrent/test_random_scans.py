"""Test kernels of loops with random bodies in the emulator: results are within the error that rounding explains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES
from gpu.kernels.emulator import Emulator, needs_compiler
from helpers import HEALTH_CHECKS
from hypothesis import Phase, assume, given, seed, settings
from hypothesis import strategies as st

from fusec.gpu.kernels import Kernel, find
from fusec.ir import Graph, Node
from fusec.lowering.scan_plan import scan_plan
from fusec.ops import Scan
from fusec.reference import evaluate
from fusec.testing.error_bounds.bounds import allowed, compare, execution
from fusec.testing.generators.arrays import draw_feeds
from fusec.testing.generators.graph_builder import RandomGraph, Unfit
from fusec.testing.generators.motifs.kernels import MOST_ELEMENTS, recurrent
from fusec.testing.generators.operations import DRAWS
from fusec.testing.generators.uniform_provider import register
from fusec.testing.strategies import FLOATS
from fusec.text import parse

COUNT = 24
STYLES = ("normal", "ties", "special")
DRAWN = {"bodies of any ops": DRAWS["scan"], "independent rows": recurrent.scan}


def loops(draw: Callable[[RandomGraph], None]) -> list[Node]:
    """Return the loops of random graphs that are the same each time, so that their kernels are compiled once."""

    @st.composite
    def graphs(choose: st.DrawFn) -> Graph:
        builder = RandomGraph(choose, choose(st.sampled_from(FLOATS)))
        builder.most_elements = MOST_ELEMENTS
        try:
            draw(builder)
        except Unfit:
            assume(False)
        return builder.finish(0)

    found: list[Node] = []

    @seed(7)
    @settings(
        backend=register(),
        max_examples=COUNT,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=HEALTH_CHECKS,
    )
    @given(graphs())
    def collect(graph: Graph) -> None:
        found.extend(node for node in graph.nodes if isinstance(node.op, Scan))

    collect()
    return found


def alone(node: Node) -> Graph:
    """A graph of one node whose operands are inputs."""
    graph = Graph("one")
    inputs = [graph.add_input(f"x{index}", value.type) for index, value in enumerate(node.operands)]
    results = graph.insert(node.op, inputs).results
    graph.set_outputs(results, [f"y{index}" for index in range(len(results))])
    return graph


@needs_compiler
@pytest.mark.parametrize("kind", DRAWN)
def test_random_bodies(kind: str) -> None:
    jobs: list[tuple[Graph, Kernel]] = []
    nodes = loops(DRAWN[kind])
    for graph in map(alone, nodes):
        (node,) = graph.nodes
        kernel: Any = find([node], node.results, FIGURES)
        assert isinstance(node.op, Scan)
        assert (kernel is None) == (scan_plan(node.op) is None)
        if kernel is not None:
            jobs.append((graph, kernel))
    assert len(jobs) > COUNT // 3
    emulator = Emulator([kernel for _, kernel in jobs])
    for number, (graph, kernel) in enumerate(jobs):
        for style in STYLES:
            feeds = draw_feeds(graph, number, style)
            got = emulator.run(kernel, {v: feeds[v.name] for v in graph.inputs}, graph.outputs)
            named = dict(zip(graph.output_names, got, strict=True))
            with np.errstate(all="ignore"):
                compare(named, [allowed(graph, feeds, execution())], f"{graph}")


RARE = {
    "a concat of three operands of several rows": """(%h: f32[7], %x: f32[4,3]) {
      %l, %r = scan(%h, %x) {body=graph "body" (%h: f32[7], %x: f32[3]) {
        %a = slice(%h) {starts=[0], sizes=[2], steps=[1]}
        %b = slice(%h) {starts=[6], sizes=[2], steps=[-1]}
        %y = concat(%a, %x, %b) {axis=0}
        return %y, %y as "row"
      }, steps=4, states=1, sequences=1}
      return %l, %r
    }""",
    "more rows than are copied together": """(%h: f32[700], %x: f32[9,700]) {
      %l, %r = scan(%h, %x) {body=graph "body" (%h: f32[700], %x: f32[700]) {
        %m = reduce(%x) {kind="max", axes=[0]}
        %y = max(%h, %m)
        return %x, %y
      }, steps=9, states=1, sequences=1}
      return %l, %r
    }""",
}


@needs_compiler
@pytest.mark.parametrize("what", RARE)
def test_bodies_that_are_rarely_drawn(what: str, rng: np.random.Generator) -> None:
    graph = parse(f'graph "g" {RARE[what]}')
    (node,) = graph.nodes
    kernel = find([node], node.results, FIGURES)
    assert kernel is not None
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs}
    got = Emulator([kernel]).run(kernel, {v: feeds[v.name] for v in graph.inputs}, node.results)
    for array, want in zip(got, evaluate(graph, feeds).values(), strict=True):
        np.testing.assert_array_equal(array, want)


@needs_compiler
@pytest.mark.parametrize("kind", DRAWN)
def test_some_loops_are_for_kernels_and_some_are_not(kind: str) -> None:
    plans = [scan_plan(node.op) for node in loops(DRAWN[kind]) if isinstance(node.op, Scan)]
    assert None in plans
    assert any(plan is not None and plan.blocks > 1 for plan in plans)
    assert any(plan is not None and len(plan.phases) > 1 for plan in plans)
