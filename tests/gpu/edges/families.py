"""Rows of steps that families of kernels are for: an edge value in each image, amid small numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from gpu.edges.numbers import Array, edges, name, plain
from gpu.edges.row import FLOATS, HALVES, Row, row

from fusec.ir import DType, Value, channels_last
from fusec.ops import (
    Attention,
    Cast,
    Conv,
    ConvWgrad,
    MatMul,
    PackedMatMul,
    Reduce,
    Reshape,
    RmsNorm,
    Rotary,
    Scatter,
    Slice,
    pw,
)

NHWC = channels_last(4)
ONE = Conv((1, 1), (0,) * 4, (1, 1))
SAME = Conv((1, 1), (1,) * 4, (1, 1))


def families() -> Iterator[Row]:
    """Lists, gates, and products with few rows, columns, channels or pixels."""
    for dtype in FLOATS:
        yield _list(dtype)
        yield _gate(dtype)
        yield _writes(dtype)
        yield _arg_max(dtype)
    for dtype in HALVES:
        yield _cached(dtype)
        yield from _products(dtype)
        yield from _normed(dtype)
        yield _filter_gradient(dtype)
        yield _grouped_conv1d(dtype)
        yield _grouped_conv2d(dtype)


def _numbers(dtype: DType, *shape: int) -> Array:
    return np.resize(plain(8, dtype), shape)


def _spots(dtype: DType, *shape: int) -> Array:
    """Images of zeros and ones, an edge value in each."""
    x = np.resize(np.array([0.0, 1.0, 0.0], dtype.numpy), (16, *shape))
    x[(slice(None), 3 % shape[0], *(d // 2 for d in shape[1:]))] = edges(dtype)
    return x


def _labels(dtype: DType, rank: int) -> Array:
    return np.array([name(v, dtype) for v in edges(dtype)], object).reshape(16, *(1,) * (rank - 1))


def _list(dtype: DType) -> Row:
    x, y = np.repeat(edges(dtype), 16), np.tile(edges(dtype), 16)
    labels = np.array([f"{name(a, dtype)} , {name(b, dtype)}" for a, b in zip(x, y, strict=True)], object)

    def make(g: Any, x: Value, y: Value, z: Value, w: Value) -> list[Value]:
        return [g.add(pw("add"), a, g.add(pw("mul"), b, a)) for a, b in ((x, y), (z, w))]

    return row(
        f"lists {dtype.value}", "mul", [x, y, x[:255].copy(), y[:255].copy()], make, labels=labels, kernel_only=True
    )


def _writes(dtype: DType) -> Row:
    """Every value times every angle's, some of which are written into a cache."""
    values = edges(dtype)
    x = np.zeros((1, 16, 1, 16), dtype.numpy) + values[:, None, None]
    at = np.array([0, -1, 3, 5, 1, 7, -3, 4], np.int64)

    def make(g: Any, x: Value, cos: Value, sin: Value, cache: Value, at: Value) -> list[Value]:
        y = g.add(Rotary(), x, cos, sin)
        part = g.add(Slice((0, 4, 0, 0), (1, 8, 1, 16), (1,) * 4), y)
        return [y, g.add(Scatter(), cache, at, g.add(Reshape((8, 16)), part))]

    arrays = [x, values.reshape(1, 1, 1, 16).copy(), np.ones((1, 1, 1, 16), dtype.numpy), _numbers(dtype, 9, 16), at]
    return row(f"rotary+scatter {dtype.value}", "scatter", arrays, make, labels=np.array(""), kernel_only=True)


def _arg_max(dtype: DType) -> Row:
    """The place of the largest number of long rows, with an edge value in each."""
    x = np.resize(_numbers(dtype, 1024), (16, 1024)).copy()
    x[:, 700] = edges(dtype)

    def make(g: Any, x: Value, places: Value, last: Value) -> Value:
        is_largest = g.add(pw("cmp_ge"), x, g.add(Reduce("max", (1,), True), x))
        return g.add(Cast(DType.I64), g.add(Reduce("min", (1,), False), g.add(pw("where"), is_largest, places, last)))

    arrays = [x, np.arange(1024, dtype=np.int32)[None], np.array(1023, np.int32)]
    labels = np.array([name(v, dtype) for v in edges(dtype)], object)
    title = f"place of the largest {dtype.value}"
    return row(title, "reduce", arrays, make, constants=(1, 2), labels=labels, kernel_only=True)


