"""Draw random data to time and compare plans and kernels on, and measure the distance of two results.

Numbers are drawn once on the host, and small results are compared there. Loading cuRAND and compiling CuPy's kernels
would take longer than the rest of loading a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import cupy
import numpy as np

from fusec.gpu.kernels.codegen.kernel import Kernel
from fusec.gpu.measure.device_distance import TYPES, device_norms
from fusec.ir import HALVES, Array, DType, TensorType, Value
from fusec.lowering.cudnn_graph import CudnnTensor
from fusec.lowering.packing import code_bytes, from_codes, pack, to_codes
from fusec.lowering.simulator import extent
from fusec.ops import Cast, Scatter
from fusec.schedule.buffer_donation import overwritten_input

PERIOD = 131_071  # numbers until they repeat: a prime, so that no stride of a tensor reads the same numbers
HOST_BYTES = 1 << 22  # larger results are compared on the device
ON_DEVICE = 3  # cudaMemcpyDeviceToDevice
_STARTS = np.random.default_rng(7)


def random_data(tensor: CudnnTensor) -> Array:
    """Draw normal numbers as bytes, filters scaled to about unit gain; small integers and booleans for other types."""
    size = max(extent(tensor), 1)
    gain = 0
    if tensor.dtype.is_float and len(tensor.dims) >= 4 and tensor.dims[0] > 1:
        gain = round(math.log2(max(1, math.prod(tensor.dims[1:]))) / 2)
    start = 7919 * tensor.uid % PERIOD  # tensors of one graph differ
    return _repeated(_numbers(tensor.dtype, gain), tensor.dtype.numpy.itemsize, start, size)


def _repeated(numbers: np.ndarray[Any, Any], width: int, start: int, size: int) -> Array:
    """Copy `size` numbers of `width` bytes to the device, from place `start` on, and repeat them; return the bytes."""
    some = cupy.asarray(numbers[width * start : width * (start + min(size, PERIOD))])
    if size <= PERIOD:
        return some
    data = cupy.empty(width * size, cupy.uint8)
    data[: some.size] = some
    done = some.size
    while done < data.size:  # few copies, because each waits for other threads that load weights
        part = data[done : 2 * done]
        part[...] = data[: part.size]
        done += part.size
    return data


@cache
def _numbers(dtype: DType, gain: int = 0, below: int = 9) -> np.ndarray[Any, Any]:
    """Draw PERIOD numbers of a type, divided by 2^gain, twice in a row, as bytes.

    below: integers of more than 8 bits are smaller than this number.
    """
    rng = np.random.default_rng(7)
    if dtype is DType.BOOL:
        drawn = rng.random(PERIOD) < 0.5
    elif dtype is DType.I8:  # sums of their products keep within 8 bits, times scales drawn here
        drawn = rng.integers(-3, 4, PERIOD).astype(dtype.numpy)
    elif dtype.is_int:
        drawn = rng.integers(0, below, PERIOD).astype(dtype.numpy)
    else:
        drawn = (rng.standard_normal(PERIOD, np.float32) * np.float32(2.0**-gain)).astype(dtype.numpy)
    return np.concatenate([drawn, drawn]).view(np.uint8)


@cache
def _codes(dtype: DType) -> np.ndarray[Any, Any]:
    """Draw PERIOD bytes of numbers from 0 to 2 of a narrow type, twice in a row. Elements below 8 bits share bytes."""
    drawn = np.random.default_rng(7).integers(0, 3, PERIOD * 8 // dtype.bits).astype(np.float32)
    codes = to_codes(Cast(dtype).reference(np, drawn)[0], dtype)
    return np.concatenate([codes, codes])


def distance(got: Mapping[CudnnTensor, Array], want: Mapping[CudnnTensor, Array]) -> float:
    """Return the largest relative L2 distance of results, given as bytes.

    The distance is NaN if one has a NaN or infinity where the other has none.
    """
    return _worst(_apart(tensor.dtype, raw, want[tensor]) for tensor, raw in got.items())


class RandomInputs:
    """Memory for the variants of a kernel: random inputs, drawn once, and the kernel's constants.

    packed: copies a constant to the device in the layout of a type; default: packs it on the host
    """

    def __init__(self, packed: Callable[[np.ndarray[Any, Any], TensorType], Array] | None = None) -> None:
        self._packed = packed or _constant
        self._held: dict[tuple[Value, TensorType], Array] = {}

    def memory(self, value: Value, type: TensorType) -> Array:
        """Return the flat buffer of a value; constants are stored in the layout of the type."""
        if (value, type) not in self._held:
            literal = value.literal
            self._held[value, type] = (
                random_value(value, type) if literal is None else self._packed(literal.array, type)
            )
        return self._held[value, type]

    def in_place(self, value: Value, type: TensorType) -> Array:
        """Return the buffer of a value as within a program, where writes of rows overwrite state."""
        old = overwritten_input(value)
        return self.memory(value, type) if old is None else self.memory(old, old.type)

    def results(self, kernel: Kernel, run: Callable[[], None]) -> dict[Value, Array]:
        """Run a kernel bound to this memory and return its results, in memory that was poisoned before."""
        written = {value: self.memory(value, value.type) for value in kernel.written}
        for buffer in written.values():
            poison(buffer)
        run()
        return {value: _copied(buffer) for value, buffer in written.items()}


def poison(buffer: Array) -> None:
    """Fill flat memory with bytes of ones, which are NaN as floats. No kernel of CuPy has to be compiled for that."""
    buffer.data.memset_async(0xFF, buffer.nbytes)


def _copied(buffer: Array) -> Array:
    """Copy flat memory on the device, without a kernel of CuPy."""
    copy = cupy.empty(buffer.size, buffer.dtype)
    stream = cupy.cuda.get_current_stream().ptr
    cupy.cuda.runtime.memcpyAsync(copy.data.ptr, buffer.data.ptr, buffer.nbytes, ON_DEVICE, stream)
    return copy


def kernels_apart(got: Mapping[Value, Array], want: Mapping[Value, Array]) -> float:
    """Return the largest relative L2 distance of kernels' results: see `distance`."""
    pairs = ((value.type.dtype, raw.view(np.uint8), want[value].view(np.uint8)) for value, raw in got.items())
    return _worst(_apart(*pair) for pair in pairs)


