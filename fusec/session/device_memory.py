"""Make arrays on the host or the GPU, also of memory that the caller owns."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from fusec.errors import FusecError
from fusec.gpu import device
from fusec.ir import Array
from fusec.runtime import on_host


def require_first(device_id: int) -> None:
    if device_id:
        raise FusecError(f"fusec runs on device 0, not on device {device_id}")


def check_device(device_type: str) -> None:
    if device_type not in ("cpu", "cuda"):
        raise FusecError(f"a device is cpu or cuda, not {device_type!r}")


def array_module(device_type: str) -> Any:
    """Return the array module of a device: numpy for cpu, cupy for cuda."""
    check_device(device_type)
    if device_type == "cpu":
        return np
    if device.device_name() is None:
        raise FusecError("an array on cuda needs a GPU, and this machine has none that fusec can use: use cpu")
    from fusec.gpu.launch.cupy_arrays import cupy  # here, because only a GPU machine needs cupy

    return cupy


def at_address(device_type: str, element_type: Any, shape: Sequence[int], address: int) -> Array:
    """Return an array that shares the caller's memory at an address."""
    dtype = np.dtype(element_type)
    if device_type == "cuda":
        return array_module("cuda").asarray(SimpleNamespace(__cuda_array_interface__=_interface(dtype, shape, address)))
    check_device(device_type)
    return np.asarray(SimpleNamespace(__array_interface__=_interface(dtype, shape, address)))


def _interface(dtype: np.dtype[Any], shape: Sequence[int], address: int) -> dict[str, Any]:
    if dtype.str[1] == "V":  # bfloat16 and other types that are not NumPy's own
        raise FusecError(f"memory of {dtype} cannot be bound by its address: bind an OrtValue")
    return {"shape": tuple(shape), "typestr": dtype.str, "data": (address, False), "version": 3}


def to_host(array: Any) -> np.ndarray[Any, Any]:
    if on_host(array):
        return np.asarray(array)
    return array.get() if hasattr(array, "get") else array_module("cuda").asarray(array).get()