def _cached(dtype: DType) -> Row:
    """Every value in a row that is written into a cache, and is the only one that queries see."""

    def make(g: Any, q: Value, keys: Value, values: Value, at: Value, k: Value, v: Value, mask: Value) -> list[Value]:
        cache = [
            g.add(Reshape((1, 1, 40, 16)), g.add(Scatter(), old, at, new)) for old, new in ((keys, k), (values, v))
        ]
        return [*cache, g.add(Attention(0.25), q, *cache, mask)]

    hidden = np.full((1, 1, 1, 40), -np.inf, dtype.numpy)
    hidden[..., 33] = 0.0
    q, old, new = _numbers(dtype, 1, 2, 1, 16), _numbers(dtype, 40, 16), _numbers(dtype, 1, 16)
    arrays = [q, old, old.copy(), np.array([33], np.int64), new, edges(dtype).reshape(1, 16).copy(), hidden]
    title = f"cached attention {dtype.value}"
    return row(title, "attention", arrays, make, labels=np.array(""), kernel_only=True)


def _filter_gradient(dtype: DType) -> Row:
    """An edge value in the loss of each filter."""
    loss = np.resize(np.array([0.0, 1.0, 0.0], dtype.numpy), (1, 16, 3, 8))
    loss[0, :, 1, 3] = edges(dtype)
    op = ConvWgrad((3, 3), (2, 2), (1,) * 4, (1, 1))
    arrays = [_numbers(dtype, 1, 4, 5, 16), loss]
    fits: Any = {"orders": {0: NHWC, 1: NHWC}, "labels": _labels(dtype, 4)}
    return row(f"gradient of filters {dtype.value}", "conv_wgrad", arrays, lambda g, x, y: g.add(op, x, y), **fits)


def _grouped_conv1d(dtype: DType) -> Row:
    """An edge value in a channel of the image, of each of 16 images."""
    x = np.resize(np.array([0.0, 1.0, 0.0], dtype.numpy), (16, 32, 24))
    x[:, 3, 11] = edges(dtype)
    op = Conv((1,), (3, 4), (1,), 2)
    fits: Any = {"orders": {0: (0, 2, 1)}, "labels": _labels(dtype, 3), "constants": (1,)}
    arrays = [x, _numbers(dtype, 16, 16, 8)]
    return row(f"grouped convolution of {dtype.value}", "conv", arrays, lambda g, x, w: g.add(op, x, w), **fits)


def _grouped_conv2d(dtype: DType) -> Row:
    """An edge value in a channel of each image, next to channels of other groups."""
    image = [_spots(dtype, 16, 5, 6), _numbers(dtype, 16, 4, 3, 3)]
    fits: Any = {"orders": {0: NHWC}, "labels": _labels(dtype, 4), "constants": (1,)}

    def make(g: Any, x: Value, w: Value) -> Value:
        y = g.add(replace(SAME, groups=4), x, w)
        g.set_type(y, y.type.with_order(NHWC))
        return y

    return row(f"groups of four channels {dtype.value}", "conv", image, make, **fits)


def _normed(dtype: DType) -> Iterator[Row]:
    """Every value in a row that is normalised and multiplied, by weights of 16 bits and of 4."""
    x = np.resize(np.array([0.5, -0.25], dtype.numpy), (16, 1024))
    x[:, 3] = edges(dtype)
    rng = np.random.default_rng(5)
    codes = rng.integers(-7, 8, (16, 1024)).astype(DType.I4.numpy)
    scales = np.full((16, 32), 0.03125, np.float32)

    def plain_product(g: Any, x: Value, scale: Value, w: Value) -> Value:
        return g.add(MatMul(), g.add(RmsNorm(-1, 1e-3), x, scale), w)

    def packed_product(g: Any, x: Value, scale: Value, w: Value, s: Value) -> Value:
        return g.add(PackedMatMul(32), g.add(RmsNorm(-1, 1e-3), x, scale), w, s)

    ones = np.ones(1024, dtype.numpy)
    for start in range(0, 16, 4):
        some, labels = x[start : start + 4].copy(), _labels(dtype, 2)[start : start + 4]
        title = f"of rows {start} to {start + 3} {dtype.value}"
        known: Any = {"labels": labels, "kernel_only": True}
        weights = (codes.T.astype(np.float32) / 32).astype(dtype.numpy)
        yield row(f"rms_norm+matmul {title}", "matmul", [some, ones, weights], plain_product, constants=(2,), **known)
        arrays = [some, ones, codes, scales]
        yield row(f"rms_norm+packed_matmul {title}", "packed_matmul", arrays, packed_product, constants=(2, 3), **known)


