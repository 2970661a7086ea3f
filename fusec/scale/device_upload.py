"""Copy the inputs of the next batch to the GPU while the batch before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cupy
import numpy as np

from fusec.ir import DType
from fusec.scale.shared_block import Bytes, SharedBlock

Host = Mapping[str, np.ndarray[Any, Any]]
TO_DEVICE = 1  # cudaMemcpyHostToDevice


class DeviceUpload:
    """Copies on a stream of its own, into memory of its own for each batch in flight.

    Shared blocks are registered with CUDA (page-locked), because only then a copy runs next to a kernel.
    """

    def __init__(self) -> None:
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._places: dict[tuple[int, str], Any] = {}
        self._registered: dict[int, Bytes] = {}  # by handle; holds the mapping, which must outlive its registration

    def __call__(self, slot: int, blocks: Sequence[SharedBlock], feeds: Host) -> Callable[[], Mapping[str, Any]]:
        """Start to copy the inputs of a batch; return a function that makes the current stream wait for them.

        Types that CuPy lacks stay on the host, and the call copies them.

        slot: its memory on the GPU is used.
        blocks: the memory of each input.
        """
        for block in blocks:
            self._register(block)
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

    def _register(self, block: SharedBlock) -> None:
        raw, known = block.raw, self._registered.get(block.handle)
        if known is raw or not raw.size:
            return
        if known is not None:
            self._stream.synchronize()
            cupy.cuda.runtime.hostUnregister(known.ctypes.data)
        cupy.cuda.runtime.hostRegister(raw.ctypes.data, raw.nbytes, 0)
        self._registered[block.handle] = raw
