"""Replace the memset nodes of a captured CUDA graph by kernels.

cuDNN's plans clear buffers that they add to. On an H200, a memset node takes longer than a kernel node.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import cupy

from fusec.gpu.launch.dependent_launch import driver_function
from fusec.gpu.launch.edited_graph import EditedGraph, call, handles, list_nodes
from fusec.gpu.nvrtc import function_of

MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET
BLOCK, WAVES, STORED_BYTES = 256, 2, 16  # threads of a block; blocks of a multiprocessor, at most; bytes of one store
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


def without_memsets(captured: Any) -> Any:
    """Return a captured graph with kernels in place of its memset nodes; itself if it has none.

    Without a driver that lists nodes, it stays as it is.
    """
    if driver_function("cuGraphGetNodes") is None:
        return captured
    replaced = [replace_memset(captured.graph, node) for node in _nodes(captured.graph) if _is_memset(node)]
    return EditedGraph(captured) if any(replaced) else captured


def replace_memset(graph: int, node: int) -> bool:
    """Replace a memset node by a kernel node between the same nodes; False if it has rows or is not aligned."""
    memset = Memset()
    call("cuGraphMemsetNodeGetParams", ctypes.c_void_p(node), ctypes.byref(memset))
    if memset.height != 1 or memset.target % STORED_BYTES or memset.element_bytes not in REPEATED:
        return False
    before, after = (list_nodes(f"cuGraphNodeGet{kind}", node) for kind in ("Dependencies", "DependentNodes"))
    added = _add_fill(graph, memset, before)
    if after:
        edges = (handles([added] * len(after)), handles(after))
        call("cuGraphAddDependencies", ctypes.c_void_p(graph), *edges, ctypes.c_size_t(len(after)))
    call("cuGraphDestroyNode", ctypes.c_void_p(node))
    return True


def _add_fill(graph: int, memset: Memset, before: list[int]) -> int:
    """Add a kernel node that does what a memset does after other nodes, and return it."""
    nbytes = memset.width * memset.element_bytes
    word = memset.element % (1 << 8 * memset.element_bytes) * REPEATED[memset.element_bytes]
    given = (ctypes.c_uint64(memset.target), ctypes.c_uint32(word), ctypes.c_uint64(nbytes))
    arguments = (ctypes.c_void_p * len(given))(*map(ctypes.addressof, given))
    node = KernelNode(function=_fill().kernel.ptr, arguments=ctypes.addressof(arguments))
    node.grid[:] = (max(1, min(_most_blocks(), -(-nbytes // (BLOCK * STORED_BYTES)))), 1, 1)
    node.block[:] = (BLOCK, 1, 1)
    added = ctypes.c_void_p()
    given_edges = (handles(before), ctypes.c_size_t(len(before)))
    call("cuGraphAddKernelNode_v2", ctypes.byref(added), ctypes.c_void_p(graph), *given_edges, ctypes.byref(node))
    assert added.value is not None
    return added.value


@cache
def _most_blocks() -> int:
    return WAVES * int(cupy.cuda.Device().attributes["MultiProcessorCount"])


@cache
def _fill() -> Any:
    return function_of(FILL, "fill")


def _nodes(graph: int) -> list[int]:
    return list_nodes("cuGraphGetNodes", graph)


def _is_memset(node: int) -> bool:
    kind = ctypes.c_int()
    call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
    return kind.value == MEMSET
