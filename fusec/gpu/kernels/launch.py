"""Kernels on the GPU: compiled by NVRTC through CuPy, which keeps what it compiled, and launched over bound memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import cupy

from fusec.errors import ExecutionError
from fusec.gpu.kernels.spec import Kernel, prelude
from fusec.ir import Array, TensorType, Value

OPTIONS = ("--std=c++17",)
Memory = Callable[[Value, TensorType], Array]  # a value's flat buffer, constants in the order of the type


class Launcher:
    """Compiles each source once. Kernels launched one after the other on one stream share scratch memory."""

    def __init__(self) -> None:
        self._functions: dict[str, Any] = {}
        self._scratch: Array | None = None

    def compile(self, kernel: Kernel) -> Mapping[str, Any]:
        """The functions of a kernel by entry; ExecutionError with the compiler's words if it refuses."""
        for launch in kernel.launches:
            if launch.entry in self._functions:
                continue
            try:
                module = cupy.RawModule(code=prelude() + launch.source, options=OPTIONS, backend="nvrtc")
                self._functions[launch.entry] = module.get_function(launch.entry)
            except cupy.cuda.compiler.CompileException as error:
                raise ExecutionError(f"kernel {kernel.name}: NVRTC refuses its source: {error}") from error
        return self._functions

    def bind(self, kernel: Kernel, memory: Memory) -> Callable[[], None]:
        """What launches a kernel on the current stream: neither allocates nor waits."""
        functions = self.compile(kernel)
        if kernel.scratch_bytes and (self._scratch is None or self._scratch.size < kernel.scratch_bytes):
            self._scratch = cupy.empty(kernel.scratch_bytes, cupy.uint8)
        calls: list[tuple[Any, tuple[int], tuple[int], tuple[Array, ...]]] = []
        for launch in kernel.launches:
            buffers: list[Array] = []
            for argument in launch.arguments:
                if argument.value is None or argument.type is None:
                    assert self._scratch is not None
                    buffers.append(self._scratch)
                else:
                    buffers.append(memory(argument.value, argument.type))
            calls.append((functions[launch.entry], (launch.grid,), (launch.block,), tuple(buffers)))

        def run() -> None:
            for function, grid, block, arguments in calls:
                function(grid, block, arguments)

        return run
