"""Copy rows that are not aligned, such as the operands of a concat whose rows have an odd number of elements.

Element by element, a thread has too few bytes on their way to use the GPU's bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.indexing import View
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, VECTOR_BYTES, by_value, ceil_div, power_of_two
from fusec.gpu.kernels.codegen.pointwise_code import split_index, stride_along

MIN_BYTES = 1 << 10  # of a row: a shorter one has too few whole words
TURNS = 2  # words of a thread
_CUDA = cuda_template(__package__, "unaligned_copy.cuh")


def is_unaligned_copy(
    shape: Sequence[int], groups: Sequence[Sequence[int]], views: Sequence[View], vector: int
) -> bool:
    """Tell if long rows are copied, and vectors that the pointwise kernel moves are too short.

    shape, groups: the dims of a row are the last group.
    views: memory that is written, and that is read.
    vector: elements that the pointwise kernel moves by one instruction.
    """
    rank, width = len(shape), views[0].dtype.itemsize
    if not groups or not groups[-1] or len({view.dtype for view in views}) != 1 or views[0].dtype.bits < 8:
        return False
    long = math.prod(shape[d] for d in groups[-1]) * width >= MIN_BYTES
    return long and vector * width < VECTOR_BYTES and all(stride_along(v, rank, groups[-1][-1]) == 1 for v in views)


def functions() -> list[str]:
    """Return the functions that a source defines before its kernel."""
    return _CUDA("functions")


def copy_rows(
    shape: Sequence[int], groups: Sequence[Sequence[int]], written: tuple[str, View], read: tuple[str, View], index: str
) -> tuple[list[str], int]:
    """Generate the statements of block `b`; return the number of blocks, too.

    written, read: pointers and views.
    index: C type of `b`.
    """
    size = math.prod(shape[d] for d in groups[-1])
    width = written[1].dtype.itemsize
    words = ceil_div(size * width, VECTOR_BYTES)
    lanes, parts = min(BLOCK, power_of_two(ceil_div(words, TURNS))), ceil_div(words, BLOCK * TURNS)
    outer = [(f"c{group[-1]}", math.prod(shape[d] for d in group)) for group in groups[:-1]]

    def place(pointer: str, view: View) -> str:
        rank = len(shape)
        terms = [f"{stride_along(view, rank, group[-1])}ull * c{group[-1]}" for group in groups[:-1]]
        return " + ".join([pointer, f"{view.start}ull", *terms])

    cuda = _CUDA.bind(
        TYPE=C_TYPES[written[1].dtype],
        READ_PLACE=place(*read),
        WRITTEN_PLACE=place(*written),
        INDEX=index,
        BYTES=size * width,
        SIZE=size,
        WIDTH=width,
        LANES=lanes,
        TURNS=TURNS,
    )
    count = math.prod(n for _, n in outer)
    if lanes == BLOCK:
        lane = "const u32 lane = threadIdx.x;"
        return [*split_index("b", [*outer, ("part", parts)], index == "u64"), lane, *cuda("copy")], parts * count
    rows = BLOCK // lanes
    copy = [*split_index("row", outer, index == "u64"), *cuda("copy")]
    return cuda("short_rows", ROWS=rows, COUNT=by_value(count, long=True), COPY=copy), ceil_div(count, rows)
