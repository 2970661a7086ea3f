"""Test that the comparison of all numeric tests can fail."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from helpers import assert_close, relative_l2


def test_small_and_large_errors(rng: np.random.Generator):
    want = rng.standard_normal((3, 5))
    assert_close(want * (1 + 1e-6), want, rtol=1.1e-6)
    with pytest.raises(AssertionError, match="relative L2 error 1e-06"):
        assert_close(want * (1 + 1e-6), want, rtol=9e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_never_passes(bad: float):
    poisoned, clean = np.array([1.0, bad]), np.array([1.0, 2.0])
    for got, want in [(poisoned, clean), (clean, poisoned), (poisoned, poisoned)]:
        with pytest.raises(AssertionError):
            assert_close(got, want, rtol=1e9)


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match="shape"):
        assert_close(np.ones((1, 3)), np.ones(3), rtol=1.0)


def test_zero_reference():
    assert relative_l2(np.zeros(3), np.zeros(3)) == 0.0
    assert relative_l2(np.full(3, 1e-30), np.zeros(3)) == np.inf


def test_narrow_types_are_compared_wide():
    # in float16 the squares of 300 overflow
    assert relative_l2(np.full(4, 300, np.float16), np.full(4, 300, np.float16)) == 0.0
    assert_close(np.ones(4, ml_dtypes.bfloat16), np.ones(4), rtol=0.0)
