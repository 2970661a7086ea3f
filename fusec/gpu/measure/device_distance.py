"""Measure the distance of two large results on the device, by a small kernel that compiles faster than CuPy's."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from fusec.gpu.kernels.codegen.kernel import C_TYPES, narrow_types
from fusec.gpu.nvrtc import module_of
from fusec.ir import Array, DType

BYTES = (DType.I8, DType.F8E4M3)  # of quantised models
TYPES = (DType.F16, DType.BF16, DType.F32, DType.F64, *BYTES)
GRID, BLOCK = 128, 256

# Each thread writes its own two sums, so that they are added in one order.
SOURCE = """
extern "C" __global__ void __launch_bounds__(256) ENTRY(const TYPE* __restrict__ got, const TYPE* __restrict__ want, \
double* __restrict__ sums, const u64 count) {
  u64 thread = (u64)blockIdx.x * BLOCK + threadIdx.x;
  double apart = 0.0, scale = 0.0;
  for (u64 i = thread; i < count; i += GRID * BLOCK) {
    double a = wide(got[i]), b = wide(want[i]);
    apart += (a - b) * (a - b);
    scale += b * b;
  }
  sums[2 * thread] = apart;
  sums[2 * thread + 1] = scale;
}
"""


def device_norms(dtype: DType, got: Array, want: Array) -> tuple[float, float]:
    """Return the L2 norms of the difference of two results, given as bytes, and of the second."""
    sums = cupy.empty(2 * GRID * BLOCK, np.float64)
    count = np.uint64(got.size // dtype.numpy.itemsize)
    module(dtype).get_function(_entry(dtype))((GRID,), (BLOCK,), (got, want, sums, count))
    apart, scale = sums.get().reshape(-1, 2).sum(axis=0)
    return float(apart) ** 0.5, float(scale) ** 0.5


def module(dtype: DType) -> Any:
    """Return the module with the kernel for a type; CuPy holds what it compiled."""
    return module_of(source_of(dtype))


def _entry(dtype: DType) -> str:
    return f"fusec_distance_{dtype.value}"


def source_of(dtype: DType) -> str:
    """Return the kernel for results of a type."""
    names = {
        "ENTRY": _entry(dtype),
        "TYPE": C_TYPES[dtype],
        "GRID": f"{GRID}ull",
        "BLOCK": f"{BLOCK}",
    }
    code = SOURCE
    for name, text in names.items():
        code = code.replace(name, text)
    return (narrow_types() if dtype.is_narrow else "") + code
