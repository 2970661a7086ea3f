"""Define the interface of a backend, which runs steps: memory, plans, captures and times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fusec.gpu.autotune.step_choices import TunedChoices
from fusec.ir import Array, TensorType, Value
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import Entry
from fusec.schedule.dependencies import Waits
from fusec.schedule.program import Partition


class Captured(Protocol):
    """Steps captured for replay.

    at_once: all steps are one CUDA graph, which a call may queue on the stream of its caller.
    lanes: the largest number of steps that run side by side.
    times_us: time of this order of steps, and of the other one (in order, or side by side), if both were timed.
    declined: the reason why steps could not be captured, or not side by side; else empty.
    """

    at_once: bool
    lanes: int
    times_us: tuple[float, float] | None
    declined: str

    def takes(self, place: int, array: Array) -> bool:
        """Tell if the next run reads an input from the caller's array, so that the caller need not copy it.

        place: number of the input.
        """
        ...

    def __call__(self) -> None: ...


class Backend(Protocol):
    """Runs steps: an array module, its memory, and what executes a cuDNN graph.

    name: `simulated`, or the name of the GPU.
    xp: the array module, numpy or cupy.
    side_by_side: steps may run at the same time.
    loads_ahead: constants are loaded while plans are prepared. Where there is no device to copy them to, they are
        loaded by the first call, so that a compilation holds the model's weights alone.
    """

    name: str
    xp: Any
    side_by_side: bool
    loads_ahead: bool

    @property
    def tuned(self) -> TunedChoices | None:
        """Return the choices of the program that this backend tuned; None if it tuned none."""
        ...

    def from_any(self, array: Any) -> Array:
        """Return an array of the module from a NumPy or CuPy array, or any object with DLPack."""
        ...

    def packed(self, array: Array, type: TensorType) -> Array:
        """Return a flat buffer with an array of NumPy in the type's memory order; see `packing.pack`."""
        ...

    def prepare(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int, others: Sequence[Partition] = ()) -> None:
        """Make graphs (by key) and other steps ready to run.

        footprint_bytes: memory that the whole model reads and writes.
        """
        ...

    def entries(self, graphs: Iterable[str]) -> Mapping[str, Entry]:
        """Return the plans of prepared graphs, by key; graphs without a plan are left out."""
        ...

    def give_up(self, graph: CudnnGraph, reason: str) -> bool:
        """Replace the plan of a graph, which failed, by the next one; return False if there is none."""
        ...

    def bind(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> Callable[[], None]:
        """Return a function that runs a prepared graph over flat buffers, by uid; their addresses must not change."""
        ...

    def library(self, work: CudnnGraph | Partition) -> str:
        """Return the library that runs a bound graph, or a step without one: cudnn, cublaslt or kernel."""
        ...

    def kernel(self, step: Partition, memory: Callable[[Value, TensorType], Array]) -> Callable[[], None] | None:
        """Return a function that runs a step by a kernel; None if the references of its ops must run it.

        memory: returns the flat buffer of a value; of a constant, in the layout of the given type.
        """
        ...

    def feeder(self, buffer: Array, type: TensorType) -> Callable[[Array], None]:
        """Return a function that copies an array, of the module or of NumPy, into the flat memory of a value.

        It copies nothing if the array has that memory.
        """
        ...

    def fetcher(self, buffer: Array, type: TensorType) -> Callable[[Array | None, bool], Array]:
        """Return a function that copies the flat memory of a value into an array of the module or of NumPy.

        Its arguments are the array to write (None: a new one), and if a new one is on the host.
        A copy to the host is complete after `finish`.
        """
        ...

    def capture(
        self,
        runs: Sequence[Callable[[], None]],
        waits: Waits | None = None,
        ahead: tuple[int, Mapping[int, Array]] | None = None,
    ) -> Captured:
        """Capture functions, which ran before and use the same memory each time, to replay them faster.

        waits: for each run, the earlier ones that it must wait for (None: it does no work). Runs are then timed here,
            in order and side by side.
        ahead: the number of the first run, and the memory of the inputs that only this run reads, by place. The run
            may read them from the caller's arrays.
        """
        ...

    def time_us(self, run: Callable[[], None], count: int, alone: bool = False) -> list[float]:
        """Time a function `count` times, in microseconds. alone: it is one of many steps."""
        ...

    def calling(self, at_once: bool = False) -> AbstractContextManager[None]:
        """Return the context of one call, in which it reads and writes the memory that calls share.

        at_once: the call only copies and launches one CUDA graph.
        """
        ...

    def scratch(self) -> AbstractContextManager[None]:
        """Return a context for steps that allocate, whose addresses stay valid so that steps can be captured."""
        ...

    def read_later(self, array: Array) -> Callable[[], Array]:
        """Queue a copy of an array of the module to the host, and return a function that waits for it and returns it.

        It waits for the work that was queued before, and not for work that is queued after it.
        """
        ...

    def finish(self) -> None:
        """Wait for queued work. Raises ExecutionError if any of it failed."""
        ...
