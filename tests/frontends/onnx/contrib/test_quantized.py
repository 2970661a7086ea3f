"""Test quantised arithmetic, activations, pools and products of onnxruntime against its integer kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frontends.onnx.contrib.models import Array, Held, assert_floats, assert_steps, both, imported, one

from fusec.errors import ModelError
from fusec.frontends import load
from fusec.reference import evaluate

SEEDS = range(12)


def _codes(rng: np.random.Generator, dtype: Any, *shape: int) -> Array:
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)


def _weights(rng: np.random.Generator, dtype: Any, *shape: int) -> Array:
    """Draw weights of 8 bits, signed ones of 7, because onnxruntime saturates sums of two on CPUs without VNNI."""
    return rng.integers(-64, 64, shape, dtype=np.int8) if dtype is np.int8 else _codes(rng, dtype, *shape)


def _scale(rng: np.random.Generator, low: float = 0.01, high: float = 0.05) -> Array:
    return np.array(rng.uniform(low, high), np.float32)


def _point(rng: np.random.Generator, dtype: Any) -> Array:
    middle = 128 if dtype is np.uint8 else 0
    return np.array(middle + rng.integers(-20, 21), dtype)


def _dtype(rng: np.random.Generator) -> Any:
    return np.uint8 if rng.integers(2) else np.int8


def _shape(rng: np.random.Generator, rank: int, high: int = 9) -> tuple[int, ...]:
    return tuple(int(d) for d in rng.integers(1, high, rank))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16])
@pytest.mark.parametrize("seed", range(4))
def test_quantise_and_dequantise(dtype: Any, seed: int) -> None:
    """Whole tensors, and each index of an axis; equal, because both divide and round in f32."""
    rng = np.random.default_rng(seed)
    shape = _shape(rng, 3)
    axis = int(rng.integers(0, 3))
    limits = np.iinfo(dtype)
    step = 8.0 / (int(limits.max) - int(limits.min))
    for scale_shape in ((), (shape[axis],)):
        scale = rng.uniform(step, 2 * step, scale_shape).astype(np.float32)
        zero = rng.integers(int(limits.min) // 2, int(limits.max) // 2, scale_shape).astype(dtype)
        given: dict[str, Any] = {"axis": axis} if scale_shape else {}
        x = (rng.standard_normal(shape) * 2).astype(np.float32)
        (ours,), (theirs,) = both("QuantizeLinear", [x, Held(scale), Held(zero)], **given)
        np.testing.assert_array_equal(ours, theirs)
        assert_floats("DequantizeLinear", [_codes(rng, dtype, *shape), Held(scale), Held(zero)], **given)


@pytest.mark.parametrize("op", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize("seed", SEEDS)
def test_arithmetic(op: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = _dtype(rng)
    shape = _shape(rng, int(rng.integers(1, 5)))
    other = tuple(1 if rng.integers(3) == 0 else d for d in shape[int(rng.integers(0, len(shape))) :])
    a, b = _codes(rng, dtype, *shape), _codes(rng, dtype, *other)
    y_scale = np.array(0.05 if op == "QLinearAdd" else 0.08, np.float32)
    points = [_point(rng, dtype) for _ in range(3)]
    operands = [a, _scale(rng), points[0], b, _scale(rng), points[1], y_scale, points[2]]
    assert_steps(op, operands)
    assert_steps(op, [x if i in (0, 3) else Held(np.asarray(x)) for i, x in enumerate(operands)])
    zero = np.zeros((), dtype)  # onnxruntime refuses a zero point that is left out, though its schema allows it
    wanted, feeds = one(op, [*operands[:2], zero, *operands[3:5], zero, operands[6], zero])
    proto, fewer = one(op, [*operands[:2], None, *operands[3:5], None, operands[6]])
    np.testing.assert_array_equal(evaluate(load(proto), fewer)["y0"], evaluate(load(wanted), feeds)["y0"])


@pytest.mark.parametrize("seed", SEEDS)
def test_activations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = _dtype(rng)
    x = _codes(rng, dtype, *_shape(rng, int(rng.integers(1, 4))))
    x_quant = [_scale(rng), _point(rng, dtype)]
    low = np.array(np.iinfo(dtype).min, dtype)
    assert_steps("QLinearSigmoid", [x, *x_quant, np.array(1 / 256, np.float32), low])
    assert_steps("QLinearLeakyRelu", [x, *x_quant, _scale(rng), _point(rng, dtype)], alpha=0.2)
    assert_steps("QLinearLeakyRelu", [x, *x_quant, _scale(rng), _point(rng, dtype)])


@pytest.mark.parametrize("seed", SEEDS)
def test_softmax(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = _dtype(rng)
    shape = _shape(rng, 3)
    axis, opset = int(rng.integers(-3, 3)), int(rng.choice([11, 13]))
    x = _codes(rng, dtype, *shape)
    low = np.array(np.iinfo(dtype).min, dtype)
    scales = [Held(_scale(rng)), Held(_point(rng, dtype)), Held(np.array(1 / 256, np.float32)), Held(low)]
    (ours,), (theirs,) = both("QLinearSoftmax", [x, *scales], axis=axis, opset=opset)
    assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_where(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = _dtype(rng)
    shape = _shape(rng, 2)
    parts = [[_codes(rng, dtype, *shape), _scale(rng), _point(rng, dtype)] for _ in range(2)]
    condition = rng.integers(0, 2, shape).astype(np.bool_)
    quant = [Held(v) for part in parts for v in part[1:]]
    operands = [
        condition,
        parts[0][0],
        *quant[:2],
        parts[1][0],
        *quant[2:],
        Held(_scale(rng)),
        Held(_point(rng, dtype)),
    ]
    assert_steps("QLinearWhere", operands)


@pytest.mark.parametrize("seed", SEEDS)
def test_concat(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = _dtype(rng)
    shape, axis = list(_shape(rng, 3)), int(rng.integers(-3, 3))
    y_quant = [Held(_scale(rng)), Held(_point(rng, dtype))]
    operands: list[Any] = [*y_quant]
    for i in range(int(rng.integers(1, 4))):
        shape[axis] = int(rng.integers(1, 6))
        quant = y_quant if i == 1 else [Held(_scale(rng)), Held(_point(rng, dtype))]
        operands += [_codes(rng, dtype, *shape), *quant]
    assert_steps("QLinearConcat", operands, axis=axis)


def test_concat_copies_what_has_the_scale_of_the_result() -> None:
    scale, zero = Held(np.array(0.3, np.float32)), Held(np.array(3, np.uint8))
    x = np.arange(6, dtype=np.uint8).reshape(2, 3)
    graph = imported("QLinearConcat", [scale, zero, x, scale, zero, x, scale, zero], axis=1)
    assert [n.op.name for n in graph.nodes if n.op.name != "constant"] == ["concat"]


@pytest.mark.parametrize("seed", SEEDS)
def test_pools(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype, last = _dtype(rng), bool(seed % 2)
    n, c = _shape(rng, 2, 6)
    spatial = tuple(int(d) for d in rng.integers(4, 9, 2))
    x = _codes(rng, dtype, *((n, *spatial, c) if last else (n, c, *spatial)))
    quant = [_scale(rng), _point(rng, dtype), _scale(rng, 0.005, 0.02), _point(rng, dtype)]
    held = [Held(v) for v in quant]
    assert_steps("QLinearGlobalAveragePool", [x, *held], channels_last=int(last))
    window: dict[str, Any] = {
        "kernel_shape": [3, 2],
        "strides": [2, 1],
        "pads": [1, 0, 1, 1],
        "count_include_pad": int(seed % 4 < 2),
    }
    assert_steps("QLinearAveragePool", [x, *held], channels_last=int(last), **window)
    assert_steps("QLinearAveragePool", [x, *held], channels_last=int(last), kernel_shape=[2, 2], auto_pad="SAME_UPPER")
    if last:
        (ours,), (theirs,) = both("NhwcMaxPool", [x], kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1])
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_windows_beyond_the_padding_are_those_of_onnx(seed: int) -> None:
    """With ceil_mode, a last window may reach beyond the padded image, and ONNX divides by the elements within it.

    onnxruntime does so in AveragePool. In QLinearAveragePool it divides by the whole window if pads count.
    """
    rng = np.random.default_rng(seed)
    dtype, counts = _dtype(rng), seed % 2
    x, pads = _codes(rng, dtype, 2, 3, 6, 7), [1, 0, 1, 1] if seed % 4 < 2 else [0] * 4
    x_quant, y_quant = [_scale(rng), _point(rng, dtype)], [_scale(rng, 0.02, 0.05), _point(rng, dtype)]
    window: dict[str, Any] = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": pads, "ceil_mode": 1}
    window["count_include_pad"] = counts
    operands = [x, *map(Held, (*x_quant, *y_quant))]
    if not counts:
        assert_steps("QLinearAveragePool", operands, **window)
        return
    wide = (x.astype(np.float32) - x_quant[1]) * x_quant[0]
    (_,), (mean,) = both("AveragePool", [wide], domain="", **window)
    limits = np.iinfo(dtype)
    wanted = np.clip(np.rint(mean / y_quant[0]) + y_quant[1], limits.min, limits.max)
    (ours,), (theirs,) = both("QLinearAveragePool", operands, **window)
    assert np.abs(ours - wanted).max() <= 1
    same = np.abs(theirs - wanted) <= 1
    assert same[:, :, :-1].all() and not same[:, :, -1].all(), "onnxruntime counts what is beyond the last row"


@pytest.mark.parametrize("seed", SEEDS)
def test_convolution_of_channels_last(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype, last = _dtype(rng), bool(seed % 2)
    x = _codes(rng, dtype, 2, 7, 6, 4) if last else _codes(rng, dtype, 2, 4, 7, 6)
    w = _weights(rng, np.int8, 6, 2, 3, 3)
    w_scale = rng.uniform(0.001, 0.01, 6).astype(np.float32) if seed % 3 else _scale(rng, 0.001, 0.01)
    w_zero = np.zeros(w_scale.shape, np.int8)
    bias = rng.integers(-3000, 3000, 6).astype(np.int32)
    constants = [_scale(rng), _point(rng, dtype), w, w_scale, w_zero, _scale(rng, 0.05, 0.1), _point(rng, dtype), bias]
    more: dict[str, Any] = {"group": 2, "strides": [2, 1], "pads": [1, 1, 1, 1], "channels_last": int(last)}
    assert_steps("QLinearConv", [x, *(Held(np.asarray(v)) for v in constants)], **more)


# products ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_qgemm(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, k, n = _shape(rng, 3, 20)
    a_type, b_type = _dtype(rng), _dtype(rng)
    if a_type is np.int8:
        b_type = np.int8  # onnxruntime's CPU kernel has no others
    turned_a, turned_b = (int(v) for v in rng.integers(0, 2, 2))
    a = _codes(rng, a_type, *((k, m) if turned_a else (m, k)))
    b = _weights(rng, b_type, *((n, k) if turned_b else (k, n)))
    each = bool(rng.integers(2))
    b_scale = rng.uniform(0.01, 0.05, n).astype(np.float32) if each else _scale(rng)
    b_zero = np.array([_point(rng, b_type) for _ in range(n)], b_type) if each else _point(rng, b_type)
    c = rng.integers(-500, 500, n).astype(np.int32)
    alpha = float(rng.choice([1.0, 0.7]))
    constants = [_scale(rng), _point(rng, a_type), b, b_scale, b_zero]
    held = [Held(np.asarray(v)) for v in constants]
    more: dict[str, Any] = {"transA": turned_a, "transB": turned_b, "alpha": alpha}
    assert_floats("QGemm", [a, *held], **more)
    assert_floats("QGemm", [a, *held, Held(c)], **more)
    assert_steps("QGemm", [a, *held, Held(c), Held(np.array(0.3, np.float32)), Held(_point(rng, a_type))], **more)
    assert_steps("QGemm", [a, *held, None, Held(np.array(0.3, np.float32)), Held(_point(rng, a_type))], **more)


@pytest.mark.parametrize("seed", range(24))
def test_matmul_integer_to_float(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = _shape(rng, int(rng.integers(0, 3)), 4)
    m, k, n = _shape(rng, 3, 20)
    a_type, b_type = _dtype(rng), _dtype(rng)
    if a_type is np.int8:
        b_type = np.int8  # onnxruntime's CPU kernel has no others
    a, b = _codes(rng, a_type, *batch, m, k), _weights(rng, b_type, k, n)
    each = bool(rng.integers(2))
    b_scale = rng.uniform(0.01, 0.05, n).astype(np.float32) if each else _scale(rng)
    b_zero = np.array([_point(rng, b_type) for _ in range(n)], b_type) if each else _point(rng, b_type)
    bias = rng.standard_normal(n).astype(np.float32)
    a_quant = [_scale(rng), _point(rng, a_type)]
    assert_floats("MatMulIntegerToFloat", [a, b, a_quant[0], b_scale])
    assert_floats("MatMulIntegerToFloat", [a, Held(b), a_quant[0], Held(b_scale), a_quant[1], Held(b_zero)])
    operands = [a, Held(b), a_quant[0], Held(b_scale), a_quant[1], Held(b_zero), Held(bias)]
    assert_floats("MatMulIntegerToFloat", operands)
    assert_floats("MatMulIntegerToFloat", [*operands[:4], None, None, Held(bias)])


@pytest.mark.parametrize("seed", SEEDS)
def test_dynamic_quantize_matmul(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = _shape(rng, int(rng.integers(0, 3)), 4)
    m, k, n = _shape(rng, 3, 20)
    a = (rng.standard_normal((*batch, m, k)) + rng.uniform(-2, 2)).astype(np.float32)
    b_type = _dtype(rng)
    b, b_scale, b_zero = _weights(rng, b_type, k, n), _scale(rng), _point(rng, b_type)
    bias = rng.standard_normal(n).astype(np.float32)
    operands = [a, Held(b), Held(b_scale), Held(b_zero), Held(bias)]
    step = float(a.max(initial=0) - a.min(initial=0)) / 255 * 128 * float(b_scale)  # one code of a, the largest of b
    for count in (3, 4, 5):
        (ours,), (theirs,) = both("DynamicQuantizeMatMul", operands[:count])
        apart = np.abs(ours - theirs)
        assert apart.max() <= 2.5 * step
        assert np.count_nonzero(apart > step / 50) <= max(2, 0.1 * apart.size)


def test_dynamic_quantize_matmul_of_zeros() -> None:
    b, scale = np.arange(6, dtype=np.uint8).reshape(3, 2), np.array(0.1, np.float32)
    bias = np.array([1, 2], np.float32)
    operands = [np.zeros((4, 3), np.float32), Held(b), Held(scale), Held(np.array(1, np.uint8)), Held(bias)]
    assert_floats("DynamicQuantizeMatMul", operands)


# weights in blocks ---------------------------------------------------------------------------------------------


def _packed(codes: Array, bits: int) -> Array:
    """Pack the last dim, the first number in the lowest bits, and fill the last byte with zeros."""
    each = 8 // bits
    width = -(-codes.shape[-1] // each) * each
    wide = np.zeros((*codes.shape[:-1], width), np.uint8)
    wide[..., : codes.shape[-1]] = codes
    parts = wide.reshape(*wide.shape[:-1], width // each, each)
    return np.bitwise_or.reduce(parts << (np.arange(each, dtype=np.uint8) * bits), axis=-1).astype(np.uint8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("seed", SEEDS)
def test_matmul_n_bits(bits: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    block = int(rng.choice([16, 32, 64, 128]))
    n, k = int(rng.integers(1, 40)), int(rng.integers(1, 200))
    if bits == 8:
        block = max(block, 32)
    blocks = -(-k // block)
    a = rng.standard_normal((*_shape(rng, int(rng.integers(1, 3))), k)).astype(np.float32)
    codes = rng.integers(0, 1 << bits, (n, blocks, block), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.1, (n, blocks)).astype(np.float32)
    points = rng.integers(0, 1 << bits, (n, blocks), dtype=np.uint8)
    bias = rng.standard_normal(n).astype(np.float32)
    given: dict[str, Any] = {"K": k, "N": n, "block_size": block, "bits": bits}
    b, flat = Held(_packed(codes, bits)), Held(scales.reshape(-1))
    zero = Held(_packed(points, bits).reshape(-1))
    assert_floats("MatMulNBits", [a, b, flat], rtol=2e-5, **given)
    assert_floats("MatMulNBits", [a, b, flat, zero], rtol=2e-5, **given)
    assert_floats("MatMulNBits", [a, b, Held(scales), Held(_packed(points, bits))], rtol=2e-5, **given)
    assert_floats("MatMulNBits", [a, b, flat, zero, None, Held(bias)], rtol=2e-5, **given)
    assert_floats("MatMulNBits", [a, b.array, flat.array, zero.array], rtol=2e-5, **given)  # known at run time only
    if bits == 4:
        floats = Held((points + rng.uniform(0, 1, points.shape)).astype(np.float32).reshape(-1))
        assert_floats("MatMulNBits", [a, b, flat, floats], rtol=2e-5, **given)


@pytest.mark.parametrize("bits", [4, 8])
def test_matmul_n_bits_of_halves(bits: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (24, 3, 32), dtype=np.uint8)
    scales = Held(rng.uniform(0.01, 0.1, 72).astype(np.float16))
    a = rng.standard_normal((5, 96)).astype(np.float16)
    given: dict[str, Any] = {"K": 96, "N": 24, "block_size": 32, "bits": bits}
    assert_floats("MatMulNBits", [a, Held(_packed(codes, bits)), scales], rtol=2e-3, **given)


def test_weights_of_four_bits_stay_small() -> None:
    b = Held(np.zeros((80, 4, 16), np.uint8))
    operands = [np.ones((2, 128), np.float32), b, Held(np.ones(320, np.float32))]
    graph = imported("MatMulNBits", operands, K=128, N=80, block_size=32)
    types = {v.type.dtype.value for v in graph.values() if v.literal is not None and v.type.size == 128 * 80}
    assert types == {"u4"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 3}, "bits=3 is not supported, only 2, 4 and 8"),
        ({"block_size": 24}, "block_size 24, not 16, 32, 64"),
        ({"N": 7}, r"b u8\[8,4,16\] has not 7 x 4 blocks of 16 bytes"),
        ({"K": 100}, r"a f32\[2,128\] does not end with K=100"),
        ({"weight_prepacked": 1}, "weight_prepacked=1"),
    ],
)
def test_weights_in_blocks_that_are_refused(given: dict[str, int], message: str) -> None:
    b = Held(np.zeros((8, 4, 16), np.uint8))
    operands = [np.ones((2, 128), np.float32), b, Held(np.ones(32, np.float32))]
    attributes: dict[str, Any] = {"K": 128, "N": 8, "block_size": 32, **given}
    with pytest.raises(ModelError, match=rf"node 'n' \(MatMulNBits\): .*{message}"):
        imported("MatMulNBits", operands, **attributes)
    with pytest.raises(ModelError, match="g_idx"):
        imported("MatMulNBits", [*operands, None, Held(np.zeros(128, np.int32))], K=128, N=8, block_size=32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("seed", range(6))
def test_gather_block_quantized(bits: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width, block = int(rng.integers(2, 20)), 16 * int(rng.integers(1, 8)), int(rng.choice([16, 32]))
    blocks = -(-width // block)
    codes = rng.integers(0, 1 << bits, (rows, width), dtype=np.uint8)
    scales = Held(rng.uniform(0.01, 0.1, (rows, blocks)).astype(np.float32))
    points = Held(_packed(rng.integers(0, 1 << bits, (rows, blocks), dtype=np.uint8), bits))
    indices = rng.integers(0, rows, _shape(rng, 2)).astype(np.int64)
    given: dict[str, Any] = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
    for operands in ([scales], [scales, points]):
        assert_floats("GatherBlockQuantized", [Held(_packed(codes, bits)), indices, *operands], **given)
