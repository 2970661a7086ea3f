"""Hold the numbers of a constant: loaded when first needed, immutable, identified by a digest."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fusec.errors import VerifyError
from fusec.graph.types import DType, TensorType


class Literal:
    """An immutable tensor payload, loaded when first needed; compared by identity.

    type: shape and dtype of the payload load: returns an array of that shape and dtype; it is called once, by
    whichever thread comes first label: name of the constant in the model key: equal for literals that are computed
    equally from equal ones, and known before they are loaded; default: unique
    """

    __slots__ = ("__weakref__", "_array", "_digest", "_load", "_lock", "key", "label", "type")

    def __init__(
        self, type: TensorType, load: Callable[[], np.ndarray[Any, Any]], label: str = "", key: Hashable | None = None
    ):
        self.type = TensorType(type.shape, type.dtype)
        self.label = label
        self.key: Hashable = object() if key is None else key
        self._load = load
        self._lock = threading.Lock()
        self._array: np.ndarray[Any, Any] | None = None
        self._digest = ""

    @classmethod
    def of(cls, array: Any, label: str = "") -> Literal:
        """Make a literal of `array` (copied to a read-only row-major array)."""
        held = np.array(array, order="C", copy=True)
        held.flags.writeable = False
        literal = cls(TensorType(held.shape, DType.of(held.dtype)), lambda: held, label)
        literal._array = held
        return literal

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """Return the payload as a read-only NumPy array."""
        if self._array is None:
            with self._lock:
                self._array = self._loaded() if self._array is None else self._array
        return self._array

    def _loaded(self) -> np.ndarray[Any, Any]:
        array = np.asarray(self._load())
        if array.shape != self.type.shape or array.dtype != self.type.dtype.numpy:
            raise VerifyError(
                f"constant {self.label!r} was declared {self.type} but its data is {array.dtype}{list(array.shape)}"
            )
        array = array.view()
        array.flags.writeable = False
        return array

    @property
    def digest(self) -> str:
        """Return the SHA-256 of type and bytes, in hexadecimal."""
        if not self._digest:
            sha = hashlib.sha256(str(self.type).encode())
            sha.update(np.ascontiguousarray(self.array).view(np.uint8).reshape(-1).data)
            self._digest = sha.hexdigest()
        return self._digest


def load_all(literals: Iterable[Literal]) -> None:
    """Load literals on all cores, because NumPy, which derives and transposes weights, runs threads in parallel."""
    wanted = list(dict.fromkeys(literals))
    with ThreadPoolExecutor(max(1, min(len(wanted), os.cpu_count() or 1))) as pool:
        for _ in pool.map(lambda literal: literal.array, wanted):
            pass
