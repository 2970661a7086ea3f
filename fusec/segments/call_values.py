"""Hold the tensors of one call by name, on the device and on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Protocol

import numpy as np

from fusec.errors import ExecutionError
from fusec.ir import Array, Literal, quote
from fusec.system.dataclass import dataclass


class Arrays(Protocol):
    """The arrays of a device. name: its name; xp: their module, numpy or cupy."""

    @property
    def name(self) -> str: ...

    @property
    def xp(self) -> Any: ...

    def from_any(self, array: Any) -> Array:
        """Return an array of the module from any array."""
        ...


@dataclass
class CallValues:
    """The tensors of one call by name. Each is copied at most once in each direction.

    own: those whose memory nothing else has, so that they are results without another copy.
    """

    tensors: dict[str, Array]
    arrays: Arrays
    own: set[str] = field(default_factory=set[str])
    _host: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict[str, np.ndarray[Any, Any]])
    _device: dict[str, Array] = field(default_factory=dict[str, Array])

    def put(self, name: str, array: Array, own: bool = False) -> None:
        """Hold a tensor, in place of an older one of this name. own: nothing else has its memory."""
        self.tensors[name] = array
        (self.own.add if own else self.own.discard)(name)
        self._host.pop(name, None)
        self._device.pop(name, None)

    def on_host(self, tensor: str | Literal) -> np.ndarray[Any, Any]:
        """Return a tensor by name, or a constant, as a NumPy array."""
        if isinstance(tensor, Literal):
            return tensor.array
        if tensor not in self._host:
            self._host[tensor] = to_host(self.tensors[tensor], self.arrays)
        return self._host[tensor]

    def on_device(self, tensor: str | Literal) -> Array:
        """Return a tensor by name, or a constant, as an array on the device."""
        if isinstance(tensor, Literal):
            return self.arrays.from_any(tensor.array)
        if tensor not in self._device:
            self._device[tensor] = self.arrays.from_any(self.tensors[tensor])
        return self._device[tensor]

    def result(self, tensor: str | Literal, on_host: bool) -> Array:
        """Return a tensor as a result of the call, in memory that nothing else has, the next result included."""
        array = tensor.array if isinstance(tensor, Literal) else self.tensors[tensor]
        on_host = on_host or array.dtype == object  # strings are on the host only
        if isinstance(tensor, Literal):
            return copied(array, self.arrays, on_host)
        if tensor in self.own and (self.arrays.xp is np or not on_host) and array.flags.c_contiguous:
            self.own.discard(tensor)
            return array
        return copied(array, self.arrays, on_host)


def to_host(array: Array, arrays: Arrays) -> np.ndarray[Any, Any]:
    """Return an array on the host; it is copied if it is on the device."""
    on_device = arrays.xp is not np and isinstance(array, arrays.xp.ndarray)
    return array.get() if on_device else np.asarray(array)


def copied(array: Array, arrays: Arrays, on_host: bool) -> Array:
    """Copy an array to the host or to the device, also if it is there."""
    if on_host or arrays.xp is np:
        return to_host(array, arrays).copy()
    copy = arrays.xp.empty(array.shape, array.dtype)
    copy[...] = arrays.from_any(array)
    return copy


def written(name: str, array: Array, out: Mapping[str, Any] | None, arrays: Arrays) -> Array:
    """Write a result into the array that the caller gave for it, if there is one, and return that array.

    Raises ExecutionError if the array has another shape or dtype.
    """
    if out is None or name not in out:
        return array
    into = out[name]
    on_device = arrays.xp is not np and (not isinstance(into, np.ndarray) or isinstance(into, arrays.xp.ndarray))
    shared = arrays.from_any(into) if on_device else into
    if shared.shape != array.shape or shared.dtype != array.dtype:
        raise ExecutionError(
            f"out {quote(name)} is {shared.dtype}{list(shared.shape)}, the result {array.dtype}{list(array.shape)}"
        )
    shared[...] = arrays.from_any(array) if on_device else to_host(array, arrays)
    return into
