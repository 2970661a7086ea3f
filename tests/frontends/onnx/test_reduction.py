"""Test reductions whose results are rounded to integers, or that have no elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frontends.onnx.models import info, model, run
from onnx import helper

import fusec


@pytest.mark.parametrize("op", ["ReduceL2", "ReduceLogSum", "ReduceLogSumExp"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_root_or_logarithm_of_integers(op: str, dtype: type, keepdims: int, rng: np.random.Generator) -> None:
    """ONNX has these types up to opset 27."""
    node = helper.make_node(op, ["x", "axes"], ["y"], keepdims=keepdims)
    x = rng.integers(1, 50, (3, 4, 5)).astype(dtype)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    proto = model([node], [info("x", x.shape, kind)], ["y"], {"axes": np.array([-1, 0])}, 18)
    (want,) = run(proto, {"x": x})
    for target in ("cpu", "h200"):
        got = fusec.compile(proto, target=target, tune="none")(x)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("op", "opset", "shape", "given"),
    [
        ("Hardmax", 11, (3, 0), {"axis": -2}),
        ("Hardmax", 13, (3, 0), {"axis": 1}),
        ("Hardmax", 13, (0, 3), {"axis": 1}),
        ("MeanVarianceNormalization", 13, (0, 3, 4, 4), {}),
    ],
)
def test_over_no_elements(op: str, opset: int, shape: tuple[int, ...], given: dict[str, Any]) -> None:
    proto = model([helper.make_node(op, ["x"], ["y"], **given)], [info("x", shape)], ["y"], opset=opset)
    x = np.zeros(shape, np.float32)
    assert fusec.compile(proto, target="cpu").run(None, {"x": x})[0].shape == run(proto, {"x": x})[0].shape == shape
