"""Gather the rows of a batch in memory from which the device reads them fast, and fetch the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fusec.execution.signature import TensorSpec
from fusec.ir import DType, TensorType
from fusec.lowering.packing import empty
from fusec.runtime import Executable
from fusec.system.dataclass import dataclass
from fusec.system.threaded_copy import ThreadedCopy

Arrays = Mapping[str, Any]
Copy = Callable[[int, Sequence[tuple[int, int]], int], None]
_TO_DEVICE = 1  # cudaMemcpyHostToDevice


@dataclass(frozen=True)
class Feeds:
    """The inputs of a program: arrays on the device where it copies them. wait: the current stream waits for these."""

    arrays: Arrays
    wait: Callable[[], None] = lambda: None


class BatchBuffer:
    """The inputs of one batch on the host, and on a GPU also there.

    On a GPU, host memory is page-locked and copied on a stream of its own. So the copy of the next batch overlaps the
    run of this one, and no thread waits for it. Where an input or output has another memory order, or a type that CuPy
    lacks, the executable copies instead.
    """

    def __init__(self, program: Executable, copy: ThreadedCopy):
        self._xp: Any = program.backend.xp
        self._copy = copy
        self.host: dict[str, np.ndarray[Any, Any]] = {}
        self._device: dict[str, Any] = {}
        self._stream: Any = None
        self._copy_batch: Copy | None = None
        copies = self._xp is not np and all(map(_is_plain, (*program.inputs, *program.outputs)))
        for spec in program.inputs:
            if copies:
                self._stream = self._stream or self._xp.cuda.Stream(non_blocking=True)
                self._copy_batch = _batched_copy()
                self.host[spec.name] = _page_locked(self._xp, spec.shape, spec.dtype)
                self._device[spec.name] = self._xp.empty(spec.shape, spec.dtype)
            else:
                self.host[spec.name] = empty(np, TensorType(spec.shape, DType.of(spec.dtype), spec.order))

    def fill(self, requests: Sequence[Arrays], size: int, page_locked: bool) -> Feeds:
        """Copy the rows of requests one after the other, and copies of the last row up to the size of the batch.

        On a GPU, the copies are on their way when it returns. Requests and this buffer are then read until the batch
        is done.

        page_locked: requests are in page-locked memory, from which the device copies them itself.
        """
        if self._stream is None:
            self._gather(requests, size)
            return Feeds(self.host)
        if page_locked:
            for name, array in self._device.items():
                self._copy_rows(array, [each[name] for each in requests], size)
        else:
            self._gather(requests, size)
            for name, array in self._device.items():
                array.set(self.host[name], stream=self._stream)
        arrived = self._xp.cuda.Event(disable_timing=True)
        arrived.record(self._stream)
        return Feeds({**self.host, **self._device}, lambda: self._xp.cuda.get_current_stream().wait_event(arrived))

    def _gather(self, requests: Sequence[Arrays], size: int) -> None:
        start, pairs = 0, list[tuple[Any, Any]]()
        for arrays in requests:
            end = start + len(next(iter(arrays.values())))
            pairs += [(self.host[name][start:end], rows) for name, rows in arrays.items()]
            start = end
        self._copy.each(pairs)
        for buffer in self.host.values():
            buffer[start:size] = buffer[start - 1]

    def _copy_rows(self, target: Any, requests: Sequence[np.ndarray[Any, Any]], size: int) -> None:
        """Queue the copies of rows to the device, if the driver can by one call.

        Requests that are next to each other in memory are one copy.
        """
        spans = [(rows.__array_interface__["data"][0], rows.nbytes) for rows in requests]  # faster than `ctypes.data`
        row = spans[-1][1] // len(requests[-1])
        last = sum(spans[-1]) - row
        padding = size - sum(map(len, requests))
        place: int = target.data.ptr
        copies = [span for span in (*joined(spans), *[(last, row)] * padding) if span[1]]
        if self._copy_batch is not None and copies:
            self._copy_batch(place, copies, self._stream.ptr)
            return
        for start, nbytes in copies:
            self._xp.cuda.runtime.memcpyAsync(place, start, nbytes, _TO_DEVICE, self._stream.ptr)
            place += nbytes


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans, each as (start, bytes), where one starts at the end of the one before it."""
    found: list[tuple[int, int]] = []
    for start, nbytes in spans:
        if found and sum(found[-1]) == start:
            found[-1] = found[-1][0], found[-1][1] + nbytes
        else:
            found.append((start, nbytes))
    return found


@dataclass(frozen=True)
class PendingResults:
    """Results on their way to the host. event: is recorded after the last copy; None if they are there."""

    arrays: Mapping[str, np.ndarray[Any, Any]]
    event: Any = None

    def wait(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Wait for the results, and return them."""
        if self.event is not None:
            self.event.synchronize()
        return self.arrays


def fetch(program: Executable, names: Sequence[str], results: Sequence[Any]) -> PendingResults:
    """Queue copies of results to the host.

    The next batch may then be queued before this one is done, so that the device does not wait for Python. A plain
    `get` would wait for both.
    """
    xp: Any = program.backend.xp
    if xp is np or not all(isinstance(array, xp.ndarray) for array in results):
        return PendingResults(dict(zip(names, results, strict=True)))
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, array in zip(names, results, strict=True):
        arrays[name] = _page_locked(xp, array.shape, array.dtype)
        array.get(out=arrays[name], blocking=False)
    event = xp.cuda.Event(block=True, disable_timing=True)
    event.record()
    return PendingResults(arrays, event)


def _batched_copy() -> Copy | None:
    from fusec.gpu.launch.batched_copy import batched_copy  # needs CuPy

    return batched_copy()


def _is_plain(spec: TensorSpec) -> bool:
    return not spec.order and not spec.is_narrow and spec.dtype.name != "bfloat16"


def _page_locked(xp: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    count = math.prod(shape)
    memory = xp.cuda.alloc_pinned_memory(max(1, count) * dtype.itemsize)
    return np.frombuffer(memory, dtype, count).reshape(shape)
