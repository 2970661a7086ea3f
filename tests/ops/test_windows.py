"""Test convolutions and pools of random geometry against onnxruntime; bounded memory."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from helpers import assert_close
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ops.onnx_oracle import Array, run

from fusec.errors import VerifyError
from fusec.ir import DType, Op, TensorType
from fusec.ops import AvgPool, Conv, ConvTranspose, MaxPool, convolution

PROFILE = settings(max_examples=120, deadline=None)
Ints = tuple[int, ...]


def numbers(low: int, high: int, count: int) -> st.SearchStrategy[Ints]:
    return st.tuples(*[st.integers(low, high)] * count)


def fits(op: Op, *shapes: Ints) -> bool:
    try:
        op.infer(*(TensorType(s, DType.F32) for s in shapes))
    except VerifyError:
        return False
    return True


def arrays(data: st.DataObject, *shapes: Ints) -> list[Array]:
    """Whole numbers but zero: sums of their products are exact, so nothing hides in a tolerance."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    return [(rng.integers(1, 10, s) * rng.choice([-1, 1], s)).astype(np.float32) for s in shapes]


def check(op: Op, operands: list[Array], wanted: list[Array], rtol: float) -> None:
    """The result, and in it the inferred type, are those of onnxruntime."""
    (got,) = op.reference(np, *operands)
    (inferred,) = op.infer(*(TensorType(a.shape, DType.F32) for a in operands))
    assert inferred.shape == wanted[0].shape
    assert_close(got, wanted[0], rtol)


@PROFILE
@given(st.integers(1, 3), st.data())
def test_convolution(n: int, data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, 3))
    batch, per_group, filters = data.draw(numbers(1, 3, 3))
    spatial, window = data.draw(numbers(1, 7, n)), data.draw(numbers(1, 3, n))
    strides, dilations, pads = data.draw(numbers(1, 3, n)), data.draw(numbers(1, 2, n)), data.draw(numbers(0, 2, 2 * n))
    op = Conv(strides, pads, dilations, groups)
    shapes = (batch, groups * per_group, *spatial), (groups * filters, per_group, *window)
    assume(fits(op, *shapes))
    operands = arrays(data, *shapes)
    wanted = run("Conv", operands, strides=strides, pads=pads, dilations=dilations, group=groups)
    check(op, operands, wanted, 0.0)


@PROFILE
@given(st.integers(1, 3), st.data())
def test_transposed_convolution(n: int, data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, 3))
    batch, per_group, filters = data.draw(numbers(1, 3, 3))
    spatial, window = data.draw(numbers(1, 5, n)), data.draw(numbers(1, 3, n))
    strides, dilations, pads = data.draw(numbers(1, 3, n)), data.draw(numbers(1, 2, n)), data.draw(numbers(0, 2, 2 * n))
    extra = tuple(data.draw(st.integers(0, s - 1)) for s in strides)
    op = ConvTranspose(strides, pads, dilations, extra, groups)
    shapes = (batch, groups * per_group, *spatial), (groups * per_group, filters, *window)
    assume(fits(op, *shapes))
    operands = arrays(data, *shapes)
    attributes: dict[str, Any] = {"strides": strides, "pads": pads, "dilations": dilations, "group": groups}
    check(op, operands, run("ConvTranspose", operands, output_padding=extra, **attributes), 0.0)


@PROFILE
@given(st.integers(1, 3), st.booleans(), st.data())
def test_max_pool(n: int, ceil_mode: bool, data: st.DataObject) -> None:
    spatial, window = data.draw(numbers(1, 8, n)), data.draw(numbers(1, 4, n))
    strides, dilations, pads = data.draw(numbers(1, 4, n)), data.draw(numbers(1, 2, n)), data.draw(numbers(0, 2, 2 * n))
    op = MaxPool(window, strides, pads, dilations, ceil_mode)
    shape = (2, 3, *spatial)
    assume(fits(op, shape))
    operands = arrays(data, shape)
    (got,) = op.reference(np, *operands)
    assume(np.isfinite(got).all())  # a window over padding alone is -inf; onnxruntime gives the least number
    assume(all(p < k for p, k in zip(pads, window * 2, strict=True)))  # onnxruntime forgets the dilation here
    attributes: dict[str, Any] = {"kernel_shape": window, "strides": strides, "pads": pads, "dilations": dilations}
    check(op, operands, run("MaxPool", operands, ceil_mode=int(ceil_mode), **attributes), 0.0)


@PROFILE
@given(st.integers(1, 3), st.booleans(), st.booleans(), st.data())
def test_average_pool(n: int, ceil_mode: bool, include: bool, data: st.DataObject) -> None:
    spatial, window = data.draw(numbers(1, 8, n)), data.draw(numbers(1, 4, n))
    strides, dilations, pads = data.draw(numbers(1, 4, n)), data.draw(numbers(1, 2, n)), data.draw(numbers(0, 2, 2 * n))
    op = AvgPool(window, strides, pads, dilations, ceil_mode, include)
    shape = (2, 3, *spatial)
    assume(fits(op, shape))
    operands = arrays(data, shape)
    check(op, operands, [average(operands[0], op)], 1e-6)
    assume(all(p < k for p, k in zip(pads, window * 2, strict=True)))
    attributes: dict[str, Any] = {"kernel_shape": window, "strides": strides, "pads": pads, "dilations": dilations}
    check(
        op,
        operands,
        run("AveragePool", operands, ceil_mode=int(ceil_mode), count_include_pad=int(include), **attributes),
        1e-5,
    )


