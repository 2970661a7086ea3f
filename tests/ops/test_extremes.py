"""Compare ops with onnxruntime on NaN, infinities, signed zeros and large values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ops.cases import CASES, POINTWISE, Case
from ops.onnx_oracle import run

import fusec
from fusec.ir import DType, Graph, TensorType
from fusec.ops import BatchNorm, Cast, Conv, LayerNorm, MatMul, MaxPool, Reduce, pw

EXTREMES = np.array(
    [np.nan, np.inf, -np.inf, -0.0, 0.0, 1e30, -1e30, 3e38, -3e38, 1e-30, 88.0, -88.0, 20.0, -20.0, 1.0, -1.0],
    np.float32,
)
BY_ONNX = [
    pytest.param(cases[0], id=name)
    for name, cases in CASES.items()
    if name in POINTWISE and cases[0].oracle.__qualname__.startswith(("onnx_op", "clip_oracle"))
]


@pytest.mark.parametrize("case", BY_ONNX)
def test_extremes_as_onnxruntime_has_them(case: Case) -> None:
    pairs = [np.repeat(EXTREMES, len(EXTREMES)), np.tile(EXTREMES, len(EXTREMES))]
    floats = pairs if len(case.shapes) == 2 else [EXTREMES]
    like = case.arrays(np.random.default_rng(0))
    if case.op.name == "where":
        floats = [np.isfinite(pairs[0]), *pairs]
    elif like[0].dtype.kind in "iu":
        pytest.skip("integers have no extremes of this kind")
    elif like[0].dtype == bool:
        floats = [p > 0 for p in floats]
    (got,), (want,) = case.op.reference(np, *floats), case.oracle(*floats)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("name", "left", "right"),
    [
        ("relu_backward", 0, 1),
        ("leaky_relu_backward", 0.01, 1),
        ("sigmoid_backward", 0, 0),
        ("tanh_backward", 0, 0),
        ("elu_backward", 0, 1),
        ("gelu_backward", 0, 1),
        ("gelu_tanh_backward", 0, 1),
        ("softplus_backward", 0, 1),
        ("swish_backward", 0, 1),
    ],
)
def test_gradients_far_out(name: str, left: float, right: float, dtype: type) -> None:
    """They tend to their limits, where squares of the operand overflow and at infinity too."""
    far = np.array([1e3, 1e20, 3e38, np.inf], dtype)
    for x, want in ((far, right), (-far, left)):
        (got,) = pw(name).reference(np, np.full_like(x, 2.0), x)
        np.testing.assert_allclose(got, np.full_like(x, 2 * want), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(("name", "at", "want"), [("sigmoid", -50.0, math.exp(-50)), ("gelu", -9.0, -1.0157322e-18)])
def test_tails_keep_their_digits(name: str, at: float, want: float) -> None:
    np.testing.assert_allclose(pw(name).reference(np, np.array([at], np.float32))[0], [want], rtol=1e-5)


@pytest.mark.parametrize("sign", [0.0, -0.0])
def test_signed_zero(sign: float) -> None:
    x = np.array([sign], np.float32)
    for name in ("identity", "ceil", "floor", "round", "sqrt", "sin", "tan", "tanh", "asinh", "erf"):
        (got,) = pw(name).reference(np, x)
        assert np.signbit(got) == np.signbit(x), name


def test_halves_round_to_even() -> None:
    np.testing.assert_array_equal(
        pw("round").reference(np, np.array([0.5, 1.5, 2.5, -0.5, -1.5]))[0], [0.0, 2.0, 2.0, -0.0, -2.0]
    )


def test_integers_wrap_and_divide_without_warning() -> None:
    low, one, zero = (np.array([v], np.int8) for v in (-128, -1, 0))
    assert pw("div").reference(np, low, one)[0].dtype == np.int8
    assert pw("div").reference(np, one, zero)[0].dtype == np.int8
    assert pw("mod").reference(np, one, zero)[0].dtype == np.int8
    assert pw("neg").reference(np, low)[0] == low
    assert pw("abs").reference(np, low)[0] == low
    assert pw("add").reference(np, low, one)[0] == 127


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16], ids=str)
@pytest.mark.parametrize("name", ["mod", "floor_mod"])
def test_a_compiled_remainder_is_the_reference_at_infinities_and_zeros(name: str, dtype: DType) -> None:
    """cuDNN would take floor_mod from a rounded quotient, which is NaN for an infinite divisor."""
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 3.0, -3.0, 1e4, 0.1], dtype.numpy)
    x, y = np.repeat(values, len(values)), np.tile(values, len(values))
    graph = Graph("g")
    operands = [graph.add_input(key, TensorType(x.shape, dtype)) for key in "xy"]
    graph.set_outputs([graph.add(pw(name), *operands)])
    (got,) = fusec.compile(graph, target="h200", precision="fp32", tune="none").run(None, {"x": x, "y": y})
    (want,) = pw(name).reference(np, x, y)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(want[want == 0]))


def test_overflow_of_half_precision_is_infinite() -> None:
    big = np.array([[6e4]], np.float16)
    for op, operands in [
        (pw("mul"), [big, big]),
        (MatMul(), [big, big]),
        (Reduce("sum_square", (0,)), [big]),
        (Conv((1,), (0, 0), (1,)), [big[None], big[None]]),
    ]:
        assert np.isposinf(op.reference(np, *operands)[0]).all()


def test_half_precision_accumulates_in_single() -> None:
    """4096 ones add up to 4096; in f16 or bf16 the sum would stop earlier."""
    for dtype in (DType.F16, DType.BF16):
        ones = np.ones((1, 4096), dtype.numpy)
        assert Reduce("sum", (1,), False).reference(np, ones)[0] == 4096
        assert MatMul().reference(np, ones, ones.T)[0] == 4096
        assert LayerNorm().reference(np, ones, ones[0], ones[0])[0][0, 0] == 1


def test_nan_passes_through_max_pool() -> None:
    x = np.array([[[1.0, np.nan, 2.0]]], np.float32)
    np.testing.assert_array_equal(MaxPool((1,), (1,), (0, 0), (1,)).reference(np, x)[0], x)


def test_batch_norm_of_a_constant_channel() -> None:
    x, zero = np.full((1, 1, 3), 5.0, np.float32), np.zeros(1, np.float32)
    (got,) = BatchNorm(0.0).reference(np, x, zero + 1, zero, zero + 5, zero)
    assert np.isnan(got).all()  # 0/0: nothing is hidden, nothing warns


@pytest.mark.parametrize(
    ("source", "to", "given", "want"),
    [
        (np.float32, DType.BOOL, [0.0, -0.0, 0.5, np.nan], [False, False, True, True]),
        (np.float32, DType.I32, [2.9, -2.9, 0.0, 1e3], [2, -2, 0, 1000]),
        (np.float32, DType.F16, [1e5, -1e5, np.nan, 1e-9], [np.inf, -np.inf, np.nan, 0.0]),
        (np.int32, DType.U8, [256, -1, 3, 255], [0, 255, 3, 255]),
        (np.float64, DType.BF16, [1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1e39], [1.0, 1.0, 1 + 2**-6, np.inf]),
        (bool, DType.F64, [True, False], [1.0, 0.0]),
    ],
)
def test_casts(source: type, to: DType, given: list[float], want: list[float]) -> None:
    (got,) = Cast(to).reference(np, np.array(given, source))
    assert got.dtype == to.numpy
    np.testing.assert_array_equal(got.astype(np.float64), np.array(want, np.float64))


def test_casts_of_floats_agree_with_onnxruntime(rng: np.random.Generator) -> None:
    x = (rng.standard_normal(1000) * 10.0 ** rng.integers(-8, 5, 1000)).astype(np.float32)
    (want,) = run("Cast", [x], to=10)
    np.testing.assert_array_equal(Cast(DType.F16).reference(np, x)[0], want)
