"""Copy inputs to the GPU and results from it while other batches run.

Shared blocks are registered with CUDA (page-locked), because only then a copy runs next to a kernel.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cupy
import numpy as np

from fusec.errors import ExecutionError
from fusec.ir import DType
from fusec.scale.shared_block import Bytes, SharedBlock

Host = Mapping[str, np.ndarray[Any, Any]]
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyKind


class PageLocks:
    """The blocks that are registered with CUDA."""

    def __init__(self) -> None:
        self._registered: dict[int, Bytes] = {}  # by handle; holds the mapping, which must outlive its registration
        weakref.finalize(self, _unregister, self._registered).atexit = False  # the driver may have ended by then

    def add(self, block: SharedBlock, stream: Any) -> None:
        """Register a block, or again if it has grown. stream: of the copies that use it."""
        raw, known = block.raw, self._registered.get(block.handle)
        if known is raw or not raw.size:
            return
        if known is not None:
            stream.synchronize()
            cupy.cuda.runtime.hostUnregister(known.ctypes.data)
        cupy.cuda.runtime.hostRegister(raw.ctypes.data, raw.nbytes, 0)
        self._registered[block.handle] = raw


def _unregister(registered: dict[int, Bytes]) -> None:
    for raw in registered.values():
        cupy.cuda.runtime.hostUnregister(raw.ctypes.data)


class DeviceUpload:
    """Copies on a stream of its own, into memory of its own for each batch in flight."""

    def __init__(self) -> None:
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._places: dict[tuple[int, str], Any] = {}
        self._locks = PageLocks()

    def __call__(self, slot: int, blocks: Sequence[SharedBlock], feeds: Host) -> Callable[[], Mapping[str, Any]]:
        """Start to copy the inputs of a batch; return a function that makes the current stream wait for them.

        Types that CuPy lacks stay on the host, and the call copies them.

        slot: its memory on the GPU is used.
        blocks: the memory of each input.
        """
        for block in blocks:
            self._locks.add(block, self._stream)
        sent: dict[str, Any] = {}
        for name, array in feeds.items():
            dtype = DType.of(array.dtype)
            if dtype.is_narrow or not array.nbytes:
                sent[name] = array
                continue
            place = self._place(slot, name, array.nbytes)
            source = array.ctypes.data
            cupy.cuda.runtime.memcpyAsync(place.data.ptr, source, array.nbytes, TO_DEVICE, self._stream.ptr)
            sent[name] = place[: array.nbytes].view(array.dtype).reshape(array.shape)
        done = cupy.cuda.Event(disable_timing=True)
        done.record(self._stream)

        def wait() -> Mapping[str, Any]:
            cupy.cuda.get_current_stream().wait_event(done)
            return sent

        return wait

    def _place(self, slot: int, name: str, nbytes: int) -> Any:
        place = self._places.get((slot, name))
        if place is None or place.size < nbytes:
            place = self._places[slot, name] = cupy.empty(nbytes, cupy.uint8)
        return place


class DeviceDownload:
    """Copies results into shared blocks, on the stream that computes them."""

    def __init__(self) -> None:
        self._locks = PageLocks()

    def __call__(
        self, block: SharedBlock, places: Sequence[np.ndarray[Any, Any]], results: Sequence[Any]
    ) -> Callable[[], None]:
        """Start to copy results to places in a block; return a function that waits until they are there.

        So the next batch is queued before this one is done, and the GPU does not wait for Python.
        """
        stream = cupy.cuda.get_current_stream()
        self._locks.add(block, stream)
        sources = [cupy.ascontiguousarray(result) for result in results]
        for place, source in zip(places, sources, strict=True):
            if place.nbytes:
                cupy.cuda.runtime.memcpyAsync(place.ctypes.data, source.data.ptr, place.nbytes, TO_HOST, stream.ptr)
        done = cupy.cuda.Event(block=True, disable_timing=True)  # a wait uses no CPU time
        done.record(stream)

        def wait() -> None:
            try:
                done.synchronize()
            except RuntimeError as error:  # CUDARuntimeError
                raise ExecutionError(f"the GPU reported an error: {error}") from error
            finally:
                sources.clear()  # held until now, because another stream could get their memory

        return wait
