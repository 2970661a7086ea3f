"""Generate linear recurrences: a thread runs all steps of one element, so that the state stays in a register."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Kernel, ceil_div, compute_type
from fusec.gpu.kernels.codegen.pointwise_code import Space, thread_index
from fusec.ir import Node, Value
from fusec.ops import LinearScan

TOGETHER = 8  # steps whose operands are loaded together
_CUDA = cuda_template(__package__, "linear_scan.cuh").bind(TOGETHER=TOGETHER)


def linear_scan(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a linear_scan; None for other steps."""
    node = nodes[0]
    if len(nodes) != 1 or not isinstance(node.op, LinearScan):
        return None
    y = node.result.type
    if y.dtype not in C_TYPES or y.size >= 1 << 31:
        return None
    if y.size == 0:
        return Kernel("linear_scan", ())
    axis = node.op.axis % y.rank
    dims = [d for d in y.order or range(y.rank) if d != axis and y.shape[d] != 1]
    names = tuple("at" if d == axis else f"c{d}" if d in dims else None for d in range(y.rank))
    space, arguments = Space(y.shape, names), Arguments()
    factors, terms = node.operands
    threads = y.size // y.shape[axis]
    lines = thread_index(threads, [(f"c{d}", y.shape[d]) for d in dims])
    lines += _CUDA(
        "scan",
        NUMBER=compute_type(y.dtype),
        TYPE=C_TYPES[y.dtype],
        STEPS=y.shape[axis],
        FACTORS=arguments.read(factors),
        TERMS=arguments.read(terms),
        RESULT=arguments.write(node.result),
        AT_FACTOR=space.offset(factors.type),
        AT_TERM=space.offset(terms.type),
        AT_RESULT=space.offset(y),
    )
    return Kernel("linear_scan", (arguments.launch("linear_scan", lines, ceil_div(threads, BLOCK)),))
