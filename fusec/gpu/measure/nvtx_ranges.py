"""Mark work with named ranges that profilers such as Nsight Systems show (NVTX)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from cupy import cuda

_nvtx: Any = cuda.nvtx  # a placeholder without functions, in a CuPy that was built without NVTX


@contextmanager
def named_range(name: str) -> Generator[None]:
    """Give a name to what the calling thread does in this block. Without a profiler this does nothing."""
    _nvtx.RangePush(name)
    try:
        yield
    finally:
        _nvtx.RangePop()
