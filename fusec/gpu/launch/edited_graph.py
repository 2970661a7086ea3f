"""Change a captured CUDA graph by calls of the driver, and run it. CuPy has no such calls."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import cupy

from fusec.errors import ExecutionError
from fusec.gpu.launch.dependent_launch import driver_function


class EditedGraph:
    """A captured graph that was changed, with the interface of CuPy's.

    captured: CuPy's graph, which owns the nodes.
    graph: its address.
    """

    def __init__(self, captured: Any):
        self._captured, self.graph = captured, captured.graph
        self._executable = cupy.cuda.runtime.graphInstantiate(captured.graph)
        weakref.finalize(self, cupy.cuda.runtime.graphExecDestroy, self._executable)

    def launch(self, stream: Any) -> None:
        cupy.cuda.runtime.graphLaunch(self._executable, stream.ptr)

    def upload(self, stream: Any) -> None:
        cupy.cuda.runtime.graphUpload(self._executable, stream.ptr)


def list_nodes(name: str, of: int) -> list[int]:
    """Return the nodes that a function of the driver lists: of a graph, or before or after a node."""
    count = ctypes.c_size_t()
    call(name, ctypes.c_void_p(of), None, ctypes.byref(count))
    found = handles([0] * count.value)
    if count.value:
        call(name, ctypes.c_void_p(of), found, ctypes.byref(count))
    return [handle for handle in found if handle is not None][: count.value]


def handles(nodes: list[int]) -> Any:
    return (ctypes.c_void_p * len(nodes))(*nodes)


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises ExecutionError if it refuses."""
    function: Callable[..., int] | None = driver_function(name)
    status = -1 if function is None else function(*arguments)
    if status:
        raise ExecutionError(f"the driver refused {name} while a graph was changed: CUDA error {status}")
