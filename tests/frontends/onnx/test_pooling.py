"""Test pools where values are awkward."""

from __future__ import annotations

import numpy as np
import pytest
from frontends.onnx.models import one

import fusec
from fusec.frontends import load
from fusec.reference import evaluate


@pytest.mark.parametrize("storage_order", [0, 1])
def test_the_place_of_a_maximum_that_is_nan(storage_order: int, rng: np.random.Generator) -> None:
    """It is the place of the first NaN of the window, and never one outside of the image."""
    proto = one("MaxPool", [2, 3, 6, 5], outputs=2, kernel_shape=[3, 2], pads=[1, 0, 1, 1], storage_order=storage_order)
    x = rng.standard_normal((2, 3, 6, 5)).astype(np.float32)
    x[rng.random(x.shape) < 0.3] = np.nan
    for y, places in (
        evaluate(load(proto), {"x0": x}).values(),
        fusec.compile(proto, target="h200", tune="none").run(None, {"x0": x}),
    ):
        flat = (x.transpose(0, 1, 3, 2) if storage_order else x).reshape(-1)
        assert np.isnan(y).any()
        assert not np.isnan(y).all()
        np.testing.assert_array_equal(flat[places], y)
