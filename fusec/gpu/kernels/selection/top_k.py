"""Generate top_k along the last dim: a block finds the best elements of a row digit by digit, and sorts these alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, power_of_two
from fusec.ir import DType, Node, Value
from fusec.ops import TopK

KEY_BYTES = 8
DIGIT_BITS = 11
BINS_BYTES = 4 << DIGIT_BITS
PLACE_BITS = 23  # of a key, above which the element has 32: five digits in all
MAX_SIZE = 1 << 20  # of a row, which one block reads a few times
WARP, MAX_THREADS = 32, 1024
_INTEGERS = (DType.I32, DType.I16, DType.I8)
_CUDA = cuda_template(__package__, "top_k.cuh")
_SORT = cuda_template(__package__, "bitonic_sort.cuh")


def top_k(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a top_k; None for other steps, other dims, 64-bit numbers, and too many elements."""
    op, x = nodes[0].op, nodes[0].operands[0].type if nodes[0].operands else None
    if len(nodes) != 1 or not isinstance(op, TopK) or x is None:
        return None
    values, places = nodes[0].results
    if (
        x.dtype not in (DType.F32, *HALVES, *_INTEGERS)
        or op.axis % x.rank != x.rank - 1
        or x.order
        or values.type.order
    ):
        return None
    size, padded = x.shape[-1], power_of_two(op.k)
    shared = BINS_BYTES + KEY_BYTES * padded
    if not values.type.size or size > MAX_SIZE or shared > figures.dynamic_bytes:
        return None
    arguments = Arguments()
    row = arguments.read(nodes[0].operands[0])
    store = [f"{arguments.write(values)}[to] = row[place];"] if values in outputs else []
    store += [f"{arguments.write(places)}[to] = place;"] if places in outputs else []
    threads = min(MAX_THREADS, max(WARP, power_of_two(size)))
    cuda = _CUDA.bind(
        BINS_BYTES=BINS_BYTES,
        BLOCK=threads,
        ELEMENTS=row,
        FIRST_SHIFT=4 * DIGIT_BITS,
        NUMBER=op.k,
        PADDED=padded,
        PLACES=(1 << PLACE_BITS) - 1,
        PLACE_BITS=PLACE_BITS,
        SIZE=size,
        TYPE=C_TYPES[x.dtype],
    )
    key = cuda("of_floats" if x.dtype.is_float else "of_integers")
    functions = [
        *cuda("functions", KEY=key, ORDERED="~key" if op.largest else "key"),
        *_SORT("functions", BLOCK=threads),
    ]
    rows = x.size // size
    launch = arguments.launch("top_k", cuda("select", STORE=store), rows, threads, preamble=functions)
    return Kernel(op.name, (replace(launch, resident_bytes=shared),))
