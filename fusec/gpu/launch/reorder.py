"""Copy an array on the device into another memory order, by one small kernel for all shapes.

CuPy compiles a kernel for each number of dims, which takes a tenth of a second each time.
"""

from __future__ import annotations

import math
from typing import Any

import cupy
import numpy as np

from fusec.gpu.kernels.codegen.kernel import ceil_div
from fusec.gpu.nvrtc import module_of
from fusec.ir import Array

DIMS, BLOCK = 12, 256  # weights of `split_k` have 11 dims
WIDTHS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}  # of an element, in bytes

SOURCE = """
extern "C" __global__ void __launch_bounds__(256) ENTRY(const TYPE* __restrict__ from, TYPE* __restrict__ to, \
const u64 count, NUMBERS) {
  u64 i = (u64)blockIdx.x * BLOCK + threadIdx.x;
  if (i >= count) return;
  u64 rest = i, at = 0;
STEPS
  to[i] = from[at];
}
"""


def can_reorder(array: Array) -> bool:
    """Return True for an array on the device that `reordered` takes: contiguous, of few dims and a usual width."""
    return array.itemsize in WIDTHS and 0 < array.ndim <= DIMS and bool(array.flags.c_contiguous) and array.size > 0


def reordered(array: Array, order: tuple[int, ...]) -> Array:
    """Return a flat buffer with the array's elements in an order of its dims."""
    flat = cupy.empty(array.nbytes, np.uint8).view(array.dtype)
    shape = [array.shape[d] for d in order]
    strides = [math.prod(array.shape[d + 1 :]) for d in order]
    dims = [1] * (DIMS - len(shape)) + shape, [0] * (DIMS - len(shape)) + strides
    numbers = [np.uint64(number) for numbers in dims for number in numbers]
    count = array.size
    function = module(array.itemsize).get_function(_entry(array.itemsize))
    function((ceil_div(count, BLOCK),), (BLOCK,), (array, flat, np.uint64(count), *numbers))
    return flat


def module(width: int) -> Any:
    """Return the module with the kernel for elements of so many bytes; CuPy holds what it compiled."""
    return module_of(source_of(width))


def _entry(width: int) -> str:
    return f"fusec_reorder{width}"


def source_of(width: int) -> str:
    """Return the kernel for elements of so many bytes."""
    numbers = [f"const u64 {name}{d}" for name in ("dim", "stride") for d in range(DIMS)]
    steps = [f"  at += rest % dim{d} * stride{d};\n  rest /= dim{d};" for d in reversed(range(DIMS))]
    names = {"ENTRY": _entry(width), "TYPE": WIDTHS[width], "BLOCK": str(BLOCK)}
    names |= {"NUMBERS": ", ".join(numbers), "STEPS": "\n".join(steps)}
    code = SOURCE
    for name, text in names.items():
        code = code.replace(name, text)
    return code
