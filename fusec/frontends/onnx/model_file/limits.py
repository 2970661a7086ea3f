"""Limit the size of constants that an import computes, because a small file can ask for any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fusec.errors import SizeError
from fusec.graph.types import MAX_CONSTANT_BYTES
from fusec.ir import Array, TensorType

_BLOCK = 1 << 20


def require_constant(type: TensorType, what: str = "a constant") -> None:
    """Check the size of a constant. Raises SizeError if it exceeds MAX_CONSTANT_BYTES."""
    if type.nbytes > MAX_CONSTANT_BYTES:
        raise SizeError(type, type.nbytes, MAX_CONSTANT_BYTES, what)


def by_blocks(type: TensorType, values: Callable[[Array], Any]) -> Array:
    """Fill an array with `values` of the row-major indices 0, 1, … of its elements.

    `values` is called with one block of indices at a time, so that only the array itself takes much memory.
    """
    flat = np.empty(type.size, type.dtype.numpy)
    with np.errstate(all="ignore"):
        for start in range(0, type.size, _BLOCK):
            index = np.arange(start, min(start + _BLOCK, type.size), dtype=np.int64)
            flat[start : start + len(index)] = values(index)
    return flat.reshape(type.shape)
