"""Generate top_k along the last dim: a block finds the best elements of a row digit by digit, and sorts these alone.

Of a long row, many blocks find the best elements of its parts first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, Launch, ceil_div, power_of_two
from fusec.ir import DType, Node, Value
from fusec.ops import TopK

KEY_BYTES = 8
DIGIT_BITS = 11
BINS_BYTES = 4 << DIGIT_BITS
PLACE_BITS = 23  # of a key, above which the element has 32: five digits in all
MAX_SIZE = 1 << 20  # of a row, which one block reads a few times
MIN_PART, RATIO = 1 << 13, 8  # elements of a part, at least, and for each one that is found in it
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
    part = max(MIN_PART, RATIO * padded)
    parts = ceil_div(size, part) if size > 2 * part else 1
    rows, threads = x.size // size, min(MAX_THREADS, max(WARP, power_of_two(size)))
    cuda = _CUDA.bind(
        BINS_BYTES=BINS_BYTES,
        BLOCK=threads,
        FIRST_SHIFT=4 * DIGIT_BITS,
        NUMBER=op.k,
        PADDED=padded,
        PARTS=parts,
        PLACES=(1 << PLACE_BITS) - 1,
        PLACE_BITS=PLACE_BITS,
        SIZE=size,
        TYPE=C_TYPES[x.dtype],
    )
    key = cuda("of_floats" if x.dtype.is_float else "of_integers")
    keys = cuda("functions", KEY=key, ORDERED="~key" if op.largest else "key")
    launches: list[Launch] = []
    if parts > 1:
        arguments = Arguments()
        lines = cuda(
            "select_of_part",
            ELEMENTS=arguments.read(nodes[0].operands[0]),
            SCRATCH=arguments.scratch("u64"),
            PART=part,
            FIND_DIGITS=cuda("find_digits", READ_KEY="ENTRY_key(row[first + i], first + i)", KEYS="best"),
        )
        found = arguments.launch("top_k_of_part", lines, rows * parts, threads, preamble=keys)
        launches.append(replace(found, resident_bytes=BINS_BYTES))
    arguments = Arguments()
    row = arguments.read(nodes[0].operands[0])
    store = [f"{arguments.write(values)}[to] = row[place];"] if values in outputs else []
    store += [f"{arguments.write(places)}[to] = place;"] if places in outputs else []
    best = (
        f"const u64* best = {arguments.scratch('const u64')} + (u64)blockIdx.x * {parts * op.k}u;" if parts > 1 else ""
    )
    lines = cuda(
        "select",
        ELEMENTS=row,
        COUNT=parts * op.k if parts > 1 else size,
        BEST_OF_PARTS=best,
        FIND_DIGITS=cuda("find_digits", READ_KEY="best[i]" if parts > 1 else "ENTRY_key(row[i], i)", KEYS="keys"),
        STORE=store,
    )
    preamble = [*keys, *_SORT("functions", BLOCK=threads)]
    launches.append(replace(arguments.launch("top_k", lines, rows, threads, preamble=preamble), resident_bytes=shared))
    return Kernel(op.name, tuple(launches), KEY_BYTES * rows * parts * op.k if parts > 1 else 0)
