"""Load a compiled kernel from memory. CuPy's RawModule loads it from a file only, and caches it by the file's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy


class CubinFunction:
    """Function of a cubin, with the interface of CuPy's RawKernel.

    cooperative: all blocks of a launch run at the same time, because they wait for each other.
    Raises CuPy's CUDADriverError if the driver refuses the cubin.
    """

    def __init__(self, cubin: bytes, entry: str, cooperative: bool):
        module = cupy.cuda.function.Module()
        module.load(cubin)
        self.kernel = module.get_function(entry)  # holds the module
        self._cooperative = cooperative

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: Sequence[Any], *, shared_mem: int = 0) -> None:
        """Launch the function on the current stream."""
        self.kernel(grid, block, arguments, shared_mem, enable_cooperative_groups=self._cooperative)

    @property
    def shared_size_bytes(self) -> int:
        """The static shared memory of a block."""
        driver = cupy.cuda.driver
        return int(driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self.kernel.ptr))

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """The most dynamic shared memory that a block may have."""
        driver = cupy.cuda.driver
        return int(driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self.kernel.ptr))

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, nbytes: int) -> None:
        driver = cupy.cuda.driver
        driver.funcSetAttribute(self.kernel.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, nbytes)
