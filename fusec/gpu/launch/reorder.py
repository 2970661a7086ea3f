"""Copy an array on the device into another memory order, by one small kernel for all shapes.

CuPy compiles a kernel for each number of dims, which takes a tenth of a second each time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import cupy
import numpy as np

from fusec.gpu.kernels.codegen.kernel import Kernel, Launch, ceil_div
from fusec.gpu.nvrtc import module_of
from fusec.ir import Array

DIMS, BLOCK = 12, 256  # weights of `split_k` have 11 dims
WIDTHS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}  # of an element, in bytes
OF_WEIGHTS = (2, 4)  # the widths of most weights

_loaded: dict[tuple[int, str], Any] = {}  # functions, by device and entry

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


# Writes bytes that several elements share, the first in the low bits.
CODES = """
extern "C" __global__ void __launch_bounds__(256) ENTRY(const u8* __restrict__ from, u8* __restrict__ to, \
const u64 count, NUMBERS) {
  u64 first = ((u64)blockIdx.x * BLOCK + threadIdx.x) * EACH;
  if (first >= count) return;
  u32 made = 0;
  for (u32 i = 0; i < EACH && first + i < count; ++i) {
    u64 rest = first + i, at = 0;
STEPS
    made |= (from[at] & LOW) << (BITS * i);
  }
  to[first / EACH] = (u8)made;
}
"""


def can_reorder(array: Array) -> bool:
    """Return True for an array on the device that `reordered` takes: contiguous, of few dims and a usual width."""
    return array.itemsize in WIDTHS and 0 < array.ndim <= DIMS and bool(array.flags.c_contiguous) and array.size > 0


def reordered(array: Array, order: tuple[int, ...]) -> Array:
    """Return a flat buffer with the array's elements in an order of its dims."""
    flat = cupy.empty(array.nbytes, np.uint8).view(array.dtype)
    entry = _entry(array.itemsize)
    function = _loaded.get((cupy.cuda.runtime.getDevice(), entry))
    if function is None:
        function = module(array.itemsize).get_function(entry)
    function((ceil_div(array.size, BLOCK),), (BLOCK,), (array, flat, np.uint64(array.size), *_numbers(array, order)))
    return flat


def reordered_codes(array: Array, order: tuple[int, ...], bits: int) -> Array:
    """Return the bytes that elements of fewer than 8 bits share, in an order of the array's dims.

    array: contiguous bytes, one for each element, of at most DIMS dims
    """
    flat = cupy.empty(ceil_div(array.size * bits, 8), np.uint8)
    function = module_of(source_of_codes(bits)).get_function(_codes_entry(bits))
    function((ceil_div(flat.size, BLOCK),), (BLOCK,), (array, flat, np.uint64(array.size), *_numbers(array, order)))
    return flat


def kernels_of_weights() -> list[Kernel]:
    """Return the kernels for most weights, which a launcher may have from the cache.

    CuPy would ask NVRTC for its version before it reads its own cache, in each process.
    """
    launches = (Launch(_entry(width), source_of(width), 1, BLOCK, (), ()) for width in OF_WEIGHTS)
    return [Kernel(launch.entry, (launch,)) for launch in launches]


def use(functions: Mapping[str, Any]) -> None:
    """Use these functions on this device from now on, by entry."""
    device = cupy.cuda.runtime.getDevice()
    _loaded.update({(device, entry): function for entry, function in functions.items()})


def _numbers(array: Array, order: tuple[int, ...]) -> list[Any]:
    """Return the dims in their new order, and their strides in elements, both filled up to DIMS."""
    shape = [array.shape[d] for d in order]
    strides = [math.prod(array.shape[d + 1 :]) for d in order]
    dims = [1] * (DIMS - len(shape)) + shape, [0] * (DIMS - len(shape)) + strides
    return [np.uint64(number) for numbers in dims for number in numbers]


def module(width: int) -> Any:
    """Return the module with the kernel for elements of `width` bytes; CuPy holds what it compiled."""
    return module_of(source_of(width))


def _entry(width: int) -> str:
    return f"fusec_reorder{width}"


def _codes_entry(bits: int) -> str:
    return f"fusec_reorder_codes{bits}"


def source_of(width: int) -> str:
    """Return the kernel for elements of `width` bytes."""
    return _source(SOURCE, {"ENTRY": _entry(width), "TYPE": WIDTHS[width]})


def source_of_codes(bits: int) -> str:
    """Return the kernel for elements of fewer than 8 bits, which share bytes."""
    numbers = {"EACH": str(8 // bits), "LOW": f"{(1 << bits) - 1}u", "BITS": str(bits)}
    return _source(CODES, {"ENTRY": _codes_entry(bits), **numbers})


def _source(code: str, names: dict[str, str]) -> str:
    numbers = [f"const u64 {name}{d}" for name in ("dim", "stride") for d in range(DIMS)]
    steps = [f"  at += rest % dim{d} * stride{d};\n  rest /= dim{d};" for d in reversed(range(DIMS))]
    names |= {"BLOCK": str(BLOCK), "NUMBERS": ", ".join(numbers), "STEPS": "\n".join(steps)}
    for name, text in names.items():
        code = code.replace(name, text)
    return code
