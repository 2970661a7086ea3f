"""Import quantised ops: scales and zero points become pointwise ops, and integer products are exact, in i32 or f64."""

from __future__ import annotations

from typing import Unpack

import ml_dtypes
import numpy as np

from fusec.frontends.onnx.emit import Emitter, Table
from fusec.frontends.onnx.movement.gather_scatter import spread
from fusec.frontends.onnx.ops.convolution import ConvAttributes, conv
from fusec.frontends.onnx.ops.matmul import matmul
from fusec.frontends.onnx.tensors import dtype_of
from fusec.ir import DType, TensorType, Value
from fusec.ops import Cast, MatMul, Reduce, pw
from fusec.ops.spec import normalize_axis, require


def _along(g: Emitter, v: Value, x: Value, axis: int, block: int) -> Value:
    """Reshape a scale or zero point so that it broadcasts with x: one number, one per index of `axis`, or per block.

    block: number of elements along `axis` that share an entry of v; 0 for no blocks.
    """
    if v.type.size == 1 and not block:
        return g.reshape(v, ())
    axis = normalize_axis(axis, x.type.rank)
    if block:
        require(v.type.rank == x.type.rank, f"scales {v.type} in blocks of x {x.type}")
        shape = v.type.shape
        wide = g.reshape(v, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
        wide = spread(g, wide, (*shape[: axis + 1], block, *shape[axis + 1 :]))
        wide = g.reshape(wide, (*shape[:axis], shape[axis] * block, *shape[axis + 1 :]))
        require(wide.type.shape[axis] >= x.type.shape[axis], f"blocks of {block} do not cover {x.type}")
        return g.window(wide, axis, 0, x.type.shape[axis])
    require(v.type.shape == (x.type.shape[axis],), f"a scale of shape {list(v.type.shape)} for axis {axis} of {x.type}")
    return g.reshape(v, [x.type.shape[axis] if i == axis else 1 for i in range(x.type.rank)])


def quantize(
    g: Emitter,
    x: Value,
    scale: Value,
    zero: Value | None = None,
    /,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Value:
    to = zero.type.dtype if zero is not None else dtype_of(output_dtype) if output_dtype else DType.U8
    require(not output_dtype or dtype_of(output_dtype) is to, "output_dtype and the zero point differ")
    computed = dtype_of(precision) if precision else DType.F32
    quotient = g(pw("div"), g.cast(x, computed), _along(g, g.cast(scale, computed), x, axis, block_size))
    quotient = g.cast(quotient, DType.F32)
    shift = None if zero is None else _along(g, g.cast(zero, DType.F32), x, axis, block_size)
    return rounded(g, quotient, shift, to, bool(saturate))


def rounded(g: Emitter, x: Value, zero: Value | None, to: DType, saturate: bool = True) -> Value:
    """Round x to the nearest integer (or 8-bit float), add the zero point, and clip to the range of type `to`."""
    if to.is_narrow and not to.is_narrow_int:
        y = x if zero is None else g(pw("add"), x, zero)
        return narrowed(g, y, to, saturate)
    require(to.is_int or to.is_narrow_int, f"cannot quantise to {to.value}")
    y = g(pw("round"), x)
    if zero is not None:
        y = g(pw("add"), y, zero)
    limits = ml_dtypes.iinfo(to.numpy)
    return g(Cast(to), g(pw("clip", min=float(limits.min), max=float(limits.max)), y))


def narrowed(g: Emitter, x: Value, to: DType, saturate: bool) -> Value:
    """Cast a float to 8 bits or fewer. Numbers out of range become the largest value if `saturate`."""
    if saturate and to.saturates:
        largest = float(ml_dtypes.finfo(to.numpy).max)
        x = g(pw("clip", min=-largest, max=largest), x)
    return g(Cast(to), x)


def dequantize(
    g: Emitter,
    x: Value,
    scale: Value,
    zero: Value | None = None,
    /,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Value:
    require(zero is None or zero.type.dtype is x.type.dtype, "the zero point differs in dtype from x")
    wide = DType.F64 if x.type.dtype is DType.I32 else DType.F32
    y = g.cast(x, wide)
    if zero is not None:
        y = g(pw("sub"), y, _along(g, g.cast(zero, wide), x, axis, block_size))
    y = g(pw("mul"), g.cast(y, DType.F32), _along(g, g.cast(scale, DType.F32), x, axis, block_size))
    return g.cast(y, dtype_of(output_dtype) if output_dtype else scale.type.dtype)


def _shifted(g: Emitter, x: Value, zero: Value | None, axis: int) -> Value:
    """Subtract the zero point from x, in f64, where products of 8-bit integers and their sums are exact."""
    wide = g.cast(x, DType.F64)
    if zero is None:
        return wide
    wide_zero = g.cast(zero, DType.F64)
    if zero.type.rank > 1:  # one for each row of each matrix
        return g(pw("sub"), wide, wide_zero)
    return g(pw("sub"), wide, _along(g, wide_zero, x, axis, 0))


def _signed(g: Emitter, v: Value, zero: Value | None) -> tuple[Value, Value | None]:
    """Return signed integers and their zero point in i32, both less 128 where they are unsigned; None for no zero."""
    shift = 0 if v.type.dtype is DType.I8 else 128
    if shift:
        v = g.cast(g(pw("sub"), g.cast(v, DType.I32), g.constant(np.int32(shift))), DType.I8)
    wide = g.constant(np.int32(0)) if zero is None else g.cast(zero, DType.I32)
    wide = g(pw("sub"), wide, g.constant(np.int32(shift))) if shift else wide
    return v, None if wide.literal is not None and not wide.literal.array.any() else wide


def _is_number(zero: Value | None) -> bool:
    return zero is None or zero.type.size == 1


def matmul_integer(
    g: Emitter, a: Value, b: Value, a_zero: Value | None = None, b_zero: Value | None = None, /
) -> Value:
    """Import MatMulInteger: the sum of (a - y)(b - z) is that of a b, less y times b's sums and z times (a - y)'s."""
    if a.type.rank < 2 or b.type.rank < 2 or not (_is_number(a_zero) and _is_number(b_zero)):
        left = _shifted(g, a, a_zero, -2 if a.type.rank > 1 else -1)
        return g.cast(matmul(g, left, _shifted(g, b, b_zero, -1)), DType.I32)
    (left, y), (right, z) = _signed(g, a, a_zero), _signed(g, b, b_zero)
    product = g(MatMul(), left, right)
    if y is not None:
        columns = g(Reduce("sum", (right.type.rank - 2,), True), g.cast(right, DType.I32))
        product = g(pw("sub"), product, g(pw("mul"), columns, g.reshape(y, ())))
    if z is not None:
        wide = g.cast(left, DType.I32)
        wide = wide if y is None else g(pw("sub"), wide, g.reshape(y, ()))
        rows = g(Reduce("sum", (left.type.rank - 1,), True), wide)
        product = g(pw("sub"), product, g(pw("mul"), rows, g.reshape(z, ())))
    return product


def qlinear_matmul(
    g: Emitter,
    a: Value,
    a_scale: Value,
    a_zero: Value,
    b: Value,
    b_scale: Value,
    b_zero: Value,
    y_scale: Value,
    y_zero: Value,
    /,
) -> Value:
    left = _shifted(g, a, a_zero, -2 if a.type.rank > 1 else -1)
    product = g.cast(matmul(g, left, _shifted(g, b, b_zero, -1)), DType.F32)
    columns = g.cast(b_scale, DType.F32)
    if b_scale.type.rank <= 1:  # one number, or one per column: the product may have more dims than b
        columns = g.reshape(_along(g, columns, b, -1, 0), b_scale.type.shape if b_scale.type.size > 1 else ())
    scaled = g(pw("mul"), g(pw("mul"), product, _row_scale(g, a_scale, a)), columns)
    scaled = g(pw("div"), scaled, _row_scale(g, y_scale, product))
    return rounded(g, scaled, _row_scale(g, y_zero, product), y_zero.type.dtype)


def _row_scale(g: Emitter, v: Value, x: Value) -> Value:
    wide = g.cast(v, DType.F32)
    return wide if v.type.rank > 1 else _along(g, wide, x, -2 if x.type.rank > 1 else -1, 0)


def conv_integer(
    g: Emitter,
    x: Value,
    w: Value,
    x_zero: Value | None = None,
    w_zero: Value | None = None,
    /,
    **attributes: Unpack[ConvAttributes],
) -> Value:
    """Import ConvInteger: the sum of (x - y) w is that of x w, less y times the sum of w over the window's pixels.

    Those are fewer at the borders, where the window covers pads.
    """
    filters, z = _signed(g, w, w_zero)
    if z is not None or not _is_number(x_zero):
        return g.cast(conv(g, _shifted(g, x, x_zero, 1), _shifted(g, w, w_zero, 0), **attributes), DType.I32)
    image, y = _signed(g, x, x_zero)
    product = conv(g, image, filters, **attributes)
    if y is None:
        return product
    pixels = g.full(TensorType((1, *image.type.shape[1:]), DType.I8), np.ones((), np.int8))
    covered = conv(g, pixels, filters, **attributes)
    return g(pw("sub"), product, g(pw("mul"), covered, g.reshape(y, ())))


def qlinear_conv(
    g: Emitter,
    x: Value,
    x_scale: Value,
    x_zero: Value,
    w: Value,
    w_scale: Value,
    w_zero: Value,
    y_scale: Value,
    y_zero: Value,
    b: Value | None = None,
    /,
    **attributes: Unpack[ConvAttributes],
) -> Value:
    bias = None if b is None else g.cast(b, DType.F64)
    y = conv(g, _shifted(g, x, x_zero, 1), _shifted(g, w, w_zero, 0), bias, **attributes)
    scale = g(pw("mul"), g.cast(x_scale, DType.F32), g.cast(w_scale, DType.F32))
    scale = _along(g, g(pw("div"), scale, g.cast(y_scale, DType.F32)), y, 1, 0)
    scaled = g(pw("mul"), g.cast(y, DType.F32), scale)
    return rounded(g, scaled, _along(g, g.cast(y_zero, DType.F32), y, 1, 0), y_zero.type.dtype)


TABLE: Table = {
    ("QuantizeLinear", 10): quantize,
    ("DequantizeLinear", 10): dequantize,
    ("MatMulInteger", 10): matmul_integer,
    ("QLinearMatMul", 10): qlinear_matmul,
    ("ConvInteger", 10): conv_integer,
    ("QLinearConv", 10): qlinear_conv,
}
