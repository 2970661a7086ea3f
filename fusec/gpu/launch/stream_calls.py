"""Order calls, choose their stream, and copy inputs and outputs, in a few microseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import cupy
import numpy as np

from fusec.errors import ExecutionError
from fusec.ir import Array, TensorType
from fusec.lowering.packing import empty, is_packed_as, to_logical, unpack

ALIGNMENT_BYTES = 16  # of what kernels read in vectors
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3  # cudaMemcpyKind


class Streams:
    """Streams of an executable: the one steps were captured on, and the one of the running call.

    Calls from several streams run in order, because all use the same memory: each waits for an event after the last.
    """

    def __init__(self, own: Any):
        self.own = own
        self.lock = threading.Lock()
        self.current = own  # of the call that is running
        self.last: Any = own  # of the last call; held, so that its address is not given to another
        self.running = False
        self.done = cupy.cuda.Event(disable_timing=True)

    def begin(self, stream: Any) -> None:
        """A call is queued on a stream from here on. The lock is held."""
        if stream is not self.last:
            stream.wait_event(self.done)
        self.current, self.running = stream, True

    def end(self, failed: bool = False) -> None:
        """The call is queued, or failed: then whatever the device still says of it would hide why."""
        try:
            self.done.record(self.current)
        except cupy.cuda.runtime.CUDARuntimeError:
            if not failed:
                raise
        finally:
            self.last, self.current, self.running = self.current, self.own, False

    def synchronize(self) -> None:
        """Wait for what the call has queued up to now; between calls, for the last one."""
        (self.current if self.running else self.done).synchronize()

    @contextmanager
    def own_call(self) -> Generator[None]:
        """A call on the own stream: it waits for what its caller's stream holds, and that stream for the call."""
        with self.lock, _told("running the model"):
            caller = cupy.cuda.get_current_stream()
            self.begin(self.own)
            try:
                self.own.wait_event(caller.record())
                with self.own:
                    yield
            except BaseException:
                self.end(failed=True)
                raise
            self.end()
            caller.wait_event(self.done)


class AtOnce:
    """A call on its caller's own stream."""

    __slots__ = ("_streams",)

    def __init__(self, streams: Streams):
        self._streams = streams

    def __enter__(self) -> None:
        streams = self._streams
        streams.lock.acquire()
        try:
            streams.begin(cupy.cuda.get_current_stream())
        except BaseException:
            streams.lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with _told("running the model"):
                self._streams.end(failed=error is not None)
                if error is not None:
                    raise error
        finally:
            self._streams.lock.release()


class Ahead:
    """Kernel that runs before the captured graph, so that it can read inputs from the caller's memory.

    inputs: by place, the arrays in the model's memory that only this kernel reads.
    """

    def __init__(self, run: Callable[..., None], inputs: Mapping[int, Array]):
        self._run = run
        self._inputs = {place: (int(array.data.ptr), array.strides) for place, array in inputs.items()}
        self._instead: dict[int, Array] = {}

    def takes(self, place: int, array: Array) -> bool:
        """Tell if the next run reads this array without a copy."""
        known = self._inputs.get(place)
        if known is None or not isinstance(array, cupy.ndarray) or array.strides != known[1]:
            return False
        if array.data.ptr % ALIGNMENT_BYTES:
            return False
        self._instead[known[0]] = array
        return True

    def __call__(self) -> None:
        try:
            self._run(self._instead)
        finally:
            self._instead.clear()  # they are the caller's


class Replay:
    """CUDA graphs in order, with the calls between them that could not be captured.

    lanes: the most steps that run in parallel. times_us: of this replay and of the other way to capture it, if both
    were timed. declined: why steps were not captured in parallel, or not at all. kept: memory that must stay allocated.
    """

    def __init__(self, streams: Streams, parts: Sequence[Any], lanes: int = 1, kept: Any = None):
        self._streams, self._parts, self._kept = streams, parts, kept
        self.lanes = lanes
        self.times_us: tuple[float, float] | None = None
        self.declined = ""
        self.at_once = all(hasattr(part, "launch") for part in parts)
        self.ahead: Ahead | None = None

    def takes(self, place: int, array: Array) -> bool:
        """Tell if the next run reads an input from this array without a copy."""
        return self.ahead is not None and self.ahead.takes(place, array)

    def __call__(self) -> None:
        if self.ahead is not None:
            self.ahead()
        for part in self._parts:
            if hasattr(part, "launch"):
                part.launch(self._streams.current)
            else:
                part()


def feeder(streams: Streams, buffer: Array, type: TensorType) -> Callable[[Array], None]:
    """Return a function that copies an array from the device or the host into the flat memory of a value."""
    place, nbytes = unpack(buffer, type), type.nbytes
    strides = tuple(stride * type.dtype.itemsize for stride in type.strides)
    target = int(buffer.data.ptr) if nbytes else 0

    def feed(array: Array) -> None:
        direct = array.strides == strides or is_packed_as(array, type)
        if isinstance(array, cupy.ndarray):
            if not direct:
                place[...] = array
            elif nbytes and array.data.ptr != target:
                cupy.cuda.runtime.memcpyAsync(target, array.data.ptr, nbytes, ON_DEVICE, streams.current.ptr)
        elif not direct:
            place[...] = cupy.asarray(array)
        elif nbytes:
            cupy.cuda.runtime.memcpyAsync(target, array.ctypes.data, nbytes, TO_DEVICE, streams.current.ptr)

    return feed


def fetcher(streams: Streams, buffer: Array, type: TensorType) -> Callable[[Array | None, bool], Array]:
    """Return a function that copies the flat memory of a value into a given array, or into a new one."""
    place, nbytes = unpack(buffer, type), type.nbytes
    strides = tuple(stride * type.dtype.itemsize for stride in type.strides)
    source = int(buffer.data.ptr) if nbytes else 0
    shape, dtype = tuple(type.shape[d] for d in type.order) or type.shape, type.dtype.numpy

    def new() -> Array:
        if dtype.kind == "V":  # bfloat16, which CuPy views but does not make
            return to_logical(cupy.empty(nbytes, cupy.uint8).view(dtype).reshape(shape), type.order)
        return to_logical(cupy.empty(shape, dtype), type.order)

    def fetch(into: Array | None, host: bool) -> Array:
        held: Array = into if into is not None else empty(np, type) if host else new()
        direct = held.strides == strides or is_packed_as(held, type)
        if isinstance(held, cupy.ndarray):
            if not direct:
                held[...] = place
            elif nbytes:
                cupy.cuda.runtime.memcpyAsync(held.data.ptr, source, nbytes, ON_DEVICE, streams.current.ptr)
        elif not direct:
            held[...] = place.get()
        elif nbytes:
            cupy.cuda.runtime.memcpyAsync(held.ctypes.data, source, nbytes, TO_HOST, streams.current.ptr)
        return held

    return fetch


@contextmanager
def out_of_memory(what: str) -> Generator[None]:
    """Make a lack of memory on the device a clear error, and give back what is not in use."""
    try:
        yield
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise _without_memory(what, error) from error


@contextmanager
def _told(what: str) -> Generator[None]:
    """The same, and any other error of the device, which may be that of an earlier call."""
    with out_of_memory(what):
        try:
            yield
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise ExecutionError(f"the GPU reported an error while {what}: {error}") from error


def _without_memory(what: str, error: BaseException) -> ExecutionError:
    cupy.get_default_memory_pool().free_all_blocks()
    free, total = cupy.cuda.runtime.memGetInfo()
    return ExecutionError(f"out of memory while {what}: {error}; {free >> 20} MB of {total >> 20} MB are free")
