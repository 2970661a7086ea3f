"""Run steps in NumPy: the backend that simulates cuDNN, on any machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from fusec.execution.backend import Captured
from fusec.ir import Array, TensorType, Value
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.dlpack import from_dlpack
from fusec.lowering.packing import empty, pack, unpack
from fusec.lowering.simulator import simulate
from fusec.plans.plan_record import Entry
from fusec.schedule.dependencies import Waits
from fusec.schedule.program import Partition


class _OneByOne:
    """Runs steps one by one, for a backend that captures nothing."""

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
    """Runs cuDNN graphs in NumPy, on any machine."""

    name = "simulated"
    xp: Any = np
    side_by_side = False
    loads_ahead = False
    tuned = None

    def __init__(self, name: str = "simulated"):
        self.name = name

    def from_any(self, array: Any) -> Array:
        if isinstance(array, np.ndarray):
            return array
        if hasattr(array, "__dlpack__") and not isinstance(array, np.generic):
            return from_dlpack(np, array)
        return np.asarray(array)

    def packed(self, array: Array, type: TensorType) -> Array:
        return pack(np, array, type)

    def prepare(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int, others: Sequence[Partition] = ()) -> None:
        """Do nothing, because the simulator runs a graph as it is."""

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

    def capture(
        self,
        runs: Sequence[Callable[[], None]],
        waits: Waits | None = None,
        ahead: tuple[int, Mapping[int, Array]] | None = None,
    ) -> Captured:
        return _OneByOne(runs)

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

    def read_later(self, array: Array) -> Callable[[], Array]:
        copy = array.copy()
        return lambda: copy

    def finish(self) -> None:
        """Do nothing, because NumPy has finished when it returns."""
