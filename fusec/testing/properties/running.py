"""Check runs of a compiled graph: right answers, reproducible bits, and no use of a freed buffer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np

from fusec.ir import Graph, HostArray, Value, quote
from fusec.lowering.packing import is_packed_as, unpack
from fusec.runtime import Executable, SimulatorBackend
from fusec.schedule.aliasing import same_storage
from fusec.testing.case import Case, MismatchError, Property
from fusec.testing.error_bounds.bounds import compare
from fusec.testing.properties.fixtures import CASE, prepared


def executable_agrees(graph: Graph, case: Case = CASE) -> None:
    """Check that a compiled graph, simulated end to end, gives the outputs of the model.

    Each run must give the same bits, and outputs must have the promised memory orders.
    """
    shared = prepared(graph, case)
    executable = Executable(shared.compiled, SimulatorBackend())
    feeds = {name: np.array(array) for name, array in shared.feeds.items()}
    with np.errstate(all="ignore"):
        first = executable.run(None, feeds)
        got = [array.copy(order="K") for array in first]
        for array in first:  # because the caller may overwrite the outputs
            array[...] = 1
        again = executable.run(None, feeds)
        strided = executable.run(None, {name: _strided(array) for name, array in feeds.items()})
    names, chosen = [spec.name for spec in executable.outputs], dict(shared.options.orders)
    for name, array in feeds.items():
        if array.tobytes() != shared.feeds[name].tobytes():
            raise MismatchError(f"running wrote to the input {quote(name)}", {name: array}, {name: shared.feeds[name]})
    for spec, value, array in zip(executable.outputs, graph.outputs, got, strict=True):
        if array.dtype != value.type.dtype.numpy or array.shape != value.type.shape:
            raise MismatchError(f"output {quote(spec.name)} is {array.dtype}{list(array.shape)}, not {value.type}")
        wanted = chosen.get(spec.name, ())
        if not (is_packed_as(array, value.type.with_order(wanted)) and same_storage(spec.shape, spec.order, wanted)):
            raise MismatchError(f"output {quote(spec.name)} does not have the memory order {wanted}")
    same_bits(names, again, got, "run a second time")
    same_bits(names, strided, got, "run on inputs that are strided views")
    results = dict(zip(names, got, strict=True))
    compare(results, [shared.narrowed_meaning, shared.execution], "the executable")


def _strided(array: HostArray) -> HostArray:
    """Copy numbers to memory that is neither contiguous nor row-major."""
    wide = np.zeros([2 * d for d in reversed(array.shape)], array.dtype)
    view = wide[(..., *(slice(None, None, 2) for _ in array.shape))].transpose()
    view[...] = array
    return view


def same_bits(names: Sequence[str], got: Sequence[HostArray], want: Sequence[HostArray], what: str) -> None:
    """Raise MismatchError unless arrays are equal, bit by bit.

    names: names of the outputs.
    what: says in the message what was run.
    """
    for name, array, right in zip(names, got, want, strict=True):
        if array.tobytes() != right.tobytes():
            raise MismatchError(f"{what}, output {quote(name)} has other bits", {name: array}, {name: right})


def buffers_never_alias(graph: Graph, case: Case = CASE) -> None:
    """Check that no step overwrites a value that is still needed, or reads memory that was freed."""
    shared = prepared(graph, case)
    with np.errstate(all="ignore"):
        want = Executable(shared.compiled, SimulatorBackend()).run(None, shared.feeds)
        watched = _Watched(shared.compiled, SimulatorBackend())
        got = watched.run(None, {name: np.array(array) for name, array in shared.feeds.items()})
    same_bits([spec.name for spec in watched.outputs], got, want, "with memory that nothing needs overwritten")


class _Watched(Executable):
    """An executable that checks, after each step, that all values that are still needed are unchanged.

    It overwrites all other memory.
    """

    def _execute(self, arrays: Sequence[HostArray | None]) -> None:
        self._allocate()
        constants = {key: array.tobytes() for key, array in self._constants.arrays.items()}
        super()._execute(arrays)
        for key, bits in constants.items():
            if self._constants.arrays[key].tobytes() != bits:
                raise MismatchError("a constant was written while the program ran")

    def _launch(self, index: int) -> None:
        step = self.compiled.program.steps[index]
        if not index:
            self._overwrite(self._needed[0])
        before = {value: self._bits(value) for value in self._needed[index]}
        super()._launch(index)
        for value, bits in before.items():
            if self._bits(value) != bits:
                message = f"step {index} {step.signature} wrote to {quote(value.name)}, which is still needed"
                raise MismatchError(message)
        self._overwrite(self._needed[index + 1])

    def _bits(self, value: Value) -> bytes:
        return unpack(self._steps.buffer(value), value.type).tobytes()

    @cached_property
    def _needed(self) -> list[list[Value]]:
        """List the stored values that are still needed, before each step and after the last.

        A value is needed if a later step reads it, or if it is an output.
        """
        steps, placed = self.compiled.program.steps, self.memory.offsets
        last = {v: index for index, step in enumerate(steps) for v in step.inputs}
        last |= dict.fromkeys(self.compiled.graph.outputs, len(steps))
        made = [v for v in self.compiled.graph.inputs if v in last and v in placed]
        result: list[list[Value]] = []
        for index in range(len(steps) + 1):
            made = [v for v in made if last[v] >= index]
            result.append(made)
            if index < len(steps):
                made = [*made, *(v for v in steps[index].outputs if v in last and v in placed)]
        return result

    def _overwrite(self, needed: Collection[Value]) -> None:
        free = np.ones(self._arena.size, np.bool_)
        for value in needed:
            start, itemsize = self.memory.offsets[value], value.type.dtype.itemsize
            elements = np.arange(start, start + value.type.span * itemsize).reshape(-1, itemsize)
            free[unpack(elements[:, 0].copy(), value.type).reshape(-1, 1) + np.arange(itemsize)] = False
        self._arena[free] = 0xFF  # NaN to floats of every width


PROPERTIES_RUNNING: tuple[Property, ...] = (
    Property("executable_agrees", executable_agrees),
    Property("buffers_never_alias", buffers_never_alias),
)
