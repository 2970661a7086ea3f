"""Test that kernels take the place of a graph's memset nodes: on a driver of Python's own, and on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu.launch.test_dependent_launch import recorded

pytest.importorskip("cupy")

from fusec.errors import ExecutionError
from fusec.gpu.launch import edited_graph, memset_nodes
from fusec.gpu.launch.cupy_arrays import cupy
from fusec.gpu.launch.memset_nodes import KernelNode, Memset, without_memsets

KERNEL, MEMSET, GRAPH = 0, memset_nodes.MEMSET, 77


class Driver:
    """A driver with one graph, of nodes that are numbers.

    nodes: the kind of each node.
    edges: from one node to another.
    memsets: what each memset node does.
    added: threads and arguments of the kernel nodes that were added.
    """

    def __init__(self, nodes: dict[int, int], edges: set[tuple[int, int]], memsets: dict[int, tuple[int, ...]]):
        self.nodes, self.edges, self.memsets = nodes, edges, memsets
        self.added: dict[int, tuple[int, tuple[int, int, int]]] = {}
        self.refused = ""

    def function(self, name: str) -> Callable[..., int]:
        return {
            "cuGraphGetNodes": self.list_nodes,
            "cuGraphNodeGetDependencies": self.list_before,
            "cuGraphNodeGetDependentNodes": self.list_after,
            "cuGraphNodeGetType": self.tell_kind,
            "cuGraphMemsetNodeGetParams": self.tell_memset,
            "cuGraphAddKernelNode_v2": self.add_kernel,
            "cuGraphAddDependencies": self.add_edges,
            "cuGraphDestroyNode": self.remove,
        }[name]

    def list_nodes(self, graph: Any, found: Any, count: Any) -> int:
        assert graph.value == GRAPH
        return self._list(list(self.nodes), found, count)

    def list_before(self, node: Any, found: Any, count: Any) -> int:
        return self._list([a for a, b in sorted(self.edges) if b == node.value], found, count)

    def list_after(self, node: Any, found: Any, count: Any) -> int:
        return self._list([b for a, b in sorted(self.edges) if a == node.value], found, count)

    def _list(self, nodes: list[int], found: Any, count: Any) -> int:
        if found is not None:
            found[: len(nodes)] = nodes
        count._obj.value = len(nodes)
        return 0

    def tell_kind(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.nodes[node.value]
        return 0

    def tell_memset(self, node: Any, memset: Any) -> int:
        for (name, *_), value in zip(Memset._fields_, self.memsets[node.value], strict=True):
            setattr(memset._obj, name, value)
        return 0

    def add_kernel(self, added: Any, graph: Any, before: Any, count: Any, kernel: Any) -> int:
        if self.refused:
            return 801
        new, node = 100 + len(self.added), kernel._obj
        assert graph.value == GRAPH and node.function == 7 and count.value == len(before)
        places = (ctypes.c_void_p * 3).from_address(node.arguments)
        target, nbytes = (ctypes.c_uint64.from_address(places[i] or 0).value for i in (0, 2))
        word = ctypes.c_uint32.from_address(places[1] or 0).value
        self.added[new] = node.grid[0] * node.block[0], (target, word, nbytes)
        self.nodes[new] = KERNEL
        self.edges |= {(node, new) for node in before}
        added._obj.value = new
        return 0

    def add_edges(self, graph: Any, before: Any, after: Any, count: Any) -> int:
        assert count.value == len(before) == len(after)
        self.edges |= set(zip(before, after, strict=True))
        return 0

    def remove(self, node: Any) -> int:
        del self.nodes[node.value]
        self.edges = {edge for edge in self.edges if node.value not in edge}
        return 0


class Captured:
    """A graph as CuPy captures it."""

    graph = GRAPH


def chain(monkeypatch: pytest.MonkeyPatch, *memset: int) -> Driver:
    """Put a driver in place whose graph has a memset between kernels 1 and 3, before kernel 4, too."""
    driver = Driver({1: KERNEL, 2: MEMSET, 3: KERNEL, 4: KERNEL}, {(1, 2), (2, 3), (2, 4), (1, 4)}, {2: memset})
    filling = type("Function", (), {"kernel": type("Kernel", (), {"ptr": 7})})
    for module in (memset_nodes, edited_graph):
        monkeypatch.setattr(module, "driver_function", driver.function)
    monkeypatch.setattr(memset_nodes, "_fill", lambda: filling)
    monkeypatch.setattr(memset_nodes, "_most_blocks", lambda: 264)
    monkeypatch.setattr(cupy.cuda.runtime, "graphInstantiate", lambda graph: graph + 1)
    monkeypatch.setattr(cupy.cuda.runtime, "graphExecDestroy", lambda executable: None)
    return driver


def test_structures_have_the_layout_of_cuda_h() -> None:
    assert ctypes.sizeof(Memset) == 40 and ctypes.sizeof(KernelNode) == 72
    assert [getattr(Memset, name).offset for name in ("pitch", "element", "width", "height")] == [8, 16, 24, 32]
    assert [getattr(KernelNode, name).offset for name in ("grid", "block", "arguments", "kernel")] == [8, 20, 40, 56]


@pytest.mark.parametrize(
    ("element", "element_bytes", "count", "word", "threads"),
    [
        (0, 1, 5, 0, 256),
        (0x1AB, 1, 40000, 0xABABABAB, 2560),
        (0xABCD, 2, 8, 0xABCDABCD, 256),
        (7, 4, 1 << 30, 7, 264 * 256),
    ],
)
def test_a_kernel_takes_the_place_of_a_memset(
    element: int, element_bytes: int, count: int, word: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = chain(monkeypatch, 4096, 0, element, element_bytes, count, 1)
    launched: list[tuple[int, int]] = []
    monkeypatch.setattr(cupy.cuda.runtime, "graphLaunch", lambda *given: launched.append(given))
    graph = without_memsets(Captured())
    assert driver.added == {100: (threads, (4096, word, count * element_bytes))}
    assert driver.edges == {(1, 100), (100, 3), (100, 4), (1, 4)} and 2 not in driver.nodes
    graph.launch(type("Stream", (), {"ptr": 5}))
    assert launched == [(GRAPH + 1, 5)], "the graph is instantiated again"


@pytest.mark.parametrize("memset", [(4096, 64, 0, 1, 32, 2), (4100, 0, 0, 1, 32, 1)], ids=["rows", "not aligned"])
def test_other_memsets_stay(memset: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    driver, captured = chain(monkeypatch, *memset), Captured()
    assert without_memsets(captured) is captured and driver.nodes[2] == MEMSET and len(driver.edges) == 4


def test_a_refusal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = chain(monkeypatch, 4096, 0, 0, 1, 32, 1)
    driver.refused = "always"
    with pytest.raises(ExecutionError, match=r"cuGraphAddKernelNode_v2 .*CUDA error 801"):
        without_memsets(Captured())


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [1, 15, 4096, 100003, 20 << 20])
def test_memory_is_the_same_as_after_a_memset(nbytes: int) -> None:
    """The kernels before and after it see it in their order, also on two streams."""
    stream, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    memory, copy = cupy.zeros(nbytes + 16, cupy.uint8), cupy.zeros(nbytes + 16, cupy.uint8)
    cupy.add(memory, 1, out=memory)  # compiles what is captured
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture(mode=2)
        cupy.add(memory, 1, out=memory)
        other.wait_event(recorded(stream))
        memory.data.memset_async(0xAB, nbytes, other)
        stream.wait_event(recorded(other))
        cupy.add(memory, 1, out=copy)
        captured = stream.end_capture()
        graph = without_memsets(captured)
        assert graph is not captured
        for _ in range(2):
            memory.fill(3)
            graph.launch(stream)
        stream.synchronize()
    got, want = copy.get(), np.full(nbytes + 16, 5, np.uint8)
    want[:nbytes] = 0xAC
    np.testing.assert_array_equal(got, want)
