"""Copy many spans of page-locked memory to the device with one call of the driver.

A call for each span takes some microseconds and gives up Python's lock, which other threads then take. CuPy has no such
call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from fusec.errors import ExecutionError
from fusec.gpu.launch.dependent_launch import driver_function

STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream gets there
Copy = Callable[[int, Sequence[tuple[int, int]], int], None]


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes, without hints of where the memory is."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("hints", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    )


@cache
def batched_copy() -> Copy | None:
    """Return a function that queues copies on a stream that is not the default one; None if the driver has none.

    It takes the address of the target, spans as (address, bytes), which are stored one after the other, and the stream.
    """
    function: Any = driver_function("cuMemcpyBatchAsync_v2")  # since CUDA 13
    if function is None:
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = [pointer, pointer, pointer, count, pointer, pointer, count, pointer]
    attributes, first = (Attributes * 1)(), np.zeros(1, np.uint64)
    attributes[0].source_order = STREAM_ORDER

    def copy(target: int, spans: Sequence[tuple[int, int]], stream: int) -> None:
        table = np.array(spans, np.uint64)
        sources, sizes = np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])
        targets = np.uint64(target) + np.cumsum(sizes) - sizes
        places = (array.ctypes.data for array in (targets, sources, sizes))
        status = function(*places, len(spans), ctypes.addressof(attributes), first.ctypes.data, 1, stream)
        if status:
            raise ExecutionError(f"the driver refused to copy {len(spans)} spans to the device: CUDA error {status}")

    return copy
