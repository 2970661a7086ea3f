"""Packed storage: a logical array to the flat buffer its type's memory order describes, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusec.ir import Array, TensorType


def pack(xp: Any, array: Array, type: TensorType) -> Array:
    """A flat, contiguous buffer holding `array` in the type's memory order; shares memory if it can."""
    order = type.order or tuple(range(type.rank))
    return xp.ascontiguousarray(array.transpose(order)).reshape(-1)


def unpack(buffer: Array, type: TensorType) -> Array:
    """The logical array, a view of the flat buffer (the first `type.size` elements of it)."""
    order = type.order or tuple(range(type.rank))
    stored = buffer[: type.size].reshape([type.shape[i] for i in order])
    return stored.transpose(np.argsort(order).tolist()) if order else stored
