"""Let each node of a captured CUDA graph that follows several others wait for the end of all of them.

A dependent launch waits by itself for the launch before it. On an H200, one that followed several launches read results
that one of them had not written yet. cuDNN's plans launch some kernels so, whatever they follow.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from typing import Any

from fusec.gpu.launch.dependent_launch import driver_function
from fusec.gpu.launch.edited_graph import EditedGraph, call, handles

PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_uint8),
        ("to_port", ctypes.c_uint8),
        ("type", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8 * 5),
    )


def with_full_edges(captured: Any) -> Any:
    """Return a captured graph whose nodes wait for the end of all nodes before them, if these are several.

    Returns the same graph if no edge has to change. Drivers without such edges have no function that lists them.
    """
    if driver_function("cuGraphGetEdges_v2") is None:
        return captured
    into: dict[int, list[tuple[int, EdgeData]]] = defaultdict(list)
    for before, after, edge in _edges(captured.graph):
        into[after].append((before, edge))
    changed = [
        (before, after, edge)
        for after, edges in into.items()
        for before, edge in edges
        if len(edges) > 1 and edge.type == PROGRAMMATIC
    ]
    for before, after, edge in changed:
        pair = (ctypes.c_void_p(captured.graph), handles([before]), handles([after]))
        call("cuGraphRemoveDependencies_v2", *pair, ctypes.byref(edge), ctypes.c_size_t(1))
        call("cuGraphAddDependencies", *pair, ctypes.c_size_t(1))
    return EditedGraph(captured) if changed else captured


def _edges(graph: int) -> list[tuple[int, int, EdgeData]]:
    count = ctypes.c_size_t()
    call("cuGraphGetEdges_v2", ctypes.c_void_p(graph), None, None, None, ctypes.byref(count))
    before, after, edges = handles([0] * count.value), handles([0] * count.value), (EdgeData * count.value)()
    if count.value:
        call("cuGraphGetEdges_v2", ctypes.c_void_p(graph), before, after, edges, ctypes.byref(count))
    return list(zip(before, after, edges, strict=True))
