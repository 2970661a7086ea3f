"""Connect workers on GPUs by NCCL (`cupy.cuda.nccl`)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import cupy

from fusec.errors import TargetError
from fusec.ir import Array, DType
from fusec.scale.communicator import Counted

# ncclDataType_t and ncclRedOp_t of nccl.h
_TYPES = {DType.F16: 6, DType.F32: 7, DType.F64: 8, DType.BF16: 9}
_BYTES = 1  # ncclUint8
_AVERAGE = 4  # ncclAvg


def unique_id() -> list[int]:
    """Return the name of a new group of workers, which worker 0 makes, as bytes in JSON.

    Raises TargetError without NCCL.
    """
    return list(_nccl().get_unique_id())


def _nccl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns of a missing library, and the error below names the extra
        from cupy.cuda import nccl

    if not nccl.available:
        raise TargetError("training on several GPUs needs NCCL: pip install 'fusec[nccl-cu13]' (or nccl-cu12)")
    return nccl


class NcclCommunicator(Counted):
    """The communicator of a worker on a GPU. Calls are queued on CuPy's current stream, and the host does not wait.

    NCCL waits for ever for a worker that has died. `fusec.run_workers` then ends all workers.
    """

    def __init__(self, rank: int, size: int, group: Sequence[int]):
        """Join a group. Waits until all its workers have."""
        self.rank, self.size = rank, size
        self._nccl = _nccl().NcclCommunicator(size, bytes(group), rank)
        self._side = cupy.cuda.Stream(non_blocking=True)

    def mean(self, block: Array) -> None:
        self.calls += 1
        self._replace_by_mean(block)

    def _replace_by_mean(self, block: Array) -> None:
        kind, address = _TYPES[DType.of(block.dtype)], block.data.ptr
        self._nccl.allReduce(address, address, block.size, kind, _AVERAGE, cupy.cuda.get_current_stream().ptr)

    def broadcast(self, block: Array) -> None:
        self.calls += 1
        address = block.data.ptr
        self._nccl.broadcast(address, address, block.nbytes, _BYTES, 0, cupy.cuda.get_current_stream().ptr)

    def start_mean(self, block: Array) -> None:
        """Start `mean` on a stream of its own, after the work queued on the current stream. It can be captured."""
        _wait(self._side, cupy.cuda.get_current_stream())
        with self._side:
            self._replace_by_mean(block)

    def join(self) -> None:
        _wait(cupy.cuda.get_current_stream(), self._side)


def _wait(stream: Any, other: Any) -> None:
    """Let a stream wait for what another one has queued."""
    event = cupy.cuda.Event(disable_timing=True)
    event.record(other)
    stream.wait_event(event)
