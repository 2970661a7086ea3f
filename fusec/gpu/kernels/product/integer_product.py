"""Multiply matrices of integers, exactly and modulo the range of their type.

cuDNN and cuBLAS multiply no integers of 32 or 64 bits. Such products are small parts of models (indices, shapes,
counts), so one thread sums one element of the result. The kernel also runs products of i8 that cuDNN refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Kernel, by_value, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, can_generate, split_index
from fusec.ir import Node, Value
from fusec.ops import MatMul

ENTRY = "integer_product"


def integer_product(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a matrix product of integers and its epilogue; None for other steps."""
    product, rest = nodes[0], nodes[1:]
    if not isinstance(product.op, MatMul) or not product.result.type.dtype.is_int or not all(map(can_generate, rest)):
        return None
    (a, b), y = product.operands, product.result
    if any(v.type.shape != y.type.shape for v in outputs):
        return None
    name = "+".join(node.op.name for node in nodes)
    if y.type.size == 0:
        return Kernel(name, ())
    rank, depth = y.type.rank, a.type.shape[-1]
    big = max(v.type.size for v in (a, b, y)) >= 1 << 31
    index, number = "u64" if big else "u32", C_TYPES[y.type.dtype]
    dims = [d for d in y.type.order or range(rank) if y.type.shape[d] != 1] or [rank - 1]
    names = [f"c{d}" if d in dims else None for d in range(rank)]
    *batch, row, column = names
    left = Space((*y.type.shape[:-1], depth), (*batch, row, "k"))
    right = Space((*y.type.shape[:-2], depth, y.type.shape[-1]), (*batch, "k", column))
    arguments = Arguments()
    factors = (
        f"({number}){arguments.read(a)}[{left.offset(a.type)}]",
        f"({number}){arguments.read(b)}[{right.offset(b.type)}]",
    )
    lines = [
        f"const {index} i = ({index})blockIdx.x * {BLOCK}u + threadIdx.x;",
        f"if (i >= {by_value(y.type.size, long=True)}) return;",
        *split_index("i", [(f"c{d}", y.type.shape[d]) for d in dims], big),
        f"{number} total = 0;",
        f"for ({index} k = 0; k < {depth}u; ++k) total = wrap_add(total, wrap_mul({', '.join(factors)}));",
    ]
    code = PointwiseCode(Space(y.type.shape, tuple(names)), arguments, known={y: "total"})
    code.compute(rest, outputs)
    lines += code.lines()
    return Kernel(name, (arguments.launch(ENTRY, lines, ceil_div(y.type.size, BLOCK)),))


def uses_no_tensor_cores(kernel: Kernel | None) -> bool:
    """Tell if a kernel is one of these, which is slow for all but small products."""
    return kernel is not None and any(launch.entry.startswith(ENTRY) for launch in kernel.launches)
