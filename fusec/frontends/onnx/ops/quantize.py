"""Import quantised ops: scales and zero points become pointwise ops, and integer products are exact, in i32."""

from __future__ import annotations

from typing import Unpack

import ml_dtypes
import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, Table
from fusec.frontends.onnx.model_file.tensors import dtype_of
from fusec.frontends.onnx.movement.gather_scatter import spread
from fusec.frontends.onnx.ops.convolution import ConvAttributes, conv
from fusec.frontends.onnx.ops.matmul import matmul
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


def _fills_blocks(scale: Value, x: Value, axis: int, block: int) -> bool:
    """Tell if x has whole blocks along a dim, each with a scale."""
    shape = x.type.shape
    return scale.type.shape == (*shape[:axis], shape[axis] // block, *shape[axis + 1 :]) and shape[axis] % block == 0


def _in_blocks(g: Emitter, v: Value, axis: int, block: int) -> Value:
    """Split a dim into blocks and the elements of a block."""
    shape = v.type.shape
    return g.reshape(v, (*shape[:axis], shape[axis] // block, block, *shape[axis + 1 :]))


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
    if zero is not None and zero.literal is not None and not zero.literal.array.any():
        zero = None
    given, along = (scale, zero), normalize_axis(axis, x.type.rank) if block_size else 0
    if block_size and _fills_blocks(scale, x, along, block_size):
        # broadcast, because scales that are repeated would be as large as x, so that a weight would not be folded
        small = (None if v is None else _in_blocks(g, v, along, 1) for v in given)
        y = g.reshape(_scaled(g, _in_blocks(g, x, along, block_size), *small), x.type.shape)
    else:
        y = _scaled(g, x, *(None if v is None else _along(g, v, x, axis, block_size) for v in given))
    return g.cast(y, dtype_of(output_dtype) if output_dtype else scale.type.dtype)


def _scaled(g: Emitter, x: Value, scale: Value | None, zero: Value | None) -> Value:
    """Return the f32 numbers of integers, by a scale and a zero point that broadcast with them."""
    assert scale is not None
    wide = DType.F64 if x.type.dtype is DType.I32 and zero is not None else DType.F32
    y = g.cast(x, wide)
    y = y if zero is None else g(pw("sub"), y, g.cast(zero, wide))
    return g(pw("mul"), g.cast(y, DType.F32), g.cast(scale, DType.F32))


def _signed(g: Emitter, v: Value, zero: Value | None) -> tuple[Value, Value | None]:
    """Return signed integers and their zero point in i32, both less 128 where they are unsigned; None for no zero."""
    shift = 0 if v.type.dtype is DType.I8 else 128
    if shift:
        v = g.cast(g(pw("add"), g.cast(v, DType.F32), g.constant(np.float32(-shift))), DType.I8)
    wide = g.constant(np.int32(0)) if zero is None else g.cast(zero, DType.I32)
    wide = g(pw("sub"), wide, g.constant(np.int32(shift))) if shift else wide
    return v, None if wide.literal is not None and not wide.literal.array.any() else wide


def matmul_integer(
    g: Emitter, a: Value, b: Value, a_zero: Value | None = None, b_zero: Value | None = None, /
) -> Value:
    """Import MatMulInteger: the sum of (a - y)(b - z) is that of a b, less y times b's sums and z times (a - y)'s."""
    (left, y), (right, z) = _signed(g, a, a_zero), _signed(g, b, b_zero)
    left = g.reshape(left, (1, *left.type.shape)) if a.type.rank == 1 else left
    right = g.reshape(right, (*right.type.shape, 1)) if b.type.rank == 1 else right
    product = g(MatMul(), left, right)
    if y is not None:  # one number, one for each row, or of more dims
        y = g.reshape(y, (y.type.size, 1) if y.type.rank == 1 and y.type.size > 1 else y.type.shape)
        columns = g(Reduce("sum", (right.type.rank - 2,), True), g.cast(right, DType.I32))
        product = g(pw("sub"), product, g(pw("mul"), columns, y))
    if z is not None:
        wide = g.cast(left, DType.I32)
        wide = wide if y is None else g(pw("sub"), wide, y)
        rows = g(Reduce("sum", (left.type.rank - 1,), True), wide)
        product = g(pw("sub"), product, g(pw("mul"), rows, z))
    shape = list(product.type.shape)
    shape = shape if b.type.rank > 1 else shape[:-1]
    return g.reshape(product, shape if a.type.rank > 1 else [*shape[:-2], *shape[len(shape) - (b.type.rank > 1) :]])


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
    """Import QLinearMatMul in Q/DQ form, because `run_in_integers` knows that form."""
    left = _matrices(g, a, a_scale, a_zero, -2 if a.type.rank > 1 else -1)
    y = matmul(g, left, _matrices(g, b, b_scale, b_zero, -1))
    rows = -2 if y.type.rank > 1 else -1
    scale, zero = (_per_row(g, g.cast(v, DType.F32), y, rows) for v in (y_scale, y_zero))
    return rounded(g, g(pw("div"), y, scale), zero, y_zero.type.dtype)


def _matrices(g: Emitter, x: Value, scale: Value, zero: Value, axis: int) -> Value:
    """Dequantise matrices by one scale, by one per index of `axis`, or by scales that broadcast."""
    scale, zero = (_per_row(g, g.cast(v, DType.F32), x, axis) for v in (scale, zero))
    return g(pw("mul"), g(pw("sub"), g.cast(x, DType.F32), zero), scale)


def _per_row(g: Emitter, v: Value, x: Value, axis: int) -> Value:
    return v if v.type.rank > 1 else _along(g, v, x, axis, 0)


def conv_integer(
    g: Emitter,
    x: Value,
    w: Value,
    x_zero: Value | None = None,
    w_zero: Value | None = None,
    /,
    **attributes: Unpack[ConvAttributes],
) -> Value:
    """Import ConvInteger: the sum of (x - y)(w - z) is that of x w, less y times the sum of w over the window's pixels.

    Those are fewer at the borders, where the window covers pads. Filters of z are subtracted in the same way.
    """
    require(x_zero is None or x_zero.type.size == 1, "the zero point of x is one number")
    (image, y), (filters, z) = _signed(g, x, x_zero), _signed(g, w, w_zero)
    pixels = g.full(TensorType((1, *image.type.shape[1:]), DType.I8), np.ones((), np.int8))

    def product(of: Value) -> Value:
        sums = conv(g, image, of, **attributes)
        return sums if y is None else g(pw("sub"), sums, g(pw("mul"), conv(g, pixels, of, **attributes), y))

    y = None if y is None else g.reshape(y, ())
    if z is None:
        return product(filters)
    whole = g.reshape(z, () if z.type.size == 1 else (z.type.size, *(1,) * (w.type.rank - 1)))
    centred = _centred(g, w, w_zero)
    if centred is not None:
        return product(centred)
    return g(pw("sub"), product(filters), product(spread(g, g.cast(whole, DType.I8), w.type.shape)))


def _centred(g: Emitter, w: Value, zero: Value | None) -> Value | None:
    """Return constant filters less their zero points; None if 8 bits do not hold them."""
    if w.literal is None or zero is None or zero.literal is None:
        return None
    offset = zero.literal.array.astype(np.int16)
    less = w.literal.array - offset.reshape(-1, *(1,) * (w.type.rank - 1))
    return g.constant(less.astype(np.int8)) if np.array_equal(less.astype(np.int8), less) else None


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
    """Import QLinearConv in Q/DQ form, because `run_in_integers` knows that form."""
    bias = None if b is None else dequantize(g, b, product_scale(g, x_scale, w_scale), axis=0)
    image, filters = dequantize(g, x, x_scale, x_zero), dequantize(g, w, w_scale, w_zero, axis=0)
    return quantize(g, conv(g, image, filters, bias, **attributes), y_scale, y_zero)


def product_scale(g: Emitter, one: Value, several: Value) -> Value:
    """Return the scale of integer sums and biases: a number times one number, or one for each filter or column."""
    return g(pw("mul"), g.reshape(one, ()), several)


TABLE: Table = {
    ("QuantizeLinear", 10): quantize,
    ("DequantizeLinear", 10): dequantize,
    ("MatMulInteger", 10): matmul_integer,
    ("QLinearMatMul", 10): qlinear_matmul,
    ("ConvInteger", 10): conv_integer,
    ("QLinearConv", 10): qlinear_conv,
}
