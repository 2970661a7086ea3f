"""Run a loop whose end is computed: its body is a program, and the host decides after each trip."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fusec.errors import ExecutionError
from fusec.frontends import Source
from fusec.ir import Array

if TYPE_CHECKING:
    from fusec.execution.signature import SymbolicSpec, TensorSpec
    from fusec.frontends.onnx.emission.loop_body import LoopBody

MAX_TRIPS = 1 << 20
Shapes = Mapping[str, tuple[int, ...]]


class BodyProgram(Protocol):
    """An executable of the body."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> Sequence[TensorSpec | SymbolicSpec]: ...

    def run(self, output_names: None, feeds: Mapping[str, Any]) -> list[Array]:
        """Return all outputs."""
        ...


class LoopPrograms:
    """The programs of a loop's body, one for each set of shapes of its inputs. trips: how many the last run had."""

    def __init__(self, body: LoopBody, file: str, compile: Callable[[Source, Shapes], BodyProgram]):
        self.source = Source(body.model, body.constants, file, body.files, body.custom_ops)
        self.programs: dict[tuple[tuple[int, ...], ...], BodyProgram] = {}
        self._names = [each.name for each in self.source.interface[0]]
        self._compile = compile
        self.trips = 0

    def run(self, body: LoopBody, reads: Sequence[Array], to_host: Callable[[Array], Any], xp: Any) -> list[Array]:
        """Run the loop and return the carried values after the last trip, and the scan outputs.

        reads: the computed operands of the loop.
        to_host: copies an array to the host.
        xp: the array module of the device.

        Raises ExecutionError if the loop does not end, or has no trip and a scan output of unknown rank.
        """
        given = iter(reads)
        operands = [next(given) if each is None else each.array for each in body.operands]
        trips, running = (to_host(array).reshape(-1)[0].item() for array in operands[:2])
        carried, around = operands[2 : 2 + body.carried], operands[2 + body.carried :]
        scanned: list[list[Array]] = [[] for _ in body.model.graph.output[1 + body.carried :]]
        trip = 0
        while running and trip < trips:
            if trip == MAX_TRIPS:
                raise ExecutionError(f"its loop runs for more than {MAX_TRIPS} trips")
            flag, *results = self._trip([np.array(trip, np.int64), np.array(True), *carried, *around])
            carried = results[: body.carried]
            for items, array in zip(scanned, results[body.carried :], strict=True):
                items.append(array)
            running = bool(to_host(flag).reshape(-1)[0])
            trip += 1
        self.trips = trip
        if scanned and not trip:
            first = [np.array(0, np.int64), np.array(True), *carried, *around]
            return [*carried, *(_of_no_trips(spec, xp) for spec in self._program(first).outputs[1 + body.carried :])]
        return [*carried, *(_stacked(items, xp) for items in scanned)]

    def _trip(self, arrays: Sequence[Array]) -> list[Array]:
        return self._program(arrays).run(None, dict(zip(self._names, arrays, strict=True)))

    def _program(self, arrays: Sequence[Array]) -> BodyProgram:
        """Return the program for these arrays, compiled if they have new shapes."""
        key = tuple(tuple(array.shape) for array in arrays)
        if key not in self.programs:
            self.programs[key] = self._compile(self.source, dict(zip(self._names, key, strict=True)))
        return self.programs[key]


def _of_no_trips(spec: TensorSpec | SymbolicSpec, xp: Any) -> Array:
    """Return a scan output without elements. A dim that the body computes is 0, as in onnxruntime."""
    if spec.shape is None or spec.dtype is None:
        raise ExecutionError("its loop makes no trip, so that its scan outputs have no shape")
    return xp.empty((0, *(d if isinstance(d, int) else 0 for d in spec.shape)), spec.dtype)


def _stacked(items: Sequence[Array], xp: Any) -> Array:
    shapes = {tuple(item.shape) for item in items}
    if len(shapes) > 1:
        raise ExecutionError(f"its loop gives scan outputs of several shapes, {sorted(shapes)}")
    result = xp.empty((len(items), *items[0].shape), items[0].dtype)
    for place, item in enumerate(items):
        result[place] = item if isinstance(item, xp.ndarray) else xp.asarray(item)
    return result
