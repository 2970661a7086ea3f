"""Check the arguments of a call: names, shapes, types and arrays."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from fusec.errors import ExecutionError, VerifyError
from fusec.graph.string_array import as_strings
from fusec.ir import Array, DType, Graph, TensorType, quote
from fusec.lowering.dlpack import from_dlpack
from fusec.lowering.packing import as_stored
from fusec.ops.random import STATE_NAME
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of an executable.

    order: dims from outermost to innermost in memory; () is row-major. An input in that order need not be copied.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: tuple[int, ...] = ()

    @cached_property
    def is_narrow(self) -> bool:
        """Tell if the type is a float of 8 bits or fewer, or an integer below 8 bits; a GPU holds these as bytes."""
        return DType.of_host(self.dtype).is_narrow

    @property
    def is_string(self) -> bool:
        """Tell if the elements are strings, which only the host has."""
        return self.dtype == object


@dataclass(frozen=True)
class SymbolicSpec:
    """An input or output: each dim is a size, or the name of a symbolic dim ("" if it has no name).

    `shape` and `dtype` are None if the model does not declare them.
    """

    name: str
    shape: tuple[int | str, ...] | None
    dtype: np.dtype[Any] | None


class Interface:
    """Inputs and outputs of a graph. xp: the array module of the backend; from_any: makes an array of it."""

    def __init__(self, graph: Graph, state: Container[str], xp: Any, from_any: Callable[[Any], Array]):
        self.inputs = tuple(TensorSpec(v.name, v.type.shape, v.type.dtype.numpy, v.type.order) for v in graph.inputs)
        self.outputs = tuple(
            TensorSpec(name, v.type.shape, v.type.dtype.numpy, v.type.order)
            for name, v in zip(graph.output_names, graph.outputs, strict=True)
        )
        self._state, self._device, self._from_any = state, xp is not np, from_any
        self._own: type[Any] = xp.ndarray
        self._by_name = {spec.name: spec for spec in self.inputs}
        self._places = {spec.name: place for place, spec in enumerate(self.outputs)}
        self._all = tuple(range(len(self.outputs)))
        self._random = self._by_name.get(STATE_NAME)
        self._calls = count()

    def places(self, names: Sequence[str] | None) -> tuple[int, ...]:
        """Return the numbers of the outputs with these names (None: all)."""
        if names is None:
            return self._all
        if isinstance(names, str) or not isinstance(names, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise ExecutionError(f"names of outputs are a list of strings, or None for all, not {names!r}")
        for name in names:
            if not isinstance(name, str) or name not in self._places:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ExecutionError(f"no output {_shown(name)}; outputs are {', '.join(map(quote, self._places))}")
        return tuple(self._places[name] for name in names)

    def feeds(self, given: Mapping[str, Any], held: Container[str]) -> tuple[list[Array | None], bool]:
        """Return an array for each input, and if all given arrays are on the host.

        The array is None for state that is `held` and not given. A state of random numbers that is not given is seed 0
        and the number of the call.
        Raises ExecutionError if a name, shape or type does not fit.
        """
        require_by_name(given, "inputs")
        if not given.keys() <= self._by_name.keys():
            name = next(name for name in given if name not in self._by_name)
            raise ExecutionError(f"no input {_shown(name)}; inputs are {', '.join(map(quote, self._by_name))}")
        arrays: list[Array | None] = []
        all_on_host, some_on_host = True, False
        for spec in self.inputs:
            if spec.name not in given:
                if spec is self._random and spec.name not in held:
                    arrays.append(np.array([0, next(self._calls)], np.uint64))
                    continue
                if spec.name not in held:
                    how = ": it is state, bind it" if spec.name in self._state else ""
                    raise ExecutionError(f"input {quote(spec.name)} is missing{how}")
                arrays.append(None)
                continue
            array, host = self._taken(given[spec.name], spec)
            all_on_host, some_on_host = all_on_host and host, some_on_host or host
            arrays.append(self._checked(array, spec, "input"))
        some_on_host = some_on_host or self._random is not None
        if self._device and some_on_host and not all_on_host:  # the call does not wait, so host arrays are copied now
            arrays = [  # those of types that CuPy lacks are copied when they are fed
                self._from_any(a) if isinstance(a, np.ndarray) and not (spec.is_narrow or spec.is_string) else a
                for a, spec in zip(arrays, self.inputs, strict=True)
            ]
        return arrays, all_on_host

    def state(self, name: str, given: Any) -> Array:
        """Return the checked array for an input of the state."""
        return self._checked(self._taken(given, self._by_name[name])[0], self._by_name[name], "state")

    def outs(self, given: Mapping[str, Any], wanted: Sequence[int]) -> tuple[dict[int, Array], bool]:
        """Return the arrays to write into, by number of the output, and if all are on the host."""
        into: dict[int, Array] = {}
        all_on_host = True
        require_by_name(given, "out: arrays")
        for name, array in given.items():
            place = self._places.get(name)
            if place is None or place not in wanted:
                raise ExecutionError(f"out has {_shown(name)}, which is no output that was asked for")
            host = not isinstance(array, self._own) and (isinstance(array, np.ndarray) or on_host(array))
            host = host or not self._device
            if host and not isinstance(array, np.ndarray):
                raise ExecutionError(f"out {quote(name)}: results cannot be written into {type(array).__name__}")
            if host and not array.flags.writeable:
                raise ExecutionError(f"out {quote(name)}: the array is read-only; give one that can be written")
            all_on_host = all_on_host and host
            shared = array if host else self._from_any(array)  # shares the memory
            into[place] = self._checked(shared, self.outputs[place], "out")
        return into, all_on_host

    def _checked(self, array: Array, spec: TensorSpec, kind: str) -> Array:
        """Return the array. Raises ExecutionError if its type or shape does not fit."""
        if spec.is_string:
            array = _strings(array, spec, kind)
        coded = self._device and spec.is_narrow and isinstance(array, self._own)
        (_require_codes if coded else _require_fits)(array, spec, kind)
        return array

    def _taken(self, given: Any, spec: TensorSpec) -> tuple[Array, bool]:
        """Return an array of the backend's module or of NumPy, and if it is on the host."""
        try:
            return self._array(given)
        except (TypeError, ValueError, BufferError) as error:
            raise _no_array(spec.name, given, error) from error

    def _array(self, given: Any) -> tuple[Array, bool]:
        if isinstance(given, self._own):
            return given, not self._device
        if isinstance(given, np.ndarray):
            return given, True
        if not self._device or not on_host(given):
            return self._from_any(given), not self._device and on_host(given)
        if hasattr(given, "__dlpack__") and not isinstance(given, np.generic):
            return from_dlpack(np, given), True
        return np.asarray(given), True


