"""Generate the place of the largest element of long rows, such as the best token of a decoder, in one launch.

The graph has it as the largest element, a comparison with it, and the least place where that holds. Blocks share a row,
and the last one to finish compares what they have found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, HALVES, VECTOR_BYTES, Arguments, Kernel, ceil_div
from fusec.ir import DType, Node, Value
from fusec.ops import Cast, Reduce

MIN_SIZE = 1 << 10  # of a row; a reduction shares a block among shorter ones
MAX_ROWS = 1 << 10
PART = 1 << 11  # elements of a block
KEY_BYTES = 8
_CUDA = cuda_template(__package__, "arg_max.cuh")


def arg_max(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a reduction to the largest, and to the least place of it; None for other steps."""
    x = _operand(nodes)
    if x is None or tuple(outputs) != (nodes[-1].result,):
        return None
    size, place = x.type.shape[-1], nodes[-1].result
    rows, parts = x.type.size // size, ceil_div(size, PART)
    vector = math.gcd(size, VECTOR_BYTES // x.type.dtype.itemsize)
    arguments = Arguments()
    cuda = _CUDA.bind(
        TYPE=C_TYPES[x.type.dtype],
        PLACE_TYPE=C_TYPES[place.type.dtype],
        BLOCK=BLOCK,
        WARPS=BLOCK // 32,
        VECTOR=vector,
        SIZE=size,
        LAST=size - 1,
        PART=PART,
        PARTS=parts,
    )
    pointers = {"ELEMENTS": arguments.read(x), "PLACES": arguments.write(place)}
    merge = list[str]()
    if parts > 1:
        merge = cuda("merge", SCRATCH=arguments.scratch("u64"), COUNTERS=arguments.barrier_counters(rows))
    lines = [*arguments.begin(), *cuda("kernel", MERGE=merge, **pointers)]
    launch = arguments.launch("arg_max", lines, rows * parts, preamble=cuda("functions"))
    scratch = KEY_BYTES * rows * parts if parts > 1 else 0
    name = "+".join(node.op.name for node in nodes)
    return Kernel(name, (replace(launch, dependent=True),), scratch)


def _operand(nodes: Sequence[Node]) -> Value | None:
    """Return the rows of which such nodes find the places; None for other nodes."""
    if not 4 <= len(nodes) <= 5 or [node.op.name for node in nodes[1:3]] != ["cmp_ge", "where"]:
        return None
    most, compared, chosen, least = nodes[:4]
    x = most.operands[0]
    axis, size = x.type.rank - 1, x.type.shape[-1] if x.type.rank else 0
    kinds = [(node.op.kind, node.op.axes) for node in (most, least) if isinstance(node.op, Reduce)]
    if kinds != [("max", (axis,)), ("min", (axis,))] or x.type.dtype not in (DType.F32, *HALVES):
        return None
    if compared.operands != (x, most.result) or chosen.operands[0] is not compared.result:
        return None
    if least.operands != (chosen.result,) or most.result.type.rank != x.type.rank:
        return None
    cast = nodes[4] if len(nodes) == 5 else None
    if cast is not None and (not isinstance(cast.op, Cast) or cast.operands != (least.result,)):
        return None
    places, last = (v.literal for v in chosen.operands[1:])
    if places is None or last is None or nodes[-1].result.type.dtype not in (DType.I32, DType.I64):
        return None
    is_packed = not x.type.order and not x.type.within and not nodes[-1].result.type.within
    if size < MIN_SIZE or x.type.size > size * MAX_ROWS or not is_packed:
        return None
    counted = np.array_equal(places.array.reshape(-1), np.arange(size)) and chosen.operands[1].type.shape[-1] == size
    return x if counted and last.array.size == 1 and int(last.array.reshape(-1)[0]) == size - 1 else None
