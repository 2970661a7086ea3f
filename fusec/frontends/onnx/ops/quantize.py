"""Import quantised ops: scales and zero points become pointwise ops, and integer products are exact in f64."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from fusec.frontends.onnx.emit import Emitter, Table
from fusec.frontends.onnx.movement.gather_scatter import spread
from fusec.frontends.onnx.ops.convolution import conv
from fusec.frontends.onnx.ops.matmul import matmul
from fusec.frontends.onnx.tensors import dtype_of
from fusec.ir import DType, Value
from fusec.ops import Cast, pw
from fusec.ops.spec import normalize_axis, require


def limits(dtype: DType) -> tuple[int, int]:
    """Return the smallest and the largest value of an integer type."""
    info = ml_dtypes.iinfo(dtype.numpy) if dtype.is_narrow else np.iinfo(dtype.numpy)
    return int(info.min), int(info.max)


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


def quantize_10(g: Emitter, x: Value, scale: Value, zero: Value | None = None, /) -> Value:
    return quantize(g, x, scale, zero)


def quantize_13(g: Emitter, x: Value, scale: Value, zero: Value | None = None, /, *, axis: int = 1) -> Value:
    return quantize(g, x, scale, zero, axis=axis)


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
    low, high = limits(to)
    return g(Cast(to), g(pw("clip", min=float(low), max=float(high)), y))


def narrowed(g: Emitter, x: Value, to: DType, saturate: bool) -> Value:
    """Cast a float to 8 bits or fewer. Numbers out of range become the largest value if `saturate`."""
    if saturate and to.saturates:
        largest = float(ml_dtypes.finfo(to.numpy).max)
        x = g(pw("clip", min=-largest, max=largest), x)
    return g(Cast(to), x)


def dequantize_10(g: Emitter, x: Value, scale: Value, zero: Value | None = None, /) -> Value:
    return dequantize(g, x, scale, zero)


def dequantize_13(g: Emitter, x: Value, scale: Value, zero: Value | None = None, /, *, axis: int = 1) -> Value:
    return dequantize(g, x, scale, zero, axis=axis)


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


def matmul_integer(
    g: Emitter, a: Value, b: Value, a_zero: Value | None = None, b_zero: Value | None = None, /
) -> Value:
    left = _shifted(g, a, a_zero, -2 if a.type.rank > 1 else -1)
    return g.cast(matmul(g, left, _shifted(g, b, b_zero, -1)), DType.I32)


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
    rows = _row_scale(g, a_scale, a)
    columns = _along(g, g.cast(b_scale, DType.F32), b, -1, 0) if b_scale.type.rank <= 1 else g.cast(b_scale, DType.F32)
    if columns.type.rank == b.type.rank and b_scale.type.rank <= 1 and columns.type.size > 1:
        columns = g.reshape(columns, (columns.type.size,))
    scaled = g(pw("mul"), g(pw("mul"), product, rows), columns)
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
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] = (),
    group: int = 1,
    kernel_shape: Sequence[int] = (),
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Value:
    y = conv(
        g,
        _shifted(g, x, x_zero, 1),
        _shifted(g, w, w_zero, 0),
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return g.cast(y, DType.I32)


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
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] = (),
    group: int = 1,
    kernel_shape: Sequence[int] = (),
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Value:
    y = conv(
        g,
        _shifted(g, x, x_zero, 1),
        _shifted(g, w, w_zero, 0),
        None if b is None else g.cast(b, DType.F64),
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    scale = g(pw("mul"), g.cast(x_scale, DType.F32), g.cast(w_scale, DType.F32))
    scale = _along(g, g(pw("div"), scale, g.cast(y_scale, DType.F32)), y, 1, 0)
    scaled = g(pw("mul"), g.cast(y, DType.F32), scale)
    return rounded(g, scaled, _along(g, g.cast(y_zero, DType.F32), y, 1, 0), y_zero.type.dtype)


TABLE: Table = {
    ("QuantizeLinear", 10): quantize_10,
    ("QuantizeLinear", 13): quantize_13,
    ("QuantizeLinear", 19): quantize,
    ("DequantizeLinear", 10): dequantize_10,
    ("DequantizeLinear", 13): dequantize_13,
    ("DequantizeLinear", 21): dequantize,
    ("MatMulInteger", 10): matmul_integer,
    ("QLinearMatMul", 10): qlinear_matmul,
    ("ConvInteger", 10): conv_integer,
    ("QLinearConv", 10): qlinear_conv,
}