def _gate(dtype: DType) -> Row:
    first, second = _numbers(dtype, 8, 32, 1, 1), _numbers(dtype, 32, 8, 1, 1)
    bias = _numbers(dtype, 8, 1, 1), _numbers(dtype, 32, 1, 1)

    def make(g: Any, x: Value, w: Value, b: Value, v: Value, c: Value) -> Value:
        h = g.add(pw("swish", beta=1.0), g.add(pw("add"), g.add(ONE, x, w), b))
        return g.add(pw("sigmoid"), g.add(pw("add"), g.add(ONE, h, v), c))

    arrays = [_spots(dtype, 32, 1, 1), first, bias[0], second, bias[1]]
    fits: Any = {"orders": {0: NHWC}, "constants": (1, 2, 3, 4), "labels": _labels(dtype, 4)}
    return row(f"gate {dtype.value}", "conv", arrays, make, **fits)


def _products(dtype: DType) -> Iterator[Row]:
    def make(g: Any, x: Value, w: Value, b: Value, op: Conv = ONE) -> Value:
        return g.add(pw("relu"), g.add(pw("add"), g.add(op, x, w), b))

    def padded(g: Any, x: Value, w: Value, b: Value) -> Value:
        return make(g, x, w, b, SAME)

    fits: Any = {"orders": {0: NHWC}, "constants": (1, 2), "labels": _labels(dtype, 4)}
    thin = [_spots(dtype, 16, 16, 16), _numbers(dtype, 96, 16, 1, 1), _numbers(dtype, 96, 1, 1)]
    yield row(f"thin conv {dtype.value}", "conv", thin, make, **fits)
    pixels = [_spots(dtype, 256, 3, 3), _numbers(dtype, 32, 256, 3, 3), _numbers(dtype, 32, 1, 1)]
    yield row(f"few pixels {dtype.value}", "conv", pixels, padded, **fits)
    nhwc: Any = {**fits, "orders": {0: NHWC, 1: NHWC}}
    image = [_spots(dtype, 4, 7, 9), _numbers(dtype, 16, 4, 3, 3), _numbers(dtype, 16, 1, 1)]

    def few(g: Any, x: Value, w: Value, b: Value) -> Value:
        g.set_type(w, w.type.with_order(NHWC))
        return padded(g, x, w, b)

    yield row(f"few channels {dtype.value}", "conv", image, few, **nhwc)

    def of_video(g: Any, x: Value, w: Value, b: Value) -> Value:
        y = g.add(Conv((1, 1, 2), (1,) * 6, (1, 1, 1)), x, w)
        g.set_type(y, y.type.with_order(channels_last(5)))
        return g.add(pw("relu"), g.add(pw("add"), y, b))

    video = [_spots(dtype, 3, 2, 5, 6), _numbers(dtype, 16, 3, 3, 3, 3), _numbers(dtype, 16, 1, 1, 1)]
    frames: Any = {"orders": {0: channels_last(5)}, "constants": (1, 2), "labels": _labels(dtype, 5)}
    yield row(f"few channels of a video {dtype.value}", "conv", video, of_video, **frames)

    def by_matrix(g: Any, x: Value, w: Value, b: Value) -> Value:
        return g.add(pw("relu"), g.add(pw("add"), g.add(MatMul(), x, w), b))

    matrix = [_spots(dtype, 40, 24), _numbers(dtype, 24, 40), _numbers(dtype, 40)]
    yield row(f"thin matmul {dtype.value}", "matmul", matrix, by_matrix, constants=(1, 2), labels=_labels(dtype, 3))
