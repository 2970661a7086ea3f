"""Compare arrays by relative L2 error in float64 (NaN and infinity never pass), count reads, and mark cases as slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck

from fusec.dynamic_shapes.executable import DynamicExecutable
from fusec.ir import Array, Value
from fusec.runtime import Executable
from fusec.segments.executable import AnyExecutable
from fusec.system.byte_ranges import MemoryRanges

if TYPE_CHECKING:
    from fusec.gpu.backend import CudnnBackend

# all that a test with its own limits can do without; HealthCheck does not tell the type of its items
HEALTH_CHECKS = cast("list[HealthCheck]", list(HealthCheck))


def relative_l2(got: Any, want: Any) -> float:
    """Return |got - want| / |want| in float64; NaN if either array has a NaN or an infinity."""
    wide_got, wide_want = (np.asarray(a).astype(np.float64) for a in (got, want))
    if not (np.isfinite(wide_got).all() and np.isfinite(wide_want).all()):
        return float("nan")
    difference, scale = np.linalg.norm(wide_got - wide_want), np.linalg.norm(wide_want)
    if scale == 0:
        return 0.0 if difference == 0 else float("inf")
    return float(difference / scale)


def assert_close(got: Any, want: Any, rtol: float) -> None:
    """Fail unless shapes agree and the relative L2 error is at most `rtol`."""
    got_shape, want_shape = np.shape(got), np.shape(want)
    assert got_shape == want_shape, f"shape {got_shape}, wanted {want_shape}"
    error = relative_l2(got, want)
    assert error <= rtol, f"relative L2 error {error:.3g}, allowed {rtol:.3g}"


def one_program(executable: AnyExecutable | DynamicExecutable) -> Executable:
    """Return what was compiled; it must be one program."""
    assert isinstance(executable, Executable)
    return executable


def cudnn_backend(executable: AnyExecutable | DynamicExecutable) -> CudnnBackend:
    """Return the backend of one program on a GPU."""
    from fusec.gpu.backend import CudnnBackend  # here, because most tests need no CUDA package

    backend = one_program(executable).backend
    assert isinstance(backend, CudnnBackend)
    return backend


def literal_of(value: Value) -> Array:
    """Return the array of a constant."""
    assert value.literal is not None
    return value.literal.array


def quick(cases: Iterable[Any], some: Collection[Any]) -> list[Any]:
    """Mark all cases but some as slow: `make test` runs these, and `make test-all` the others."""
    return [case if case in some else pytest.param(case, marks=pytest.mark.slow) for case in cases]


class CountedRanges(MemoryRanges):
    """Ranges of bytes in memory that count how often they are read."""

    reads = 0

    def read(self, start: int, end: int) -> bytes:
        self.reads += 1
        return super().read(start, end)
