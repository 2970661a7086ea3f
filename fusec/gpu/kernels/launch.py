"""Kernels on the GPU: compiled by NVRTC through CuPy, which keeps what it compiled, and launched over bound memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cupy

from fusec.errors import ExecutionError
from fusec.gpu.kernels.spec import Kernel, Launch, prelude
from fusec.ir import Array, DType, TensorType, Value

OPTIONS = ("--std=c++17",)
Memory = Callable[[Value, TensorType], Array]  # a value's flat buffer, constants in the order of the type


class Launcher:
    """Compiles each source once. Kernels launched one after the other on one stream share scratch memory."""

    def __init__(self) -> None:
        self._functions: dict[str, Any] = {}
        self._scratch: Array | None = None

    def compile(self, kernels: Iterable[Kernel]) -> None:
        """Compile what is not compiled yet, several sources at once; ExecutionError with the compiler's words."""
        wanted = {launch.entry: (kernel, launch) for kernel in kernels for launch in kernel.launches}
        missing = [item for entry, item in wanted.items() if entry not in self._functions]
        if not missing:
            return
        with ThreadPoolExecutor(max_workers=min(len(missing), os.cpu_count() or 1, 16)) as pool:
            for (_, launch), function in zip(missing, pool.map(_compiled, missing), strict=True):
                self._functions[launch.entry] = function

    def bind(self, kernel: Kernel, memory: Memory) -> Callable[[], None]:
        """What launches a kernel on the current stream: neither allocates nor waits."""
        self.compile([kernel])
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
            calls.append((self._functions[launch.entry], (launch.grid,), (launch.block,), tuple(buffers)))

        def run() -> None:
            for function, grid, block, arguments in calls:
                function(grid, block, arguments)

        return run

    def with_random_data(self, kernel: Kernel) -> Callable[[], None]:
        """What launches a kernel over memory of its own, filled with normal numbers (and indices within bounds)."""
        held: dict[tuple[Value, TensorType], Array] = {}

        def memory(value: Value, type: TensorType) -> Array:
            if (value, type) not in held:
                held[value, type] = _random(type)
            return held[value, type]

        return self.bind(kernel, memory)


def _random(type: TensorType) -> Array:
    size = max(type.size, 1)
    if type.dtype is DType.BOOL or type.dtype.is_int:
        return cupy.random.randint(0, 2, size).astype(type.dtype.numpy)
    array = cupy.random.standard_normal(size).astype(cupy.float32)
    if type.dtype is DType.BF16:  # its upper half: cut off rather than rounded, which is as random
        return cupy.ascontiguousarray(array.view(cupy.uint16)[1::2])
    return array.astype(type.dtype.numpy)


def _compiled(item: tuple[Kernel, Launch]) -> Any:
    kernel, launch = item
    try:
        module = cupy.RawModule(code=prelude() + launch.source, options=OPTIONS, backend="nvrtc")
        return module.get_function(launch.entry)
    except cupy.cuda.compiler.CompileException as error:
        raise ExecutionError(f"kernel {kernel.name}: NVRTC refuses its source: {error}") from error
