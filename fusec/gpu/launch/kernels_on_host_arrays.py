"""Run kernels on the GPU over buffers in host memory, to compare what they compute."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import cupy
import numpy as np

from fusec.errors import ExecutionError
from fusec.gpu.kernels.codegen.kernel import Kernel
from fusec.gpu.launch.kernel_launcher import Launcher
from fusec.ir import TensorType, Value

Buffers = Mapping[tuple[Value, TensorType], np.ndarray[Any, Any]]


class HostLauncher:
    """Launcher that copies buffers to the GPU, launches a kernel once, and copies all of them back."""

    xp: Any = cupy

    def __init__(self) -> None:
        self._launcher = Launcher()

    def runs(self, kernel: Kernel) -> bool:
        """Return False if this GPU has no room for the kernel or lacks its instructions.

        A source that NVRTC refuses raises the warning of `Launcher.compile`, because that is an error of fusec.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="NVRTC refuses")
            return self._launcher.runs(kernel)

    def run(self, kernel: Kernel, buffers: Buffers) -> None:
        """Launch the kernel over flat buffers, and copy GPU memory into them afterwards."""
        try:
            held = {key: cupy.asarray(buffer.view(np.uint8)) for key, buffer in buffers.items()}
            self._launcher.bind(kernel, lambda *key: held[key])()
            for key, buffer in buffers.items():
                buffer.view(np.uint8)[...] = held[key].get()
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
            raise ExecutionError(f"the kernel for {kernel.name} failed on the GPU: {error}") from error