def random_value(value: Value, type: TensorType) -> Array:
    """Draw the flat buffer of a value in the layout of a type: see `random_array`.

    Indices of written rows are different places, as those of the sequences in a decoder's cache. With equal ones, one
    block of a kernel would write all rows, and its time would be that of no real step.
    """
    writes = (user for user, place in value.uses if isinstance(user.op, Scatter) and place == 1)
    write = next(writes, None)
    if write is None:
        return random_array(type)
    places = np.arange(type.size) * write.result.type.shape[0] // max(type.size, 1)
    return cupy.asarray(places.astype(type.dtype.numpy))


def random_array(type: TensorType) -> Array:
    """Draw the flat buffer of a value: normal numbers, zeros and ones, or small integers of 8 bits."""
    size = max(type.span, 1)
    start = int(_STARTS.integers(PERIOD))  # arrays differ
    if type.dtype.is_narrow and type.dtype is not DType.I8:
        return _repeated(_codes(type.dtype), 1, start, code_bytes(size, type.dtype))
    raw = _repeated(_numbers(type.dtype, below=2), type.dtype.numpy.itemsize, start, size)
    return raw.view(np.uint16 if type.dtype is DType.BF16 else type.dtype.numpy)


def _constant(array: Array, type: TensorType) -> Array:
    """Copy a constant to the device in the layout of the type; bytes of a type that CuPy lacks."""
    flat = pack(np, array, type)
    return cupy.asarray(to_codes(flat, type.dtype) if type.dtype.is_narrow else flat)


def _worst(errors: Iterable[float]) -> float:
    worst = 0.0
    for error in errors:
        worst = error if not error <= worst else worst  # NaN stays
    return worst


def _apart(dtype: DType, got: Array, want: Array) -> float:
    if got.size > HOST_BYTES and dtype in TYPES:
        plain, scale = device_norms(dtype, got, want)
        if math.isfinite(plain) and math.isfinite(scale):
            return plain / (scale or 1.0)
    on_host = got.size <= HOST_BYTES or dtype.is_narrow
    pair = (got.get(), want.get()) if on_host else (got, want)
    numbers = (as_float64(each, dtype) for each in pair)
    if on_host and dtype in (*HALVES, DType.I8):  # in float32, which represents them exactly
        numbers = (each.view(dtype.numpy).astype(np.float32) for each in pair)
    return _distance(np if on_host else cupy, *numbers)


def _distance(xp: Any, got: Array, want: Array) -> float:
    with np.errstate(all="ignore"):
        plain, scale = float(xp.linalg.norm(got - want)), float(xp.linalg.norm(want))
        if math.isfinite(plain) and math.isfinite(scale):
            return plain / (scale or 1.0)
        same = (got == want) | (xp.isnan(got) & xp.isnan(want))
        off = xp.where(same, 0.0, got - want)
        scale = float(xp.linalg.norm(xp.where(xp.isfinite(want), want, 0.0)))
        return float(xp.linalg.norm(off)) / (scale or 1.0)


def as_float64(raw: Array, dtype: DType) -> Array:
    """View bytes as numbers of a dtype, in float64."""
    if dtype.is_narrow:
        return from_codes(raw, raw.size * 8 // dtype.bits, dtype).astype(np.float32).astype(np.float64)
    if dtype is DType.BF16:
        xp: Any = np if type(raw) is np.ndarray else cupy
        return (raw.view(xp.uint16).astype(xp.uint32) << 16).view(xp.float32).astype(xp.float64)
    return raw.view(dtype.numpy).astype(np.float64)
