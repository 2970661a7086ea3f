"""Draw quantised layers: products of 8-bit numbers with their scales, and the rounding of their results."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from fusec.ir import DType, TensorType, Value
from fusec.ops import Cast, MatMul, Reshape, Transpose
from fusec.ops.matmul import CODES
from fusec.testing.generators.graph_builder import RandomGraph
from fusec.testing.generators.motifs.layers import epilogue
from fusec.testing.generators.operations.windows import convolve

_SCALES = (0.0123, 0.037, 0.11)  # products of two have no ties


def quantised_layer(b: RandomGraph) -> None:
    """Draw a product of quantised operands, in floats or in integers, with bias, residual, relu and rounding."""
    y = _in_fp8(b) if b.chance(20) else _in_floats(b) if b.chance(50) else _in_integers(b)
    rank = y.type.rank
    if b.chance(60):
        channels = (y.type.shape[1], *(1,) * (rank - 2)) if rank > 3 else y.type.shape[-1:]
        y = b.pointwise("add", y, b.constant(channels, DType.F32))
    if b.chance(40):
        y = b.pointwise("add", y, _dequantised(b, b.fresh(TensorType(y.type.shape, b.pick([DType.I8, DType.U8])))))
    if b.chance(50):
        y = b.pointwise("relu", y)
    if b.chance(70):
        q = _rounded(b, y)
        if b.chance(30):
            b.pointwise("relu", _dequantised(b, q))


def _number(b: RandomGraph, number: float) -> Value:
    return b.graph.constant(np.float32(number))


def _dequantised(b: RandomGraph, q: Value, zero: bool = True) -> Value:
    y = b.add(Cast(DType.F32), q)
    if zero and b.chance(30):
        y = b.pointwise("sub", y, _number(b, b.pick([-6.0, 3.0, 100.0])))
    return b.pointwise("mul", y, _number(b, b.pick(_SCALES)))


def _rounded(b: RandomGraph, y: Value) -> Value:
    """Round to i8 or u8. Zero points are even: cuDNN adds them before it rounds, where ties go to even numbers."""
    y = b.pointwise("round", b.pointwise("div", y, _number(b, b.pick([0.29, 1.7, 11.3]))))
    if b.chance(30):  # onnxruntime quantises activations to u8 by default
        y = b.pointwise("add", y, _number(b, b.pick([128.0, 0.0, 6.0, 254.0])))
        low, high = b.pick([(0.0, 255.0), (0.0, 255.0), (128.0, 255.0), (20.0, 200.0)])
        return b.add(Cast(DType.U8), b.pointwise("clip", y, min=low, max=high))
    if b.chance(30):
        y = b.pointwise("add", y, _number(b, b.pick([-6.0, 4.0, 100.0])))
    low, high = b.pick([(-128.0, 127.0), (-128.0, 127.0), (0.0, 127.0), (-100.0, 90.0)])
    return b.add(Cast(DType.I8), b.pointwise("clip", y, min=low, max=high))


def _image(b: RandomGraph) -> Value:
    return b.fresh(TensorType(b.image_shape(), DType.I8))


def _in_integers(b: RandomGraph) -> Value:
    if b.chance(60):
        sums = convolve(b, _image(b))
        scale = (sums.type.shape[1], *(1,) * (sums.type.rank - 2))
    else:
        x = _rows(b)
        sums = b.add(MatMul(), x, b.constant((x.type.shape[-1], b.pick([8, 5])), DType.I8))
        scale = sums.type.shape[-1:]
    factor = b.constant(scale, DType.F32, "positive") if b.chance(50) else _number(b, b.pick(_SCALES))
    return b.pointwise("mul", b.add(Cast(DType.F32), sums), factor)


def _in_floats(b: RandomGraph) -> Value:
    """Draw the product of floats that a model has in QDQ form."""
    if b.chance(60):
        q = _image(b)
        if b.chance(40):
            q = _rounded(b, b.fresh(TensorType(q.type.shape, DType.F32)))
        if q.type.dtype is DType.U8:
            drawn = convolve(b, b.add(Cast(DType.I8), b.pointwise("min", q, b.graph.constant(np.uint8(127)))))
        else:
            drawn = convolve(b, q)
        node = drawn.node  # drawn in integers, where nothing reads it
        assert node is not None
        return b.add(node.op, _dequantised(b, q), _dequantised(b, node.operands[1], zero=False))
    x = _rows(b)
    w = _dequantised(b, b.constant((x.type.shape[-1], b.pick([8, 5])), DType.I8), zero=False)
    return b.add(MatMul(), _dequantised(b, x), w)


def _in_fp8(b: RandomGraph) -> Value:
    """Draw a product of operands in E4M3, of sizes that tensor cores multiply and of others."""
    shape, columns = (b.pick([4, 6, 1]), b.pick([16, 16, 24])), b.pick([16, 16, 24])
    x = b.fresh(TensorType((1, *shape) if b.chance(40) else shape, DType.F8E4M3))
    w = b.add(Cast(DType.F32), b.constant((shape[1], columns), DType.F8E4M3))
    scale = b.constant((columns,), DType.F32, "positive") if b.chance(50) else _number(b, b.pick(_SCALES))
    return b.add(MatMul(), _dequantised(b, x, zero=False), b.pointwise("mul", w, scale))


def weights_alone(b: RandomGraph) -> None:
    """Draw a product of few rows with a weight that is dequantised, whole, by column or in blocks along the depth."""
    depth, columns = b.pick([64, 32]), 16
    codes, blocks = b.pick(CODES), b.pick([1, 2, 4])
    info, rng = ml_dtypes.iinfo(codes.numpy), np.random.default_rng(b.below(1 << 16))
    transposed = b.chance(50)
    shape = (columns, blocks, depth // blocks) if transposed else (blocks, depth // blocks, columns)
    small = (columns, blocks, 1) if transposed else (blocks, 1, columns)
    low, high = (max(int(info.min), -3), 4) if b.exact else (int(info.min), int(info.max) + 1)
    w = b.add(Cast(DType.F32), b.graph.constant(rng.integers(low, high, shape).astype(codes.numpy)))
    if b.chance(60):
        middle = 0 if codes in (DType.I4, DType.I8) else 1 << (codes.bits - 1)
        zero = np.float32(middle) if b.chance(50) else rng.integers(low, high, small).astype(np.float32)
        w = b.pointwise("sub", w, b.graph.constant(zero))
    w = b.pointwise("mul", w, b.constant(() if b.chance(20) else small, DType.F32, "positive"))
    w = b.add(Reshape((columns, depth) if transposed else (depth, columns)), w)
    x = b.input(TensorType((*b.pick([(1,), (2,), (1, 3), (17,)]), depth), b.dtype))
    w = b.add(Transpose((1, 0)), w) if transposed else w
    y = b.add(MatMul(), x, b.add(Cast(b.dtype), w) if b.dtype is not DType.F32 else w)
    epilogue(b, y, 2)


def _rows(b: RandomGraph) -> Value:
    x = b.fresh(TensorType((b.pick([4, 6, 1]), b.pick([16, 3, 40])), DType.I8))
    return b.add(Reshape((1, *x.type.shape)), x) if b.chance(40) else x
