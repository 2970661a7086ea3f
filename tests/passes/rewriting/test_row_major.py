"""Test that large arrays are converted to another type and memory order as NumPy converts them."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fusec.passes.rewriting import row_major as module
from fusec.passes.rewriting.row_major import converted, row_major
from fusec.system import threaded_parts

TYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.fixture(params=["blocked", "parallel"], autouse=True)
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays take the ways of large ones; parts are no multiples of a block."""
    monkeypatch.setattr(module, "BLOCKED_BYTES", 1)
    monkeypatch.setattr(module, "_RUN", 1000)
    if request.param == "parallel":
        monkeypatch.setattr(module, "PARALLEL_BYTES", 1)
        monkeypatch.setattr(threaded_parts, "PARALLEL_BYTES", 1)


def arrays(rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    plain = (rng.standard_normal((257, 130)) * 1e5).astype(np.float32)  # some overflow in f16
    image = rng.standard_normal((5, 6, 7, 8)).astype(np.float32)
    return {
        "row-major": plain,
        "transposed": plain.T,
        "filters": plain.T.reshape(130, 257, 1, 1),
        "gaps": plain[::2, 3:].T,
        "backwards": plain[::-1].T,
        "broadcast": np.broadcast_to(plain[:, :1], (257, 300)).T,
        "permuted": image.transpose(2, 0, 3, 1),
        "row": plain[:1].T,
        "empty": plain[:0].T,
        "number": plain[0, 0].reshape(()),
    }


@pytest.mark.parametrize("dtype", TYPES)
def test_conversions_are_those_of_numpy(dtype: Any, rng: np.random.Generator) -> None:
    for name, array in arrays(rng).items():
        with np.errstate(over="ignore"):
            want = array.astype(dtype)
        with warnings.catch_warnings(), np.errstate(over="ignore"):
            warnings.simplefilter("error")
            ordered, same = row_major(array, np.dtype(dtype)), converted(array, np.dtype(dtype))
        for got in (ordered, same):
            assert got.dtype == dtype, name
            assert got.shape == array.shape, name
            np.testing.assert_array_equal(got, want, err_msg=name)
        assert ordered.flags.c_contiguous, name


def test_the_memory_order_stays(rng: np.random.Generator) -> None:
    for name in ("row-major", "transposed", "permuted"):
        array = arrays(rng)[name]
        with np.errstate(over="ignore"):
            made = converted(array, np.dtype(np.float16))
        assert np.argsort(made.strides).tolist() == np.argsort(array.strides).tolist()


def test_nothing_is_copied_where_nothing_changes(rng: np.random.Generator) -> None:
    array = arrays(rng)["row-major"]
    assert np.shares_memory(row_major(array, array.dtype), array)
    assert np.shares_memory(converted(array.T, array.dtype), array)
