"""Hold the memory that steps share while they run: cuDNN's workspace, and what kernels allocate."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import cudnn
import cupy

from fusec.ir import Array


class Workspace:
    """Scratch memory of a program. Steps on one stream share it, because they run in order.

    array: the workspace of steps that run in order; None: no step needs one yet
    pool: memory of kernels that allocate. It is their own, because captured CUDA graphs hold addresses of it.
    """

    def __init__(self, handle: Any, stream: Any):
        self._handle, self._stream = handle, stream
        self.array: Array | None = None
        self.pool = cupy.cuda.MemoryPool()
        self._of_lane: Array | None = None

    def reserve(self, workspace_bytes: int) -> None:
        """Allocate a workspace at least as large as this."""
        if self.array is None or self.array.size < workspace_bytes:
            with self._stream:
                self.array = cupy.empty(workspace_bytes, cupy.uint8)

    def address(self) -> Callable[[], int]:
        """Return a function that gives the address for a step: of its lane's workspace, else of today's array."""
        own = self.array  # held by the function, also after a larger one was allocated

        def current() -> int:
            array = own if self._of_lane is None else self._of_lane
            return 0 if array is None else array.data.ptr

        return current

    @contextmanager
    def on_lane(self, stream: Any, workspace: Array | None) -> Generator[None]:
        """Run plans on another stream, with a workspace of its own."""
        cudnn.set_stream(handle=self._handle, stream=stream.ptr)
        self._of_lane = workspace
        try:
            with stream:
                yield
        finally:
            self._of_lane = None
            cudnn.set_stream(handle=self._handle, stream=self._stream.ptr)

    def allocations(self) -> AbstractContextManager[None]:
        """Take the memory that kernels allocate from the pool."""
        return cupy.cuda.using_allocator(self.pool.malloc)
