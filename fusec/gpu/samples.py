"""Data to time and compare plans on: random numbers for a tensor, and how far the results of two plans lie apart.

Numbers are drawn on the host, once, and what is small is compared there: on a machine where nothing was compiled yet,
CuPy's own kernels for that take longer than the rest of loading a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import cupy
import numpy as np

from fusec.cudnn_graph import CudnnTensor
from fusec.ir import Array, DType
from fusec.simulate import extent

PERIOD = 131_071  # numbers until they come again: a prime, so that no stride of a tensor meets the same ones
HOST_BYTES = 1 << 22  # of a result that is compared on the host


def random_data(tensor: CudnnTensor) -> Array:
    """Bytes of normal numbers, filters scaled to about unit gain; small integers and coin flips for other types."""
    size = max(extent(tensor), 1)
    gain = 0
    if tensor.dtype.is_float and len(tensor.dims) >= 4 and tensor.dims[0] > 1:
        gain = round(math.log2(max(1, math.prod(tensor.dims[1:]))) / 2)
    numbers, width = _numbers(tensor.dtype, gain), tensor.dtype.numpy.itemsize
    start = 7919 * tensor.uid % PERIOD  # tensors of one graph differ
    some = cupy.asarray(numbers[width * start : width * (start + min(size, PERIOD))])
    if size <= PERIOD:
        return some
    data = cupy.empty(width * size, cupy.uint8)
    for place in range(0, width * size, some.size):
        part = data[place : place + some.size]
        part[...] = some[: part.size]
    return data


@cache
def _numbers(dtype: DType, gain: int) -> np.ndarray[Any, Any]:
    """Twice PERIOD numbers of a type over 2^gain, as bytes."""
    rng = np.random.default_rng(7)
    if dtype is DType.BOOL:
        drawn = rng.random(PERIOD) < 0.5
    elif dtype.is_int:
        drawn = rng.integers(0, 9, PERIOD).astype(dtype.numpy)
    else:
        drawn = (rng.standard_normal(PERIOD, np.float32) * np.float32(2.0**-gain)).astype(dtype.numpy)
    return np.concatenate([drawn, drawn]).view(np.uint8)


def distance(got: Mapping[CudnnTensor, Array], want: Mapping[CudnnTensor, Array]) -> float:
    """The largest relative L2 distance of results, given as bytes; NaN if one has a NaN or infinity that the other
    has not."""
    worst = 0.0
    for tensor, raw in got.items():
        there = want[tensor]
        on_host = raw.size <= HOST_BYTES
        pair = (raw.get(), there.get()) if on_host else (raw, there)
        numbers = (as_float64(each, tensor.dtype) for each in pair)
        if on_host and tensor.dtype in (DType.F16, DType.BF16):  # which single precision holds
            numbers = (each.view(tensor.dtype.numpy).astype(np.float32) for each in pair)
        error = _distance(np if on_host else cupy, *numbers)
        worst = error if not error <= worst else worst  # NaN stays
    return worst


def _distance(xp: Any, got: Array, want: Array) -> float:
    with np.errstate(all="ignore"):
        plain, scale = float(xp.linalg.norm(got - want)), float(xp.linalg.norm(want))
        if math.isfinite(plain) and math.isfinite(scale):
            return plain / (scale or 1.0)
        alike = (got == want) | (xp.isnan(got) & xp.isnan(want))
        off = xp.where(alike, 0.0, got - want)
        scale = float(xp.linalg.norm(xp.where(xp.isfinite(want), want, 0.0)))
        return float(xp.linalg.norm(off)) / (scale or 1.0)


def as_float64(raw: Array, dtype: DType) -> Array:
    """Bytes of a dtype as numbers."""
    if dtype is DType.BF16:
        xp: Any = np if type(raw) is np.ndarray else cupy
        return (raw.view(xp.uint16).astype(xp.uint32) << 16).view(xp.float32).astype(xp.float64)
    return raw.view(dtype.numpy).astype(np.float64)
