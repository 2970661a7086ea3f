"""Import quantised arithmetic, activations and pools: dequantise, compute in f32, quantise.

onnxruntime computes these with tables or with scales multiplied beforehand. So a result can differ by one step where
the exact value is half-way between two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.frontends.onnx.movement.indexing import concat
from fusec.frontends.onnx.ops.convolution import ConvAttributes
from fusec.frontends.onnx.ops.pooling import average_pool, max_pool
from fusec.frontends.onnx.ops.quantize import dequantize, qlinear_conv, quantize
from fusec.ir import Value
from fusec.ops import Reduce, Softmax, Transpose, pw
from fusec.ops.spec import normalize_axis, require


def _zero(g: Emitter, x: Value, zero: Value | None) -> Value:
    """Return the zero point; one that is not given is 0, of the type of x."""
    return g.constant(np.zeros((), x.type.dtype.numpy)) if zero is None else zero


def _binary(name: str) -> OpFunction:
    def emit(
        g: Emitter,
        a: Value,
        a_scale: Value,
        a_zero: Value | None,
        b: Value,
        b_scale: Value,
        b_zero: Value | None,
        y_scale: Value,
        y_zero: Value | None = None,
        /,
    ) -> Value:
        y = g(pw(name), dequantize(g, a, a_scale, a_zero), dequantize(g, b, b_scale, b_zero))
        return quantize(g, y, y_scale, _zero(g, a, y_zero))

    return emit


def _through(
    g: Emitter, compute: Callable[[Value], Value], x: Value, scales: Sequence[Value | None], like: Value
) -> Value:
    """Apply `compute` to the number that x stands for. `scales`: scale and zero point of x, then of the result."""
    x_scale, x_zero, y_scale, y_zero = scales
    assert x_scale is not None
    assert y_scale is not None
    return quantize(g, compute(dequantize(g, x, x_scale, x_zero)), y_scale, _zero(g, like, y_zero))


def qlinear_sigmoid(
    g: Emitter, x: Value, x_scale: Value, x_zero: Value | None, y_scale: Value, y_zero: Value | None = None, /
) -> Value:
    return _through(g, lambda v: g(pw("sigmoid"), v), x, (x_scale, x_zero, y_scale, y_zero), x)


def qlinear_leaky_relu(
    g: Emitter,
    x: Value,
    x_scale: Value,
    x_zero: Value | None,
    y_scale: Value,
    y_zero: Value | None = None,
    /,
    *,
    alpha: float = 0.01,
) -> Value:
    return _through(g, lambda v: g(pw("leaky_relu", alpha=alpha), v), x, (x_scale, x_zero, y_scale, y_zero), x)


def qlinear_softmax(
    g: Emitter,
    x: Value,
    x_scale: Value,
    x_zero: Value | None,
    y_scale: Value,
    y_zero: Value,
    /,
    *,
    opset: int,
    axis: int = -1,
) -> Value:
    """Import QLinearSoftmax. Before opset 13, a softmax is over all dims from `axis` on."""
    axis, rank = normalize_axis(axis, x.type.rank), x.type.rank

    def softmax(v: Value) -> Value:
        if opset >= 13 or axis == rank - 1:
            return g(Softmax(axis), v)
        lead = x.type.shape[:axis]
        return g.reshape(
            g(Softmax(axis), g.reshape(v, (*lead, x.type.size // max(1, int(np.prod(lead)))))), x.type.shape
        )

    return _through(g, softmax, x, (x_scale, x_zero, y_scale, y_zero), x)


def qlinear_where(
    g: Emitter,
    condition: Value,
    x: Value,
    x_scale: Value,
    x_zero: Value,
    y: Value,
    y_scale: Value,
    y_zero: Value,
    z_scale: Value,
    z_zero: Value,
    /,
) -> Value:
    chosen = g(pw("where"), condition, dequantize(g, x, x_scale, x_zero), dequantize(g, y, y_scale, y_zero))
    return quantize(g, chosen, z_scale, z_zero)


def qlinear_concat(g: Emitter, y_scale: Value, y_zero: Value, /, *inputs: Value, axis: int) -> Value:
    """Import QLinearConcat, whose further operands are a tensor, its scale and its zero point, one after the other.

    Operands with the scale and zero point of the result are copied: each number quantises to itself.
    """
    require(len(inputs) % 3 == 0 and bool(inputs), f"takes a scale and zero point a tensor, not {len(inputs)} operands")
    parts: list[Value] = []
    for x, scale, zero in zip(inputs[::3], inputs[1::3], inputs[2::3], strict=True):
        same = _equal(scale, y_scale) and _equal(zero, y_zero)
        parts.append(x if same else quantize(g, dequantize(g, x, scale, zero), y_scale, y_zero))
    return concat(g, *parts, axis=axis)


def _equal(a: Value, b: Value) -> bool:
    """Tell if two scalars are known to be equal."""
    if a is b:
        return True
    one, two = a.literal, b.literal
    return one is not None and two is not None and one.type.size == two.type.size == 1 and one.array == two.array


def _images(g: Emitter, x: Value, channels_last: int) -> Value:
    """Transpose an image whose channels are last to [N, C, …]."""
    rank = x.type.rank
    return g(Transpose((0, rank - 1, *range(1, rank - 1))), x) if channels_last else x


def _restored(g: Emitter, y: Value, channels_last: int) -> Value:
    """Transpose an image [N, C, …] back to channels last."""
    return g(Transpose((0, *range(2, y.type.rank), 1)), y) if channels_last else y


def qlinear_global_average_pool(
    g: Emitter, x: Value, x_scale: Value, x_zero: Value, y_scale: Value, y_zero: Value, /, *, channels_last: int = 0
) -> Value:
    require(x.type.rank >= 3, f"needs spatial dims, x has shape {list(x.type.shape)}")
    axes = tuple(range(1, x.type.rank - 1)) if channels_last else tuple(range(2, x.type.rank))
    return _through(g, lambda v: g(Reduce("mean", axes), v), x, (x_scale, x_zero, y_scale, y_zero), x)


def qlinear_average_pool(
    g: Emitter,
    x: Value,
    x_scale: Value,
    x_zero: Value | None,
    y_scale: Value,
    y_zero: Value | None = None,
    /,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    channels_last: int = 0,
    count_include_pad: int = 0,
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Value:
    def pool(v: Value) -> Value:
        return average_pool(
            g,
            v,
            kernel_shape=kernel_shape,
            auto_pad=auto_pad,
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            pads=pads,
            strides=strides,
        )

    image = _images(g, x, channels_last)
    return _restored(g, _through(g, pool, image, (x_scale, x_zero, y_scale, y_zero), x), channels_last)


def qlinear_conv_of_images(
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
    channels_last: int = 0,
    dilations: Sequence[int] = (),
    group: int = 1,
    kernel_shape: Sequence[int] = (),
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Value:
    """Import QLinearConv, whose images may have their channels last; the weights are [M, C, …] in both forms."""
    attributes: ConvAttributes = {
        "auto_pad": auto_pad,
        "dilations": dilations,
        "group": group,
        "kernel_shape": kernel_shape,
        "pads": pads,
        "strides": strides,
    }
    image = _images(g, x, channels_last)
    y = qlinear_conv(g, image, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, b, **attributes)
    return _restored(g, y, channels_last)


def nhwc_max_pool(
    g: Emitter,
    x: Value,
    /,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] = (),
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Value:
    y = max_pool(
        g,
        _images(g, x, 1),
        kernel_shape=kernel_shape,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        dilations=dilations,
        pads=pads,
        strides=strides,
    )
    assert isinstance(y, Value)
    return _restored(g, y, 1)


TABLE: Mapping[str, OpFunction] = {
    "QLinearAdd": _binary("add"),
    "QLinearMul": _binary("mul"),
    "QLinearSigmoid": qlinear_sigmoid,
    "QLinearLeakyRelu": qlinear_leaky_relu,
    "QLinearSoftmax": qlinear_softmax,
    "QLinearWhere": qlinear_where,
    "QLinearConcat": qlinear_concat,
    "QLinearGlobalAveragePool": qlinear_global_average_pool,
    "QLinearAveragePool": qlinear_average_pool,
    "QLinearConv": qlinear_conv_of_images,
    "NhwcMaxPool": nhwc_max_pool,
}