def average(x: Array, op: AvgPool) -> Array:
    """Window by window: what is inside the image is summed; the padding counts or not, what hangs over never."""
    n = x.ndim - 2
    counts = op.counts(x.shape[2:])
    result = np.zeros((*x.shape[:2], *counts))
    for at in np.ndindex(*counts):
        total, number = np.zeros(x.shape[:2]), 0
        for tap in np.ndindex(*op.window):
            place = [
                i * s + t * d - p for i, s, t, d, p in zip(at, op.strides, tap, op.dilations, op.pads, strict=False)
            ]
            if all(0 <= p < size for p, size in zip(place, x.shape[2:], strict=True)):
                total += x[(slice(None), slice(None), *place)]
                number += 1
            elif op.count_include_pad and all(
                p < size + end for p, size, end in zip(place, x.shape[2:], op.pads[n:], strict=True)
            ):
                number += 1
        result[(slice(None), slice(None), *at)] = total / number if number else 0.0
    return result


@pytest.mark.parametrize("block", [1, 1 << 10])
def test_convolution_in_blocks(block: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = rng.standard_normal((2, 4, 9, 8)), rng.standard_normal((6, 2, 3, 3))
    op = Conv((2, 1), (1, 0, 1, 2), (1, 2), 2)
    (whole,) = op.reference(np, x, w)
    monkeypatch.setattr(convolution, "IM2COL_BYTES", block)
    assert_close(op.reference(np, x, w)[0], whole, 1e-15)


def test_memory_of_a_convolution_is_bounded(rng: np.random.Generator) -> None:
    """im2col of the whole image would be 27 times the image: 340 MB."""
    x, w = rng.standard_normal((1, 32, 32, 56, 56), np.float32), rng.standard_normal((4, 32, 3, 3, 3), np.float32)
    tracemalloc.start()
    Conv((1, 1, 1), (1,) * 6, (1, 1, 1)).reference(np, x, w)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * convolution.IM2COL_BYTES


def test_the_convolutions_and_pools_of_resnet50_take_no_minutes(rng: np.random.Generator) -> None:
    """0.1 to 0.4 s on two cores: a test for a loop over pixels, not for the machine."""
    layers, channels, size = [(3, 64, 7, 2, 224)], 64, 56  # channels, filters, window, stride, image
    for width, blocks, stride in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]:
        for s in [stride] + [1] * (blocks - 1):
            layers += [(channels, width, 1, 1, size), (width, width, 3, s, size), (width, 4 * width, 1, 1, size // s)]
            if channels != 4 * width:
                layers += [(channels, 4 * width, 1, s, size)]
                channels = 4 * width
            size //= s
    assert len(layers) == 53
    seconds = 0.0
    for c, k, n, s, d in layers:
        x, w = rng.standard_normal((1, c, d, d), np.float32), rng.standard_normal((k, c, n, n), np.float32)
        start = time.perf_counter()
        Conv((s, s), (n // 2,) * 4, (1, 1)).reference(np, x, w)
        seconds += time.perf_counter() - start
    start = time.perf_counter()
    for pool in (MaxPool, AvgPool):
        pool((3, 3), (2, 2), (1,) * 4, (1, 1)).reference(np, rng.standard_normal((1, 64, 112, 112), np.float32))
    assert seconds + time.perf_counter() - start < 5


@pytest.mark.parametrize("pool", [MaxPool, AvgPool])
def test_integer_and_padding_only_windows(pool: type[Any]) -> None:
    """A window whose every tap is padding: the least value, or a mean of nothing, 0; and no warning."""
    op = pool((2,), (1,), (2, 2), (3,))
    (got,) = op.reference(np, np.full((1, 1, 1), 5.0, np.float32))
    assert op.infer(TensorType((1, 1, 1), DType.F32))[0].shape == got.shape == (1, 1, 2)
    np.testing.assert_array_equal(got, np.full((1, 1, 2), -np.inf if pool is MaxPool else 0.0))


def test_one_window_may_hang_over_a_small_image() -> None:
    """EfficientNet's last pool has a window larger than the image, with ceil_mode."""
    operands = [np.random.default_rng(0).standard_normal((1, 2, 3, 2)).astype(np.float32)]
    op = AvgPool((5, 4), (5, 4), (0, 0, 0, 0), (1, 1), ceil_mode=True)
    check(op, operands, [operands[0].mean((2, 3), keepdims=True)], 1e-6)
    assert not fits(AvgPool((5, 4), (5, 4), (0, 0, 0, 0), (1, 1)), (1, 2, 3, 2))
    assert not fits(AvgPool((5, 4), (1, 1), (0, 0, 0, 0), (1, 1), ceil_mode=True), (1, 2, 3, 2))
