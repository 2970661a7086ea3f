"""Test resize where values or lengths are awkward, against onnxruntime: NaN and infinities, fractional lengths."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from frontends.onnx.models import info, model, run
from onnx import ModelProto, TensorProto, helper

import fusec
from fusec.errors import ModelError
from fusec.frontends import load
from fusec.reference import evaluate


def resize(shape: tuple[int, ...], scales: tuple[float, ...], dtype: int = TensorProto.FLOAT, **how: Any) -> ModelProto:
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], **how)
    return model([node], [info("x", shape, dtype)], ["y"], {"scales": np.array(scales, np.float32)}, 18)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scales", [(1, 1, 2, 1.5), (1, 1, 0.7, 0.55), (1, 1, 3, 1.3)], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"exclude_outside": 1, "cubic_coeff_a": -0.5},
        {"coordinate_transformation_mode": "align_corners"},
        {"coordinate_transformation_mode": "asymmetric"},
    ],
    ids=str,
)
def test_a_cubic_resize_reads_only_its_window(how: dict[str, Any], scales: Any, odd: float) -> None:
    proto = resize((1, 2, 9, 8), scales, mode="cubic", **how)
    x = np.arange(144, dtype=np.float32).reshape(1, 2, 9, 8)
    x[0, 0, 4, 3] = x[0, 1, 0, 7] = odd
    want = run(proto, {"x": x})[0]
    assert 0 < np.isfinite(want).sum() < want.size
    np.testing.assert_allclose(evaluate(load(proto), {"x": x})["y"], want, rtol=1e-4)
    np.testing.assert_allclose(fusec.compile(proto, target="h200", tune="none")(x), want, rtol=1e-4)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_an_antialiased_resize_reads_only_its_window(mode: str) -> None:
    proto = resize((1, 1, 24, 3), (1, 1, 0.25, 1), mode=mode, antialias=1)
    x = np.arange(72, dtype=np.float32).reshape(1, 1, 24, 3)
    x[0, 0, 9, 1] = np.nan
    got, want = evaluate(load(proto), {"x": x})["y"], run(proto, {"x": x})[0]
    assert np.isnan(got).any() and not (np.isnan(got) & ~np.isnan(want)).any()
    both = ~np.isnan(want)
    np.testing.assert_allclose(got[both], want[both], rtol=1e-4)


def test_a_cubic_resize_in_half_precision_is_rounded_once(rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 1, 9, 8)).astype(np.float16)
    want = evaluate(load(resize(x.shape, (1, 1, 2, 1.5), mode="cubic")), {"x": x.astype(np.float32)})["y"]
    got = evaluate(load(resize(x.shape, (1, 1, 2, 1.5), TensorProto.FLOAT16, mode="cubic")), {"x": x})["y"]
    np.testing.assert_array_equal(got, want.astype(np.float16))


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("scale", [0.41, 0.6, 0.8, 1.3, 1.7, 2.5])
def test_align_corners_counts_whole_elements(mode: str, scale: float) -> None:
    """A length of 2.05 has 2 elements, whose corners are aligned: so do torch and onnxruntime."""
    proto = resize((1, 1, 4, 5), (1, 1, scale, scale), mode=mode, coordinate_transformation_mode="align_corners")
    x = np.arange(20, dtype=np.float32).reshape(1, 1, 4, 5)
    np.testing.assert_allclose(evaluate(load(proto), {"x": x})["y"], run(proto, {"x": x})[0], rtol=1e-5)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("by", ["scales", "sizes"])
def test_no_image_is_resized_to_none(mode: str, by: str) -> None:
    node = helper.make_node("Resize", ["x", "", *([by] if by == "scales" else ["", by])], ["y"], mode=mode)
    to = np.array([1, 1, 2, 1.5], np.float32) if by == "scales" else np.array([0, 2, 8, 6])
    proto = model([node], [info("x", [0, 2, 4, 4])], ["y"], {by: to}, 18)
    x = np.zeros((0, 2, 4, 4), np.float32)
    assert fusec.compile(proto, target="cpu").run(None, {"x": x})[0].shape == run(proto, {"x": x})[0].shape


def test_an_image_of_no_pixels_is_not_resized() -> None:
    node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"])
    proto = model([node], [info("x", [1, 2, 0, 4])], ["y"], {"sizes": np.array([1, 2, 8, 6])}, 18)
    with pytest.raises(ModelError, match=r"resize \[1, 2, 0, 4\] to \[1, 2, 8, 6\]"):
        load(proto)


@pytest.mark.parametrize("scale", ["0.1", "0.3", "0.6", "0.7", "1.1", "1.2", "1.3", "1.7", "2.3"])
@pytest.mark.parametrize("rounding", ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
@pytest.mark.parametrize("coordinates", ["asymmetric", "half_pixel", "tf_half_pixel_for_nn"])
def test_a_scale_in_32_bits_means_its_decimal_number(scale: str, rounding: str, coordinates: str) -> None:
    """Torch's `interpolate(scale_factor=0.6)` reads element 5 for element 3, though f32 has a little more than 0.6."""
    size, half, whole = 60, Fraction(1, 2), Fraction(scale)
    how: dict[str, Any] = {"coordinate_transformation_mode": coordinates, "nearest_mode": rounding}
    x = np.arange(size, dtype=np.float32).reshape(1, 1, 1, size)
    got = evaluate(load(resize(x.shape, (1, 1, 1, float(scale)), mode="nearest", **how)), {"x": x})["y"].reshape(-1)
    shift = half if coordinates != "asymmetric" else Fraction(0)
    at = [(i + shift) / whole - (half if coordinates == "half_pixel" else 0) for i in range(got.size)]
    exact = {
        "floor": math.floor,
        "ceil": math.ceil,
        "round_prefer_floor": lambda a: math.ceil(a - half),
        "round_prefer_ceil": lambda a: math.floor(a + half),
    }[rounding]
    assert got.tolist() == [min(max(exact(a), 0), size - 1) for a in at]


@pytest.mark.parametrize(("dtype", "lowest"), [(TensorProto.UINT8, 0), (TensorProto.INT8, -128)], ids=["u8", "i8"])
@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_a_linear_resize_of_8_bits_rounds_towards_zero(
    dtype: int, lowest: int, scale: float, rng: np.random.Generator
) -> None:
    """Quantised models of onnxruntime in QOperator form have it. Weights are powers of two, so nothing else rounds."""
    x = rng.integers(lowest, lowest + 256, (1, 2, 8, 8)).astype(helper.tensor_dtype_to_np_dtype(dtype))
    proto = resize(x.shape, (1, 1, scale, scale), dtype, mode="linear")
    (want,) = run(proto, {"x": x})
    got = fusec.compile(proto, target="h200", tune="none")(x)
    assert np.asarray(got).dtype == x.dtype
    np.testing.assert_array_equal(got, want)


def test_a_linear_resize_of_8_bits_leaves_an_even_image_even() -> None:
    """onnxruntime gives 99 in some places, where its weights add up to less than one."""
    x = np.full((1, 1, 8, 8), 100, np.uint8)
    got = evaluate(load(resize(x.shape, (1, 1, 1.5, 2.625), TensorProto.UINT8, mode="linear")), {"x": x})["y"]
    assert (got == 100).all()


def test_a_linear_resize_of_wide_integers_is_refused() -> None:
    with pytest.raises(ModelError, match="linear resize of i64"):
        load(resize((1, 1, 4, 4), (1, 1, 2, 2), TensorProto.INT64, mode="linear"))
