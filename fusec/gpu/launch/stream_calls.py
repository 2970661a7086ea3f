"""Order calls on CUDA streams, and copy their inputs and outputs, in a few microseconds."""

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
from fusec.lowering.packing import as_stored, empty, from_codes, is_packed_as, pack, to_codes, to_logical, unpack

ALIGNMENT_BYTES = 16  # of arrays that kernels read in vectors
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3  # cudaMemcpyKind


class Streams:
    """Streams of an executable: the one that steps were captured on, and the one of the running call.

    Calls from several streams run in order, because all use the same memory. Each waits for an event after the last.
    """

    def __init__(self, own: Any):
        self.own = own
        self.lock = threading.Lock()
        self.current = own  # of the call that is running
        self.last: Any = own  # of the last call; held, because another stream could get its address
        self.running = False
        self.done = cupy.cuda.Event(disable_timing=True)
        self._others: list[Any] = []

    def lanes(self, count: int) -> list[Any]:
        """Return the own stream and others, `count` in all, for steps that run in parallel.

        They live as long as this object, because a library may still use a stream that it was captured on.
        """
        while len(self._others) < count - 1:
            self._others.append(cupy.cuda.Stream(non_blocking=True))
        return [self.own, *self._others[: count - 1]]

    def begin(self, stream: Any) -> None:
        """Begin to queue a call on a stream. The caller holds the lock."""
        if stream is not self.last:
            stream.wait_event(self.done)
        self.current, self.running = stream, True

    def end(self, failed: bool = False) -> None:
        """End a call that was queued, or that failed. An error of the device then would hide the reason."""
        try:
            self.done.record(self.current)
        except cupy.cuda.runtime.CUDARuntimeError:
            if not failed:
                raise
        finally:
            self.last, self.current, self.running = self.current, self.own, False

    def synchronize(self) -> None:
        """Wait for what the running call has queued until now; between calls, for the last call."""
        (self.current if self.running else self.done).synchronize()

    def finish(self) -> None:
        """Wait as `synchronize` does. Raises ExecutionError for an error of the device."""
        try:
            self.synchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise ExecutionError(f"the GPU reported an error: {error}") from error

    @contextmanager
    def own_call(self) -> Generator[None]:
        """Run a call on the own stream: it waits for work on the caller's stream, and that stream waits for it."""
        with self.lock, _device_errors():
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


class CallOnCallersStream:
    """Context of a call on the stream of its caller."""

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
            with _device_errors():
                self._streams.end(failed=error is not None)
                if error is not None:
                    raise error
        finally:
            self._streams.lock.release()


class Ahead:
    """Kernel that runs before the captured graph, so that it can read inputs from the caller's memory.

    inputs: arrays in the model's memory that only this kernel reads, by number of the input
    """

    def __init__(self, run: Callable[..., None], inputs: Mapping[int, Array]):
        self._run = run
        self._inputs = {place: (int(array.data.ptr), array.strides) for place, array in inputs.items()}
        self._instead: dict[int, Array] = {}

    def takes(self, place: int, array: Array) -> bool:
        """Let the next run read this array without a copy; False if it cannot."""
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
            self._instead.clear()  # because the arrays are the caller's


class Replay:
    """CUDA graphs in order, with the calls between them that could not be captured.

    lanes: the most steps that run in parallel
    held: memory that must stay allocated
    times_us: times of this replay and of the other one (in order, or in parallel), if both were timed
    declined: why steps were not captured in parallel, or not at all
    at_once: all steps are one CUDA graph
    ahead: a kernel that runs before the graphs
    """

    def __init__(self, streams: Streams, parts: Sequence[Any], lanes: int = 1, held: Any = None):
        self._streams, self._parts, self._held = streams, parts, held
        self.lanes = lanes
        self.times_us: tuple[float, float] | None = None
        self.declined = ""
        self.at_once = all(hasattr(part, "launch") for part in parts)
        self.ahead: Ahead | None = None

    def takes(self, place: int, array: Array) -> bool:
        """Let the next run read an input from this array without a copy; False if it cannot."""
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
    if type.dtype.is_narrow:
        return _code_feeder(buffer, type)
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
    if type.dtype.is_narrow:
        return _code_fetcher(buffer, type)
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


def _code_feeder(buffer: Array, type: TensorType) -> Callable[[Array], None]:
    """Return the function of `feeder` for a type that CuPy lacks: numbers from the host, or bytes from the device."""
    place = unpack(buffer, type)

    def feed(array: Array) -> None:
        if isinstance(array, cupy.ndarray):
            place[...] = array
        else:
            buffer[...] = cupy.asarray(to_codes(pack(np, array, type), type.dtype))

    return feed


def _code_fetcher(buffer: Array, type: TensorType) -> Callable[[Array | None, bool], Array]:
    """Return the function of `fetcher` for a type that CuPy lacks: numbers on the host, bytes on the device."""
    place = unpack(buffer, type)

    def fetch(into: Array | None, host: bool) -> Array:
        if isinstance(into, cupy.ndarray) or (into is None and not host):
            held: Array = cupy.empty(as_stored(type), cupy.uint8) if into is None else into
            held[...] = place
            return held
        numbers = unpack(from_codes(buffer.get(), type.span, type.dtype), type)
        if into is None:
            return numbers
        into[...] = numbers
        return into

    return fetch


def read_later(array: Array) -> Callable[[], Array]:
    """Queue a copy to the host on the caller's stream, and return a function that waits for it and returns it."""
    memory = cupy.cuda.alloc_pinned_memory(max(1, array.nbytes))  # only copies to such memory are not waited for
    host = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
    stream = cupy.cuda.get_current_stream()
    cupy.cuda.runtime.memcpyAsync(host.ctypes.data, array.data.ptr, array.nbytes, TO_HOST, stream.ptr)
    done = stream.record()

    def read() -> Array:
        with _device_errors():
            done.synchronize()
        return host

    return read


@contextmanager
def out_of_memory(what: str) -> Generator[None]:
    """Turn a lack of memory on the device into an ExecutionError, and free memory that is not in use."""
    try:
        yield
    except cupy.cuda.memory.OutOfMemoryError as error:
        cupy.get_default_memory_pool().free_all_blocks()
        free, total = cupy.cuda.runtime.memGetInfo()
        raise ExecutionError(
            f"out of memory while {what}: {error}; {free >> 20} MB of {total >> 20} MB are free"
        ) from error


@contextmanager
def _device_errors() -> Generator[None]:
    """Turn errors of the device into ExecutionErrors. They may come from an earlier call."""
    with out_of_memory("running the model"):
        try:
            yield
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise ExecutionError(f"the GPU reported an error while running the model: {error}") from error
