"""Compute large constants some rows at a time, in several threads.

What a chain of ops has in between then stays in the processor's cache, and takes no memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fusec.ir import Array, Literal, Op, TensorType
from fusec.ops import Cast, Reshape
from fusec.ops.pointwise import Pointwise
from fusec.system.threaded_parts import each_part

PART_ELEMENTS = 1 << 17  # of a part: what is in between takes a megabyte


def is_row_by_row(op: Op, type: TensorType, operands: Sequence[TensorType]) -> bool:
    """Tell if each row of a result of this type depends on the same row of operands alone, or on all of an operand."""
    if not type.rank or type.size == 0:
        return False
    if isinstance(op, Reshape):
        return operands[0].rank > 0 and operands[0].shape[0] == type.shape[0]
    return isinstance(op, Cast) or (isinstance(op, Pointwise) and "axis" not in op.row.defaults)


def rows_of(op: Op, type: TensorType, sources: Sequence[Literal], start: int, end: int) -> Array:
    """Compute rows of an op for which `is_row_by_row` holds."""
    rank = sources[0].type.rank if isinstance(op, Reshape) else type.rank  # smaller ones broadcast whole
    parts = [
        _rows(source, start, end)
        if source.type.rank == rank and source.type.shape[0] == type.shape[0]
        else source.array
        for source in sources
    ]
    if isinstance(op, Reshape):
        return parts[0].reshape(len(parts[0]), *type.shape[1:])
    return np.asarray(op.reference(np, *parts)[0]).astype(type.dtype.numpy, copy=False)


def _rows(source: Literal, start: int, end: int) -> Array:
    read: Callable[[int, int], Array | None] | None = getattr(source, "rows", None)
    found = None if read is None else read(start, end)
    return source.array[start:end] if found is None else found


def in_parts(rows: Callable[[int, int], Array], type: TensorType) -> np.ndarray[Any, Any]:
    """Compute all rows of a result, by a function that computes rows from a first one up to another."""
    made = np.empty(type.shape, type.dtype.numpy)
    count = max(1, PART_ELEMENTS * type.shape[0] // type.size)

    def compute(start: int) -> None:
        made[start : start + count] = rows(start, min(start + count, type.shape[0]))

    each_part(compute, range(0, type.shape[0], count), made.nbytes)
    return made
