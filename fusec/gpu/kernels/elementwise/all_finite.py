"""Generate the check that many tensors are finite.

Each block checks a part of a tensor. Then one block combines their answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import (
    BLOCK,
    C_TYPES,
    MAX_VECTOR,
    VECTOR_BYTES,
    Arguments,
    Kernel,
    Launch,
    ceil_div,
    compute_type,
)
from fusec.gpu.kernels.elementwise.multi_tensor import MAX_POINTERS, select_block
from fusec.ir import DType, Node, Value
from fusec.ops import AllFinite

PER_THREAD = 64  # elements
_CUDA = cuda_template(__package__, "all_finite.cuh").bind(BLOCK=BLOCK)


def all_finite(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of an all_finite; None for other steps."""
    if len(nodes) != 1 or not isinstance(nodes[0].op, AllFinite):
        return None
    kinds: dict[DType, list[Value]] = {}
    for value in dict.fromkeys(nodes[0].operands):
        if value.type.size:
            kinds.setdefault(value.type.dtype, []).append(value)
    launches: list[Launch] = []
    done = 0
    for dtype, values in kinds.items():
        for first in range(0, len(values), MAX_POINTERS):
            launch, done = _check(dtype, values[first : first + MAX_POINTERS], done)
            launches.append(launch)
    return Kernel("all_finite", (*launches, _combine(nodes[0].result, done)), 4 * max(done, 1))


def _check(dtype: DType, values: Sequence[Value], done: int) -> tuple[Launch, int]:
    """Return the launch that stores one number per block from place `done` on, 1 where an element is not finite."""
    arguments = Arguments()
    vector = min(MAX_VECTOR, VECTOR_BYTES // dtype.itemsize)
    chunk = BLOCK * PER_THREAD
    leaves: list[list[str]] = []
    ends: list[int] = []
    total = 0
    for value in values:
        leaves.append([f"m = {arguments.read(value)};", f"size = {value.type.size}ull;", f"b -= {total}u;"])
        total += ceil_div(value.type.size, chunk)
        ends.append(total)
    cuda = _CUDA.bind(TYPE=C_TYPES[dtype], NUMBER=compute_type(dtype), VECTOR=vector)
    lines = cuda(
        "check_chunk",
        SELECT_TENSOR=select_block(leaves, ends),
        CHUNK=chunk,
        TURNS=PER_THREAD // vector,
        CHECK_VECTOR=cuda("check_vector"),
        SCRATCH=arguments.scratch(),
        DONE=done,
    )
    return arguments.launch("finite", lines, total), done + total


def _combine(result: Value, count: int) -> Launch:
    arguments = Arguments()
    lines = _CUDA("combine", COUNT=count, SCRATCH=arguments.scratch(), RESULT=arguments.write(result))
    return arguments.early_launch("finite_all", lines, 1)
