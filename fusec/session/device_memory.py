"""Make arrays on the host or the GPU, also of memory that the caller owns."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from fusec.errors import FusecError, VerifyError
from fusec.gpu import device
from fusec.ir import Array, DType
from fusec.runtime import on_host


def require_first(device_id: int) -> None:
    if device_id:
        raise FusecError(f"fusec runs on device 0, not on device {device_id}")


def device_of(device_type: str) -> str:
    """Return `cpu` or `cuda`; `gpu` is another name of `cuda`."""
    name = {"gpu": "cuda"}.get(device_type.lower(), device_type.lower())
    if name not in ("cpu", "cuda"):
        raise FusecError(f"a device is cpu or cuda, not {device_type!r}")
    return name


def array_module(device_type: str) -> Any:
    """Return the array module of a device: numpy for cpu, cupy for cuda."""
    if device_of(device_type) == "cpu":
        return np
    if device.device_name() is None:
        raise FusecError("an array on cuda needs a GPU, and this machine has none that fusec can use: use cpu")
    from fusec.gpu.launch.cupy_arrays import cupy  # here, because only a GPU machine needs cupy

    return cupy


def element_dtype(element_type: Any) -> np.dtype[Any]:
    """Return the NumPy dtype of a NumPy type, or of a number from ONNX's TensorProto."""
    if not isinstance(element_type, int):
        return np.dtype(element_type)
    from fusec.frontends.onnx.model_file.tensors import dtype_of  # here, because importing onnx takes long

    try:
        return dtype_of(element_type).numpy
    except VerifyError as error:
        raise FusecError(str(error)) from error


def copied(device_type: str, array: np.ndarray[Any, Any]) -> Array:
    """Copy an array of the host to a device."""
    made = array_module(device_type).array(_read_as(array, _storable(array.dtype)))
    return _read_as(made, array.dtype)


def copy_into(target: Any, source: Any) -> None:
    """Copy an array of either device into one on the GPU, of the same shape and type."""
    module, stored = array_module("cuda"), _storable(np.dtype(target.dtype))
    own = target if isinstance(target, module.ndarray) else module.asarray(target)
    given = np.asarray(source) if on_host(source) else module.asarray(source)
    _read_as(own, stored)[...] = module.asarray(_read_as(given, stored))


def _read_as(array: Any, dtype: np.dtype[Any]) -> Any:
    """Return an array that reads the same memory as another type of the same size."""
    return array if array.dtype == dtype else array.view(dtype)


def empty(device_type: str, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Make an array on a device without setting its elements. CuPy views types such as bfloat16, but makes none."""
    return _read_as(array_module(device_type).empty(tuple(shape), _storable(dtype)), dtype)


def at_address(device_type: str, element_type: Any, shape: Sequence[int], address: int, owner: object = None) -> Array:
    """Return an array that shares the caller's memory at an address. It keeps `owner` alive."""
    dtype = element_dtype(element_type)
    if DType.of(dtype).is_narrow_int or DType.of(dtype) is DType.F4E2M1:
        raise FusecError(f"memory of {dtype} cannot be bound, because it holds two elements in a byte")
    interface = {"shape": tuple(shape), "typestr": _storable(dtype).str, "data": (address, False), "version": 3}
    if device_of(device_type) == "cuda":
        memory = SimpleNamespace(__cuda_array_interface__=interface, owner=owner)
        return _read_as(array_module("cuda").asarray(memory), dtype)
    return _read_as(np.asarray(SimpleNamespace(__array_interface__=interface, owner=owner)), dtype)


def _storable(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype of the same size that array interfaces can name; bfloat16 and others are not NumPy's own."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" or dtype.str[1] == "V" else dtype


@contextmanager
def on_stream(address: int | None) -> Generator[None]:
    """Queue work on the caller's CUDA stream; None: on CuPy's current stream."""
    if address is None or device.device_name() is None:
        yield
        return
    with array_module("cuda").cuda.ExternalStream(address):
        yield


def to_host(array: Any) -> np.ndarray[Any, Any]:
    if on_host(array):
        return np.asarray(array)
    return array.get() if hasattr(array, "get") else array_module("cuda").asarray(array).get()