def require_by_name(given: object, what: str) -> None:
    """Raise ExecutionError unless this is a mapping."""
    if type(given) is not dict and not isinstance(given, Mapping):  # the first test is quick and nearly always enough
        raise ExecutionError(f"{what} are given in a dict by name, not in {type(given).__name__}")


def array_of(name: str, given: Any) -> np.ndarray[Any, Any]:
    """Return an argument as a NumPy array. Raises ExecutionError if NumPy cannot make one."""
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as error:
        raise _no_array(name, given, error) from error


def _no_array(name: str, given: Any, error: Exception) -> ExecutionError:
    return ExecutionError(
        f"input {_shown(name)}: this {type(given).__name__} is no array ({error}); give a NumPy array, or lists of one "
        "length"
    )


def _shown(name: object) -> str:
    """Quote a name that a caller gave, which may be of any type."""
    return quote(name) if isinstance(name, str) else f"{name!r} (names are strings)"


def _require_fits(array: Array, spec: TensorSpec, kind: str) -> None:
    if array.dtype != spec.dtype:
        raise ExecutionError(f"{kind} {quote(spec.name)} takes {spec.dtype}, not {array.dtype}")
    if array.shape != spec.shape:
        raise ExecutionError(f"{kind} {quote(spec.name)} has shape {list(spec.shape)}, the array {list(array.shape)}")


def _strings(array: Array, spec: TensorSpec, kind: str) -> Array:
    """Return an array of Python strings. Raises ExecutionError for anything but text on the host."""
    try:
        return as_strings(array)
    except VerifyError as error:
        raise ExecutionError(f"{kind} {quote(spec.name)} {error}") from error


def _require_codes(array: Array, spec: TensorSpec, kind: str) -> None:
    """Check the bytes of a narrow tensor on the device, which CuPy has no type for."""
    type = TensorType(spec.shape, DType.of(spec.dtype))
    stored = as_stored(type)
    if array.dtype != np.uint8 or array.shape != stored:
        raise ExecutionError(
            f"{kind} {quote(spec.name)} is {type}: on the GPU its bytes are uint8{list(stored)}, "
            f"not {array.dtype}{list(array.shape)}"
        )


def by_name(inputs: Sequence[str], arrays: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays by name, from positional and named arguments.

    Raises ExecutionError for too many arrays, or for an input that is given twice.
    """
    if len(arrays) > len(inputs):
        raise ExecutionError(f"{len(arrays)} arrays for {len(inputs)} inputs")
    feeds = dict(zip(inputs, arrays, strict=False))
    for name in named:
        if name in feeds:
            raise ExecutionError(f"input {quote(name)} is given twice")
    return {**feeds, **named}


def bare(results: Sequence[Any]) -> Any:
    """Return the only result itself, or several as a tuple."""
    return results[0] if len(results) == 1 else tuple(results)


def on_host(array: Any) -> bool:
    """Tell if an array is in host memory, by its DLPack device or, without one, by `__cuda_array_interface__`."""
    device = getattr(array, "__dlpack_device__", None)
    if device is None:
        return not hasattr(array, "__cuda_array_interface__")
    return device()[0] in (1, 3)  # CPU, or pinned host memory
