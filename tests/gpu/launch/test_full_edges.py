"""Test that a node of a graph that follows several others waits for the end of all of them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from gpu.launch.test_dependent_launch import SLOW, recorded

pytest.importorskip("cupy")

from fusec.gpu.launch import dependent_launch, edited_graph, full_edges
from fusec.gpu.launch.cupy_arrays import cupy
from fusec.gpu.launch.dependent_launch import DependentFunction
from fusec.gpu.launch.full_edges import PROGRAMMATIC, EdgeData, with_full_edges

GRAPH = 77


class Captured:
    """A graph as CuPy captures it."""

    graph = GRAPH


class Driver:
    """A driver with one graph. edges: the type of the edge from one node to another."""

    def __init__(self, edges: dict[tuple[int, int], int]):
        self.edges = edges

    def function(self, name: str) -> Any:
        functions: dict[str, Any] = {
            "cuGraphGetEdges_v2": self.list_edges,
            "cuGraphRemoveDependencies_v2": self.remove,
            "cuGraphAddDependencies": self.add,
        }
        return functions[name]

    def list_edges(self, graph: Any, before: Any, after: Any, edges: Any, count: Any) -> int:
        assert graph.value == GRAPH
        count._obj.value = len(self.edges)
        if before is not None:
            for i, ((a, b), kind) in enumerate(self.edges.items()):
                before[i], after[i], edges[i] = a, b, EdgeData(kind, 0, kind)
        return 0

    def remove(self, graph: Any, before: Any, after: Any, edge: Any, count: Any) -> int:
        assert graph.value == GRAPH and count.value == 1
        return 1 - (self.edges.pop((before[0], after[0])) == edge._obj.type == edge._obj.from_port)

    def add(self, graph: Any, before: Any, after: Any, count: Any) -> int:
        assert graph.value == GRAPH and count.value == 1
        self.edges[before[0], after[0]] = 0
        return 0


def in_place(monkeypatch: pytest.MonkeyPatch, edges: dict[tuple[int, int], int]) -> Driver:
    driver = Driver(edges)
    for module in (full_edges, edited_graph):
        monkeypatch.setattr(module, "driver_function", driver.function)
    monkeypatch.setattr(cupy.cuda.runtime, "graphInstantiate", lambda graph: graph + 1)
    monkeypatch.setattr(cupy.cuda.runtime, "graphExecDestroy", lambda executable: None)
    return driver


def test_the_structure_has_the_layout_of_cuda_h() -> None:
    assert ctypes.sizeof(EdgeData) == 8 and EdgeData.type.offset == 2


def test_edges_into_a_node_that_follows_several_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = {(1, 2): 1, (2, 3): 1, (1, 3): 1, (3, 4): 0, (2, 4): 1, (4, 5): 0}
    driver, captured = in_place(monkeypatch, edges), Captured()
    assert with_full_edges(captured) is not captured
    assert driver.edges == {(1, 2): PROGRAMMATIC, (2, 3): 0, (1, 3): 0, (3, 4): 0, (2, 4): 0, (4, 5): 0}


def test_other_graphs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, captured = in_place(monkeypatch, {(1, 2): 1, (2, 3): 0, (1, 3): 0}), Captured()
    assert with_full_edges(captured) is captured and driver.edges[1, 2] == PROGRAMMATIC
    monkeypatch.setattr(full_edges, "driver_function", lambda name: None)
    assert with_full_edges(captured) is captured


@pytest.mark.gpu
def test_a_dependent_launch_after_two_streams_reads_what_both_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch it as cuDNN launches some kernels: as a dependent launch that does not wait by itself."""
    launch = dependent_launch.driver()
    if launch is None:
        pytest.skip("no dependent launches")
    monkeypatch.setattr(dependent_launch, "dependencies", lambda stream: 1)
    slow = cupy.RawKernel(SLOW, "slow")
    source = """extern "C" __global__ void add(const unsigned short* x, unsigned short* y) {
      y[threadIdx.x] = x[threadIdx.x] + 1;
    }"""
    add = cupy.RawKernel(source, "add")
    slow.compile()
    add.compile()
    first, middle, last = (cupy.zeros(256, cupy.uint16) for _ in range(3))
    stream, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture(mode=2)
        other.wait_event(recorded(stream))
        for lane, start in ((stream, 0), (other, 128)):
            with lane:
                slow((1,), (128,), (first, middle, np.uint32(start), np.uint32(128)))
        stream.wait_event(recorded(other))
        DependentFunction(add, launch)((1,), (256,), (middle, last))
        captured = stream.end_capture()
        graph = with_full_edges(captured)
        assert graph is not captured
        for value in range(1, 20):
            first.fill(value)
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_array_equal(last.get(), np.full(256, value + 1, np.uint16))
