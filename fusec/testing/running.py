"""Properties of running a compiled graph: right answers, the same twice, and no buffer that is used after its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fusec.ir import Graph, Value, quote
from fusec.lower_cudnn import Lowered
from fusec.program import Partition
from fusec.runtime import Executable, SimulatorBackend
from fusec.testing.bounds import compare
from fusec.testing.case import Case, MismatchError, Property
from fusec.testing.prepared import CASE, prepared

Array = np.ndarray[Any, Any]


def executable_agrees(graph: Graph, case: Case = CASE) -> None:
    """Run end to end in simulation, a compiled graph gives the outputs of the model, the same bits each time."""
    shared = prepared(graph, case)
    executable = Executable(shared.compiled, SimulatorBackend())
    feeds = {name: np.array(array) for name, array in shared.feeds.items()}
    with np.errstate(all="ignore"):
        first = executable.run(None, feeds)
        got = [array.copy() for array in first]
        for array in first:  # what is handed out is the caller's to overwrite
            array[...] = 1
        again = executable.run(None, feeds)
        turned = executable.run(None, {name: _strided(array) for name, array in feeds.items()})
    names = [spec.name for spec in executable.outputs]
    for name, array in feeds.items():
        if array.tobytes() != shared.feeds[name].tobytes():
            raise MismatchError(f"running wrote to the input {quote(name)}", {name: array}, {name: shared.feeds[name]})
    for spec, value, array in zip(executable.outputs, graph.outputs, got, strict=True):
        if array.dtype != value.type.dtype.numpy or array.shape != value.type.shape:
            raise MismatchError(f"output {quote(spec.name)} is {array.dtype}{list(array.shape)}, not {value.type}")
    _same_bits(names, again, got, "run a second time")
    _same_bits(names, turned, got, "run on inputs that are strided views")
    results = dict(zip(names, got, strict=True))
    compare(results, [shared.narrowed_meaning, shared.execution], "the executable")


def _strided(array: Array) -> Array:
    """The same numbers in memory that is neither contiguous nor row-major."""
    wide = np.zeros([2 * d for d in reversed(array.shape)], array.dtype)
    view = wide[(..., *(slice(None, None, 2) for _ in array.shape))].transpose()
    view[...] = array
    return view


def _same_bits(names: Sequence[str], got: Sequence[Array], want: Sequence[Array], what: str) -> None:
    for name, array, right in zip(names, got, want, strict=True):
        if array.tobytes() != right.tobytes():
            raise MismatchError(f"{what}, output {quote(name)} has other bits", {name: array}, {name: right})


def buffers_never_alias(graph: Graph, case: Case = CASE) -> None:
    """No step writes to a value that is still needed, and none reads one that was let go."""
    shared = prepared(graph, case)
    with np.errstate(all="ignore"):
        want = Executable(shared.compiled, SimulatorBackend()).run(None, shared.feeds)
        watched = _Watched(shared.compiled, SimulatorBackend())
        got = watched.run(None, {name: np.array(array) for name, array in shared.feeds.items()})
    _same_bits([spec.name for spec in watched.outputs], got, want, "with freed buffers overwritten")


class _Watched(Executable):
    """Overwrites each buffer when it is let go, and looks whether any other one changes."""

    _held: dict[Value, tuple[Array, bytes]]

    def _execute(self, arrays: Sequence[Array]) -> list[Array]:
        self._held = {}
        constants = {key: array.tobytes() for key, array in self._constants.items()}
        results = super()._execute(arrays)
        for key, bits in constants.items():
            if self._constants[key].tobytes() != bits:
                raise MismatchError("a constant was written while the program ran")
        return results

    def _buffer(self, value: Value, buffers: Any) -> Array:
        self._look(buffers)
        return super()._buffer(value, buffers)

    def _run_cudnn(self, step: Partition, lowered: Lowered, buffers: dict[Value, Array]) -> None:
        self._look(buffers)
        live = list(buffers.values())
        super()._run_cudnn(step, lowered, buffers)
        for value in step.outputs:
            if any(np.may_share_memory(buffers[value], array) for array in (*live, *self._constants.values())):
                raise MismatchError(f"step {step.signature} writes {quote(value.name)} over memory in use")
        self._look(buffers)

    def _run_kernel(self, step: Partition, buffers: dict[Value, Array]) -> None:
        self._look(buffers)
        super()._run_kernel(step, buffers)
        self._look(buffers)

    def _look(self, buffers: dict[Value, Array]) -> None:
        gone = [value for value in self._held if value not in buffers]
        for value, (array, bits) in self._held.items():
            if value in buffers and array.tobytes() != bits:
                raise MismatchError(f"{quote(value.name)} was written while it was still needed")
        for value in gone:
            array, _ = self._held.pop(value)
            kept = (*buffers.values(), *self._constants.values())
            if array.flags.writeable and not any(np.may_share_memory(array, other) for other in kept):
                array[...] = np.full((), np.nan if value.type.dtype.is_float else 0x5A).astype(array.dtype)
        for value, array in buffers.items():
            if value not in self._held:
                self._held[value] = (array, array.tobytes())


PROPERTIES_RUNNING: tuple[Property, ...] = (
    Property("executable_agrees", executable_agrees),
    Property("buffers_never_alias", buffers_never_alias),
)
