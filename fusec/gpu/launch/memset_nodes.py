"""Replace the memset nodes of a captured CUDA graph by kernels.

cuDNN's plans clear buffers that they add to. A memset node takes several microseconds more than a kernel node.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import cupy

from fusec.errors import ExecutionError
from fusec.gpu.launch.dependent_launch import driver_function
from fusec.gpu.nvrtc import function_of

MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET
BLOCK, MOST_BLOCKS, STORED_BYTES = 256, 264, 16  # threads of a block; blocks at most; bytes of one store
REPEATED = {1: 0x01010101, 2: 0x00010001, 4: 1}  # makes a word of an element, by the element's bytes
FILL = """
extern "C" __global__ void __launch_bounds__(256) fill(u8* to, const u32 word, const u64 nbytes) {
  const Pack<u32, 4> words = {{word, word, word, word}};
  for (u64 i = (blockIdx.x * 256ull + threadIdx.x) * 16ull; i < nbytes; i += gridDim.x * 4096ull) {
    if (i + 16ull <= nbytes) *(Pack<u32, 4>*)(to + i) = words;
    else for (u64 j = i; j < nbytes; ++j) to[j] = (u8)(word >> (8ull * (j & 3ull)));
  }
}
"""


class Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("target", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("element", ctypes.c_uint32),
        ("element_bytes", ctypes.c_uint32),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS of version 2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class EditedGraph:
    """A captured graph that was changed, with the interface of CuPy's.

    captured: CuPy's graph, which owns the nodes.
    """

    def __init__(self, captured: Any):
        self._captured = captured
        self._executable = cupy.cuda.runtime.graphInstantiate(captured.graph)
        weakref.finalize(self, cupy.cuda.runtime.graphExecDestroy, self._executable)

    def launch(self, stream: Any) -> None:
        cupy.cuda.runtime.graphLaunch(self._executable, stream.ptr)

    def upload(self, stream: Any) -> None:
        cupy.cuda.runtime.graphUpload(self._executable, stream.ptr)


def without_memsets(captured: Any) -> Any:
    """Return a captured graph with kernels in place of its memset nodes; itself if it has none.

    A stand-in for a GPU has no driver, and no such nodes.
    """
    if driver_function("cuGraphGetNodes") is None:
        return captured
    replaced = [replace_memset(captured.graph, node) for node in _nodes(captured.graph) if _is_memset(node)]
    return EditedGraph(captured) if any(replaced) else captured


def replace_memset(graph: int, node: int) -> bool:
    """Replace a memset node by a kernel node between the same nodes; False if it has rows or is not aligned."""
    memset = Memset()
    _call("cuGraphMemsetNodeGetParams", ctypes.c_void_p(node), ctypes.byref(memset))
    if memset.height != 1 or memset.target % STORED_BYTES or memset.element_bytes not in REPEATED:
        return False
    before, after = (_neighbours(f"cuGraphNodeGet{kind}", node) for kind in ("Dependencies", "DependentNodes"))
    added = _add_fill(graph, memset, before)
    if after:
        edges = (_handles([added] * len(after)), _handles(after))
        _call("cuGraphAddDependencies", ctypes.c_void_p(graph), *edges, ctypes.c_size_t(len(after)))
    _call("cuGraphDestroyNode", ctypes.c_void_p(node))
    return True


def _add_fill(graph: int, memset: Memset, before: list[int]) -> int:
    """Add a kernel node that does what a memset does after other nodes, and return it."""
    nbytes = memset.width * memset.element_bytes
    word = memset.element % (1 << 8 * memset.element_bytes) * REPEATED[memset.element_bytes]
    given = (ctypes.c_uint64(memset.target), ctypes.c_uint32(word), ctypes.c_uint64(nbytes))
    arguments = (ctypes.c_void_p * len(given))(*map(ctypes.addressof, given))
    node = KernelNode(function=_fill().kernel.ptr, arguments=ctypes.addressof(arguments))
    node.grid[:] = (max(1, min(MOST_BLOCKS, -(-nbytes // (BLOCK * STORED_BYTES)))), 1, 1)
    node.block[:] = (BLOCK, 1, 1)
    added = ctypes.c_void_p()
    given_edges = (_handles(before), ctypes.c_size_t(len(before)))
    _call("cuGraphAddKernelNode_v2", ctypes.byref(added), ctypes.c_void_p(graph), *given_edges, ctypes.byref(node))
    assert added.value is not None
    return added.value


@cache
def _fill() -> Any:
    return function_of(FILL, "fill")


def _nodes(graph: int) -> list[int]:
    return _neighbours("cuGraphGetNodes", graph)


def _neighbours(name: str, of: int) -> list[int]:
    """Return the nodes that a function of the driver lists: of a graph, or before or after a node."""
    count = ctypes.c_size_t()
    _call(name, ctypes.c_void_p(of), None, ctypes.byref(count))
    found = _handles([0] * count.value)
    if count.value:
        _call(name, ctypes.c_void_p(of), found, ctypes.byref(count))
    return [handle for handle in found if handle is not None][: count.value]


def _is_memset(node: int) -> bool:
    kind = ctypes.c_int()
    _call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
    return kind.value == MEMSET


def _handles(nodes: list[int]) -> Any:
    return (ctypes.c_void_p * len(nodes))(*nodes)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises ExecutionError if it refuses."""
    function: Callable[..., int] | None = driver_function(name)
    status = -1 if function is None else function(*arguments)
    if status:
        raise ExecutionError(f"the driver refused {name} while memset nodes were replaced: CUDA error {status}")
