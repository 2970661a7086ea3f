"""Test resize, slice, pad, reductions, gather and split of random shapes against onnxruntime or NumPy."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from helpers import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.cases import INTEGER_REDUCTIONS, REDUCTIONS
from ops.onnx_oracle import Array, run

from fusec.ir import DType, TensorType
from fusec.ops import Concat, Expand, Gather, MatMul, Pad, Reduce, Reshape, Resize, Slice, Softmax, Split, Transpose, pw

PROFILE = settings(max_examples=100, deadline=None)
COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def filled(shape: tuple[int, ...]) -> Array:
    """Every element another number."""
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def type_of(array: Array) -> TensorType:
    return TensorType(array.shape, DType.of(array.dtype))


# resize ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("coordinates", "rounding"), [*product(COORDINATES, ROUNDINGS)])
@pytest.mark.parametrize("by_scales", [True, False])
def test_nearest_resize(coordinates: str, rounding: str, by_scales: bool, rng: np.random.Generator) -> None:
    """Scales are powers of two: other ones fall on ties that f32 and f64 coordinates round apart."""
    x = filled((1, 2, 4, 8))
    for height, width in product((0.5, 1.0, 2.0, 4.0), (0.25, 0.5, 2.0)):
        scales = (1.0, 1.0, height, width)
        sizes = tuple(int(d * s) for d, s in zip(x.shape, scales, strict=True))
        given = [np.array(scales, np.float32)] if by_scales else [None, np.array(sizes, np.int64)]
        (want,) = run(
            "Resize",
            [x, None, *given],
            mode="nearest",
            coordinate_transformation_mode=coordinates,
            nearest_mode=rounding,
        )
        if coordinates == "align_corners" and rounding != "round_prefer_floor":
            continue  # (size-1)/(count-1) is no power of two
        (got,) = Resize(sizes, scales, "nearest", coordinates, rounding).reference(np, x)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize(
    "scales", [(1.0, 1.0, 2.0, 1.7), (1.0, 1.0, 0.6, 3.0), (1.0, 1.0, 0.25, 0.5), (1.0, 1.0, 1.0, 1.6)]
)
@pytest.mark.parametrize("shape", [(1, 2, 4, 7), (2, 1, 5, 2)])
def test_linear_resize(
    coordinates: str, scales: tuple[float, ...], shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    x = rng.standard_normal(shape).astype(np.float32)
    scales = tuple(float(np.float32(s)) for s in scales)
    sizes = tuple(math.floor(d * s) for d, s in zip(shape, scales, strict=True))
    (want,) = run(
        "Resize",
        [x, None, np.array(scales, np.float32)],
        mode="linear",
        coordinate_transformation_mode=coordinates,
    )
    (got,) = Resize(sizes, scales, "linear", coordinates).reference(np, x)
    assert_close(got, want, 2e-6)


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize(("mode", "dims"), [("linear", 1), ("linear", 3), ("nearest", 1), ("nearest", 3)])
def test_resize_in_other_ranks(coordinates: str, mode: str, dims: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 2, *(3, 4, 2)[:dims])).astype(np.float32)
    scales = (1.0, 1.0, *(2.0,) * dims)
    sizes = tuple(int(d * s) for d, s in zip(x.shape, scales, strict=True))
    attributes: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": coordinates}
    (want,) = run("Resize", [x, None, np.array(scales, np.float32)], **attributes)
    (got,) = Resize(sizes, scales, mode, coordinates).reference(np, x)
    assert_close(got, want, 2e-6)


def test_resize_to_one_element(rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 1, 5)).astype(np.float32)
    for coordinates in COORDINATES:
        (want,) = run(
            "Resize",
            [x, None, None, np.array([1, 1, 1], np.int64)],
            mode="linear",
            coordinate_transformation_mode=coordinates,
        )
        (got,) = Resize((1, 1, 1), (1.0, 1.0, 0.2), "linear", coordinates).reference(np, x)
        assert_close(got, want, 1e-5)


# slices, pads, pieces ----------------------------------------------------------------------------------


@PROFILE
@given(SHAPES, st.data())
def test_slice(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Python's own slices with steps of both signs, empty ones among them."""
    slices = [data.draw(st.slices(d)) for d in shape]
    ranges = [range(*s.indices(d)) for s, d in zip(slices, shape, strict=True)]
    op = Slice(tuple(r.start for r in ranges), tuple(map(len, ranges)), tuple(r.step for r in ranges))
    x = filled(shape)
    assert op.infer(type_of(x)) == (TensorType(x[tuple(slices)].shape, DType.F32),)
    np.testing.assert_array_equal(op.reference(np, x)[0], x[tuple(slices)])


@PROFILE
@given(SHAPES, st.sampled_from(["constant", "reflect", "edge", "wrap"]), st.data())
def test_pad(shape: tuple[int, ...], mode: str, data: st.DataObject) -> None:
    most = [d - 1 if mode == "reflect" else d if mode == "wrap" else 3 for d in shape] * 2
    pads = tuple(data.draw(st.integers(0, m)) for m in most)
    x = filled(shape)
    op = Pad(pads, mode, 2.5 if mode == "constant" else 0.0)
    (want,) = run("Pad", [x, np.array(pads, np.int64), np.array(2.5, np.float32)], mode=mode)
    assert op.infer(type_of(x)) == (type_of(want),)
    np.testing.assert_array_equal(op.reference(np, x)[0], want)


