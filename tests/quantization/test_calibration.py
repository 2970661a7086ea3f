"""Test number formats, histograms and thresholds, against the standard's own evaluator and plain definitions."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from fusec.errors import ModelError
from fusec.quantization.histogram import BINS, Histogram
from fusec.quantization.number_formats import FP8, INT4, INT8, NumberFormat
from fusec.quantization.thresholds import CALIBRATIONS


def counted(*arrays: np.ndarray) -> Histogram:
    histogram = Histogram("t")
    for array in arrays:
        histogram.add(array)
    return histogram


@pytest.mark.parametrize(("format", "type"), [(INT8, TensorProto.INT8), (FP8, TensorProto.FLOAT8E4M3FN)])
def test_codes_are_those_of_quantize_linear(format: NumberFormat, type: int) -> None:
    """Also beyond the range, and at ties, which go to the even code."""
    x = np.random.default_rng(0).standard_normal(4000).astype(np.float32) * 40
    x = np.concatenate([x, np.arange(-20, 20, dtype=np.float32) / 2, [1e6, -1e6]]).astype(np.float32)
    scale = 0.25
    node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])
    graph = helper.make_graph(
        [node],
        "q",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None])],
        [helper.make_tensor_value_info("y", type, [None])],
        [helper.make_tensor("s", TensorProto.FLOAT, [], [scale]), helper.make_tensor("z", type, [], [0])],
    )
    standard = ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)]))
    (want,) = standard.run(None, {"x": x})
    got = format.codes(x, np.asarray(scale, np.float32))
    assert np.array_equal(got.astype(np.float32), np.asarray(want).astype(np.float32))


def test_the_largest_magnitude_becomes_the_largest_code() -> None:
    for format in (INT8, FP8, INT4):
        x = np.array([-3.0, 1.0, 3.0], np.float32)
        scale = format.scale(3.0, x.dtype)
        assert format.rounded(x, scale)[[0, 2]] == pytest.approx([-3.0, 3.0])
        assert float(format.codes(x, scale)[2]) == format.largest


def test_zeros_stay_zeros_and_tiny_scales_are_numbers() -> None:
    assert INT8.scale(0.0, np.dtype(np.float32)) == 1.0
    half = INT8.scale(1e-7, np.dtype(np.float16))
    assert half.dtype == np.float16
    assert half > 0


def test_a_histogram_is_that_of_all_data_in_any_order() -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(3000).astype(np.float32) * spread for spread in (0.01, 5.0, 1.0)]
    arrays[0][:100] = 0
    forward, backward = counted(*arrays), counted(*arrays[::-1])
    every = np.abs(np.concatenate(arrays))
    assert forward.largest == backward.largest == every.max()
    assert forward.zeros == 100
    assert np.array_equal(forward.counts, backward.counts)
    want, _ = np.histogram(every[every > 0], BINS, (0, forward.width * BINS))
    assert np.array_equal(forward.counts, want)
    assert forward.largest > forward.width * BINS / 2  # at least half of the bins are in use


def test_a_tensor_of_zeros_has_no_magnitude() -> None:
    histogram = counted(np.zeros((2, 3), np.float32))
    for choose in CALIBRATIONS.values():
        assert choose(histogram, INT8, 99.9) == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_name(bad: float) -> None:
    with pytest.raises(ModelError, match=r"tensor 't' has an infinity or NaN"):
        counted(np.array([1.0, bad], np.float32))


def test_the_largest_magnitude_is_known_without_counts() -> None:
    arrays = [np.zeros(3, np.float32), np.array([-2.5, 1.0], np.float32), np.array([2.0], np.float32)]
    uncounted = Histogram("t", counted=False)
    for array in arrays:
        uncounted.add(array)
    assert uncounted.largest == counted(*arrays).largest == 2.5
    assert not uncounted.counts.any()
    with pytest.raises(ModelError, match="infinity or NaN"):
        uncounted.add(np.array([np.nan], np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_gpu_counts_as_the_host(dtype: type, rng: np.random.Generator) -> None:
    import cupy

    arrays = [(rng.standard_normal((70, 90)) * spread).astype(dtype) for spread in (0.1, 3.0, 1.0)]
    arrays[1][:20] = 0
    there, here = counted(*map(cupy.asarray, arrays)), counted(*arrays)
    assert (there.largest, there.zeros, there.width) == (here.largest, here.zeros, here.width)
    assert np.array_equal(there.counts, here.counts)
    with pytest.raises(ModelError, match="infinity or NaN"):
        there.add(cupy.asarray([1.0, np.nan], np.float32))


def test_percentile_is_numpys_to_a_bin() -> None:
    x = np.random.default_rng(2).standard_normal(50_000).astype(np.float32)
    histogram = counted(x)
    for percent in (50.0, 99.0, 99.9):
        got = CALIBRATIONS["percentile"](histogram, INT8, percent)
        assert got == pytest.approx(np.percentile(np.abs(x), percent), abs=1.01 * histogram.width)
    assert (
        CALIBRATIONS["percentile"](histogram, INT8, 100.0) == CALIBRATIONS["max"](histogram, INT8, 0) == np.abs(x).max()
    )


def test_entropy_saturates_outliers_and_nothing_else() -> None:
    rng = np.random.default_rng(3)
    even = counted(rng.uniform(-1, 1, 100_000).astype(np.float32))
    assert CALIBRATIONS["entropy"](even, INT8, 0) > 0.97
    normal = rng.standard_normal(100_000).astype(np.float32)
    normal[0] = 60.0
    assert 2.5 < CALIBRATIONS["entropy"](counted(normal), INT8, 0) < 6.0


def test_entropy_is_the_smallest_divergence_by_its_definition() -> None:
    """Written with plain loops: each code's counts, spread evenly over the occupied bins that it stands for."""
    x = np.random.default_rng(4).standard_normal(5_000).astype(np.float32)
    x[0] = 9.0
    histogram = counted(x)
    used = int(np.flatnonzero(histogram.counts)[-1]) + 1

    def divergence(bins: int) -> float:
        codes = [
            int(INT8.codes(np.array([i + 0.5], np.float32), INT8.scale(float(bins), np.dtype(np.float32)))[0])
            for i in range(bins)
        ]
        p = histogram.counts[:bins].astype(float)
        q = np.zeros(bins)
        for code in set(codes):
            places = [i for i in range(bins) if codes[i] == code and p[i] > 0]
            for i in places:
                q[i] = sum(p[j] for j in places) / len(places)
        p[-1] += histogram.counts[bins:].sum()
        q = np.array([max(q[i], 1e-4) if p[i] > 0 else 0.0 for i in range(bins)])
        p, q = p / p.sum(), q / q.sum()
        return sum(p[i] * np.log(p[i] / q[i]) for i in range(bins) if p[i] > 0)

    tried = range(used, 127, -8)
    some = [*tried][::24]
    from fusec.quantization import thresholds

    for bins in some:
        assert thresholds.divergence(histogram.counts[:used], bins, INT8) == pytest.approx(divergence(bins))
    chosen = CALIBRATIONS["entropy"](histogram, INT8, 0)
    best = min(tried, key=lambda bins: thresholds.divergence(histogram.counts[:used], bins, INT8))
    assert chosen == pytest.approx(min(best * histogram.width, histogram.largest))
