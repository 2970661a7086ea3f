"""Define what the runtime asks of a back end, and simulate cuDNN in NumPy as one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from fusec.gpu.autotune.step_candidates import TunedChoices
from fusec.ir import Array, TensorType, Value
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.packing import empty, unpack
from fusec.lowering.simulator import simulate
from fusec.plans.plan_record import Entry
from fusec.schedule.dependencies import Waits
from fusec.schedule.program import Partition


class Recorded(Protocol):
    """Steps recorded for replay.

    at_once: True if all steps are one CUDA graph, which a call may queue on its caller's own stream.
    lanes: how many steps run side by side at most.
    times_us: of this recording and of the other order (in order, or side by side), if both were timed.
    declined: why steps could not be recorded, or not side by side; else empty.
    """

    at_once: bool
    lanes: int
    times_us: tuple[float, float] | None
    declined: str

    def takes(self, place: int, array: Array) -> bool:
        """Tell if the next run reads input number `place` from this very array, so that no copy is needed."""
        ...

    def __call__(self) -> None: ...


class Backend(Protocol):
    """A place where a program runs: an array module, its memory, and what executes a cuDNN graph."""

    name: str
    xp: Any
    side_by_side: bool  # whether steps might run at the same time

    @property
    def tuned(self) -> TunedChoices | None:
        """The choices of a program that this backend tuned; None if it tuned none."""
        ...

    def from_any(self, array: Any) -> Array:
        """Return an array of the module from NumPy, CuPy or anything that speaks DLPack."""
        ...

    def prepare(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int, others: Sequence[Partition] = ()) -> None:
        """Make graphs (by key) and other steps ready to run.

        footprint_bytes: how much memory the whole model touches.
        """
        ...

    def entries(self, graphs: Iterable[str]) -> Mapping[str, Entry]:
        """Return the plans of prepared graphs by key, as far as there are any."""
        ...

    def give_up(self, graph: CudnnGraph, reason: str) -> bool:
        """Replace a graph's plan, which failed, by the next one; return False if there is none."""
        ...

    def bind(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> Callable[[], None]:
        """Return a function that runs a prepared graph over flat buffers by uid, whose addresses stay the same."""
        ...

    def library(self, work: CudnnGraph | Partition) -> str:
        """Return who runs a graph, or a step without one, once it is bound: cudnn, cublaslt or kernel."""
        ...

    def kernel(self, step: Partition, memory: Callable[[Value, TensorType], Array]) -> Callable[[], None] | None:
        """Return a function that runs a step without cuDNN, or None to leave the step to the reference.

        memory: returns the flat buffer of a value; a constant's in the layout of the given type.
        """
        ...

    def feeder(self, buffer: Array, type: TensorType) -> Callable[[Array], None]:
        """Return a function that copies a caller's array, of the module or of NumPy, into the flat memory of a value.

        It copies nothing if the array is that memory.
        """
        ...

    def fetcher(self, buffer: Array, type: TensorType) -> Callable[[Array | None, bool], Array]:
        """Return a function that copies the flat memory of a value into an array of the module or of NumPy.

        Its arguments: the array to write (None: a new one), and if a new one is on the host.
        A copy on the host is complete after `finish`.
        """
        ...

    def record(
        self,
        runs: Sequence[Callable[[], None]],
        waits: Waits | None = None,
        ahead: tuple[int, Mapping[int, Array]] | None = None,
    ) -> Recorded:
        """Record `runs`, which ran once before and use the same memory each time, to replay them faster.

        waits: for each run the earlier ones it waits for when runs are not in order (None: it does no work).
            Runs are executed here, to find out if another order is faster.
        ahead: the number of a first run, and the inputs (by place) that only this run reads.
        """
        ...

    def time_us(self, run: Callable[[], None], count: int, alone: bool = False) -> list[float]:
        """Time `run`, `count` times, in microseconds. alone: it is one of many steps, and others run before it."""
        ...

    def calling(self, at_once: bool = False) -> AbstractContextManager[None]:
        """Return the context of one call: calls read and write shared memory in their order.

        at_once: the call is one recorded CUDA graph, and copies.
        """
        ...

    def scratch(self) -> AbstractContextManager[None]:
        """Return the context of steps that allocate: addresses there stay valid, so that they can be recorded."""
        ...

    def finish(self) -> None:
        """Wait for queued work; raise ExecutionError if any of it failed."""
        ...


class _Steps:
    """Steps run one by one."""

    at_once = True
    lanes = 1
    times_us: tuple[float, float] | None = None
    declined = ""

    def __init__(self, runs: Sequence[Callable[[], None]]):
        self._runs = runs

    def takes(self, place: int, array: Array) -> bool:
        return False

    def __call__(self) -> None:
        for run in self._runs:
            run()


class SimulatorBackend:
    """cuDNN graphs in NumPy, from their own description: any machine."""

    name = "simulated"
    xp: Any = np
    side_by_side = False
    tuned = None

    def __init__(self, name: str = "simulated"):
        self.name = name

    def from_any(self, array: Any) -> Array:
        if isinstance(array, np.ndarray):
            return array
        if hasattr(array, "__dlpack__") and not isinstance(array, np.generic):
            return np.from_dlpack(array)
        return np.asarray(array)

    def prepare(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int, others: Sequence[Partition] = ()) -> None:
        """Nothing to do: a graph is its own program."""

    def entries(self, graphs: Iterable[str]) -> Mapping[str, Entry]:
        return {}

    def give_up(self, graph: CudnnGraph, reason: str) -> bool:
        return False

    def bind(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> Callable[[], None]:
        return lambda: simulate(graph, buffers)

    def library(self, work: CudnnGraph | Partition) -> str:
        return "cudnn" if isinstance(work, CudnnGraph) else work.kind.value

    def kernel(self, step: Partition, memory: Callable[[Value, TensorType], Array]) -> Callable[[], None] | None:
        return None

    def feeder(self, buffer: Array, type: TensorType) -> Callable[[Array], None]:
        place = unpack(buffer, type)

        def feed(array: Array) -> None:
            place[...] = array

        return feed

    def fetcher(self, buffer: Array, type: TensorType) -> Callable[[Array | None, bool], Array]:
        place = unpack(buffer, type)

        def fetch(into: Array | None, host: bool) -> Array:
            held = empty(np, type) if into is None else into
            held[...] = place
            return held

        return fetch

    def record(
        self,
        runs: Sequence[Callable[[], None]],
        waits: Waits | None = None,
        ahead: tuple[int, Mapping[int, Array]] | None = None,
    ) -> Recorded:
        return _Steps(runs)

    def time_us(self, run: Callable[[], None], count: int, alone: bool = False) -> list[float]:
        times: list[float] = []
        for _ in range(count):
            start = time.perf_counter()
            run()
            times.append(1e6 * (time.perf_counter() - start))
        return times

    def calling(self, at_once: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def scratch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        """NumPy has finished when it returns."""
