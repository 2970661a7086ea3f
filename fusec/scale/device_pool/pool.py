"""Run batches on several devices: a process for each, with one call and one iterator for all."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Self

import numpy as np

from fusec.errors import ExecutionError
from fusec.ir import DType, quote
from fusec.scale.device_pool.device_queue import DeviceQueue
from fusec.scale.devices import worker_devices
from fusec.scale.model_recipe import ModelRecipe, call_with

DEPTH = 3  # one runs, one is on its way to the device, and one is copied into shared memory


def pool(
    model: str | os.PathLike[str],
    *,
    devices: str | int | Sequence[str | int] = "all",
    depth: int = DEPTH,
    timeout_s: float | None = None,
    **options: Any,
) -> DevicePool:
    """Load a model in one process for each device, and return the pool ready to call.

    model: path of an ONNX file, a text form or a `.fusec` file. The first worker compiles it, and the others find its
        choices in the cache. A `.fusec` file is loaded by all at the same time.
    devices: `all` GPUs (without one: one simulated), or a list of `cuda:0` (or 0), `cpu` and `simulated`.
    depth: batches that each worker holds, so that others are copied while it runs one.
    timeout_s: seconds after which a worker that gives no answer counts as dead; None: no limit.
    options: options of `fusec.compile`, or of `fusec.load` for a `.fusec` file.
    Raises FusecError if the model cannot be loaded, TargetError for a device that this machine does not have.
    """
    if depth < 1:
        raise ExecutionError(f"depth is {depth}, but must be 1 or more")
    return DevicePool(DeviceQueue(ModelRecipe.of(model, options), worker_devices(devices), depth, timeout_s))


class DevicePool:
    """Worker processes that run batches of one model; `fusec.pool` makes it. Any thread may call it.

    A worker that dies is replaced, and its batch runs once more. If that worker dies, too, the batch fails with an
    ExecutionError. The workers end with `close`, with the `with` block, with this object, and with this process.
    """

    def __init__(self, batches: DeviceQueue):
        self._batches = batches
        self._finalizer = weakref.finalize(self, batches.close)

    def __repr__(self) -> str:
        plural = "s" if len(self.devices) > 1 else ""
        return f"<fusec.DevicePool of {len(self.devices)} worker{plural} on {', '.join(self.devices)}>"

    @property
    def devices(self) -> tuple[str, ...]:
        """Return the name of each worker's device."""
        return tuple(self._batches.devices)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [process.pid for process in list(self._batches.processes.values())]

    @property
    def replaced(self) -> int:
        """Count the workers that died and were replaced."""
        return self._batches.replaced

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """Run one batch on a worker. It takes and returns NumPy arrays as `Executable.__call__` does."""
        return self.submit(*arrays, **named).result()

    def input_buffers(self, **shapes: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
        """Return an array for each input, by name, in memory that the workers share. Fill them, and submit them.

        Such arrays, and views of them, go to a worker without a copy. The memory is used again when none of them is
        left. Waits for memory while batches are unfinished.

        shapes: sizes of inputs with symbolic dims.
        Raises ExecutionError for an unknown shape, and if no memory is free although all batches are done.
        """
        inputs = self._batches.model.inputs
        if unknown := sorted(shapes.keys() - {name for name, _, _ in inputs}):
            raise ExecutionError(f"no input {quote(unknown[0])}")
        types = {name: _type(name, dtype, shapes.get(name, shape)) for name, dtype, shape in inputs}
        return self._batches.lend(types)

    def submit(self, *arrays: Any, **named: Any) -> Future[Any]:
        """Queue one batch, and return its future. Waits while enough batches are queued to keep the workers busy.

        The arrays must not change before the future is done.
        """
        inputs = [(None, _host(array)) for array in arrays] + [(name, _host(array)) for name, array in named.items()]
        return self._batches.add(inputs)

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Run batches on all workers, and yield their results in order.

        A batch is taken from `batches` only when there is room for it, so a slow consumer slows the producer down.

        batches: each an array, a tuple of arrays in the order of the inputs, or a dict by name.
        """
        waiting: deque[Future[Any]] = deque()
        try:
            for batch in batches:
                if len(waiting) >= self._batches.limit:
                    yield waiting.popleft().result()
                waiting.append(call_with(self.submit, batch))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """End the workers. Batches that are not done fail."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _type(name: str, dtype: str | None, shape: Sequence[int | str] | None) -> tuple[np.dtype[Any], Sequence[int]]:
    sizes = [size for size in shape or () if isinstance(size, int)]
    if dtype is None or shape is None or len(sizes) < len(shape):
        raise ExecutionError(f"the shape of {quote(name)} is {shape}: give its sizes, as input_buffers({name}=(8, 3))")
    return DType(dtype).numpy, sizes


def _host(array: Any) -> np.ndarray[Any, Any]:
    """Return an array on the host. Raises ExecutionError for one on a device, which no other process can read."""
    try:
        return np.asarray(array)
    except (TypeError, ValueError) as error:
        raise ExecutionError(f"a pool takes arrays on the host, not {type(array).__name__}: {error}") from error