@PROFILE
@given(SHAPES, st.data())
def test_split_and_concat_are_inverse(shape: tuple[int, ...], data: st.DataObject) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, shape[axis]), max_size=3)))
    edges = [0, *cuts, shape[axis]]
    op = Split(axis, tuple(b - a for a, b in pairwise(edges)))
    x = filled(shape)
    pieces = op.reference(np, x)
    assert op.infer(type_of(x)) == tuple(map(type_of, pieces))
    np.testing.assert_array_equal(Concat(axis).reference(np, *pieces)[0], x)
    assert Concat(axis).infer(*map(type_of, pieces)) == (type_of(x),)


@PROFILE
@given(SHAPES, st.data())
def test_gather(shape: tuple[int, ...], data: st.DataObject) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    size = shape[axis]
    picked = data.draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=6))
    dtype = data.draw(st.sampled_from([np.int64, np.int32, np.int8]))
    x, indices = filled(shape), np.array(picked, dtype).reshape(1, -1)
    op = Gather(axis)
    want = np.take(x, picked, axis=axis).reshape(op.infer(type_of(x), type_of(indices))[0].shape)
    np.testing.assert_array_equal(op.reference(np, x, indices)[0], want)


def test_gather_takes_unsigned_indices() -> None:
    (got,) = Gather().reference(np, filled((3, 2)), np.array([2, 0], np.uint64))
    np.testing.assert_array_equal(got, [[4, 5], [0, 1]])


def test_empty_tensors() -> None:
    """Nothing in, nothing out, and no warning."""
    x = np.zeros((2, 0, 3), np.float32)
    scale = np.ones(3, np.float32)
    for op, operands in [
        (Softmax(1), [x]),
        (Transpose((2, 0, 1)), [x]),
        (Reshape((0, 5)), [x]),
        (Expand((4, 2, 0, 3)), [x]),
        (pw("relu"), [x]),
        (pw("add"), [x, scale]),
        (MatMul(), [x, np.zeros((3, 4), np.float32)]),
        (MatMul(), [np.zeros((2, 0), np.float32), np.zeros((0, 4), np.float32)]),
        (Reduce("sum", (1,)), [x]),
        (Reduce("prod", (0, 1)), [x]),
        (Slice((0, 0, 2), (1, 0, 3), (1, 1, -1)), [x]),
    ]:
        (got,) = op.reference(np, *operands)
        assert type_of(got) == op.infer(*map(type_of, operands))[0]
    np.testing.assert_array_equal(Reduce("prod", (0, 1)).reference(np, x)[0], np.ones((1, 1, 3)))


# reductions and products -------------------------------------------------------------------------------


@PROFILE
@given(SHAPES, st.sampled_from(sorted(REDUCTIONS)), st.booleans(), st.booleans(), st.data())
def test_reduction(shape: tuple[int, ...], kind: str, keepdims: bool, whole: bool, data: st.DataObject) -> None:
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1)))))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    if whole and kind in INTEGER_REDUCTIONS:
        x = rng.integers(-4, 5, shape).astype(np.int32)
    else:
        x = rng.uniform(0.1, 2.0, shape).astype(np.float32)
    op = Reduce(kind, axes, keepdims)
    (want,) = run(
        REDUCTIONS[kind], [x, np.array(axes, np.int64)], keepdims=int(keepdims), noop_with_empty_axes=0 if axes else 1
    )
    (got,) = op.reference(np, x)
    assert type_of(got) == op.infer(type_of(x))[0]
    if axes:  # over no axes onnxruntime copies, where the standard says sum(abs(x)), sum(x * x)…
        assert type_of(want) == type_of(got)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_extrema_of_integers(kind: str, dtype: type, rng: np.random.Generator) -> None:
    info = np.iinfo(dtype)
    x = rng.integers(info.min, info.max, (3, 4), dtype, endpoint=True)
    (got,) = Reduce(kind, (1,), False).reference(np, x)
    np.testing.assert_array_equal(got, getattr(x, kind)(axis=1))


def test_log_sum_exp_does_not_overflow() -> None:
    x = np.array([[1000.0, 1000.0], [-np.inf, -np.inf], [np.inf, 0.0], [-1000.0, -1001.0]], np.float32)
    (got,) = Reduce("log_sum_exp", (1,), False).reference(np, x)
    np.testing.assert_allclose(got, [1000 + math.log(2), -np.inf, np.inf, -1000 + math.log1p(math.exp(-1))], rtol=1e-6)


def test_softmax_of_large_and_masked_rows() -> None:
    x = np.array([[1e4, 0.0, -1e4], [-np.inf, 0.0, 0.0], [3e38, 3e38, -3e38]], np.float32)
    np.testing.assert_array_equal(Softmax().reference(np, x)[0], [[1, 0, 0], [0, 0.5, 0.5], [0.5, 0.5, 0]])
    np.testing.assert_array_equal(Softmax().reference(np, np.full((1, 2), -np.inf, np.float32))[0], [[np.nan] * 2])


@PROFILE
@given(st.data())
def test_matmul_broadcasts_batches(data: st.DataObject) -> None:
    m, k, n = data.draw(st.tuples(*[st.integers(1, 4)] * 3))
    batch = data.draw(st.lists(st.integers(1, 3), max_size=2))
    left = [d if data.draw(st.booleans()) else 1 for d in batch]
    right = [d if data.draw(st.booleans()) else 1 for d in batch][data.draw(st.integers(0, len(batch))) :]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    a, b = (rng.integers(1, 9, s).astype(np.float32) for s in ((*left, m, k), (*right, k, n)))
    (want,) = run("MatMul", [a, b])
    assert MatMul().infer(type_of(a), type_of(b)) == (type_of(want),)
    assert_close(MatMul().reference(np, a, b)[0], want, 0.0)
