"""Where a program runs: what the runtime asks of a backend, and the one that simulates cuDNN in NumPy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from fusec.gpu.autotune.step_candidates import Decided
from fusec.ir import Array, TensorType, Value
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.packing import empty, unpack
from fusec.lowering.simulator import simulate
from fusec.plans.plan_record import Entry
from fusec.schedule.dependencies import Waits
from fusec.schedule.program import Partition


class Recorded(Protocol):
    """Steps that were recorded. at_once: as one piece, which a call may queue on its caller's own stream. lanes: how
    many are side by side at most. times_us: of this, and of the other way (in order, or side by side), if both were
    timed. declined: why steps could not be recorded side by side, where that was tried, or some not at
    all."""

    at_once: bool
    lanes: int
    times_us: tuple[float, float] | None
    declined: str

    def takes(self, place: int, array: Array) -> bool:
        """Whether the next run reads an input, by its place, from this very array: then it need not be copied."""
        ...

    def __call__(self) -> None: ...


class Backend(Protocol):
    """Where a program runs: an array module, its memory, and what executes a cuDNN graph."""

    name: str
    xp: Any
    side_by_side: bool  # whether steps might run at the same time

    @property
    def decided(self) -> Decided | None:
        """The choices of a program that this backend tuned; None if it tuned none."""
        ...

    def from_any(self, array: Any) -> Array:
        """An array of the module from NumPy, CuPy or anything that speaks DLPack."""
        ...

    def prepare(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int, others: Sequence[Partition] = ()) -> None:
        """Make graphs, given by key, and other steps ready to execute within a model that touches so much memory."""
        ...

    def entries(self, graphs: Iterable[str]) -> Mapping[str, Entry]:
        """The plans of prepared graphs, by key, as far as there are any."""
        ...

    def give_up(self, graph: CudnnGraph, reason: str) -> bool:
        """Turn to another way to execute a graph, since this one failed; False if there is none."""
        ...

    def bind(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> Callable[[], None]:
        """What runs a prepared graph over flat buffers by uid, whose memory stays where it is."""
        ...

    def library(self, work: CudnnGraph | Partition) -> str:
        """Who executes a prepared graph, or a step that is none, once it is bound: cudnn, cublaslt or kernel."""
        ...

    def kernel(self, step: Partition, memory: Callable[[Value, TensorType], Array]) -> Callable[[], None] | None:
        """What runs a step that cuDNN does not; None if that is left to the reference. memory: the flat buffer of a
        value, a constant's in the memory order of the type."""
        ...

    def feeder(self, buffer: Array, type: TensorType) -> Callable[[Array], None]:
        """What copies an array of the caller's, of the module or NumPy's, into the flat memory of a value. An array
        that is that memory stays as it is."""
        ...

    def fetcher(self, buffer: Array, type: TensorType) -> Callable[[Array | None, bool], Array]:
        """What copies the flat memory of a value into an array of the module or NumPy's; into a new one where none is
        given, which is on the host or not. What is on the host is there after `finish`."""
        ...

    def record(
        self,
        runs: Sequence[Callable[[], None]],
        waits: Waits | None = None,
        ahead: tuple[int, Mapping[int, Array]] | None = None,
    ) -> Recorded:
        """What does the work of all `runs`, which were called before and keep to the same memory, faster. waits: by
        run the earlier ones it waits for, were they not run in order (None: it does nothing); to find out whether that
        is faster they are run. ahead: the first run, and the inputs by place that it alone reads, if there are any."""
        ...

    def time_us(self, run: Callable[[], None], count: int, alone: bool = False) -> list[float]:
        """How long `run` takes, so many times. alone: it is one of many steps, which others come before."""
        ...

    def calling(self, at_once: bool = False) -> AbstractContextManager[None]:
        """Entered around each call; memory that calls share is read and written in their order. at_once: all that
        runs is `Recorded` as one piece, besides copies."""
        ...

    def scratch(self) -> AbstractContextManager[None]:
        """Entered around steps that allocate: they do it where nothing else does, so that addresses can be recorded."""
        ...

    def finish(self) -> None:
        """Wait for what was queued; raise ExecutionError if any of it failed."""
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
    decided = None

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
