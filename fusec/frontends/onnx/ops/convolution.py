"""Import Conv and ConvTranspose. A bias becomes an add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from fusec.frontends.onnx.emission.emit import Emitter, Table
from fusec.frontends.onnx.movement.window_attributes import (
    check_auto_pad,
    distribute,
    explicit_pads,
    per_dim,
    spatial_dims,
)
from fusec.ir import Value
from fusec.ops import Conv, ConvTranspose, pw
from fusec.ops.spec import require


class ConvAttributes(TypedDict, total=False):
    """Attributes of Conv, for the quantised convolutions that have the same ones."""

    auto_pad: str
    dilations: Sequence[int]
    group: int
    kernel_shape: Sequence[int]
    pads: Sequence[int]
    strides: Sequence[int]


def conv(
    g: Emitter,
    x: Value,
    w: Value,
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
    n = spatial_dims(x)
    window = _window(w, n, kernel_shape)
    strides, dilations = per_dim("strides", strides, n, 1), per_dim("dilations", dilations, n, 1)
    pads = explicit_pads(auto_pad, pads, x.type.shape[2:], window, strides, dilations)
    return _biased(g, g(Conv(tuple(strides), pads, tuple(dilations), group), x, w), b)


def conv_transpose(
    g: Emitter,
    x: Value,
    w: Value,
    b: Value | None = None,
    /,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] = (),
    group: int = 1,
    kernel_shape: Sequence[int] = (),
    output_padding: Sequence[int] = (),
    output_shape: Sequence[int] = (),
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Value:
    n = spatial_dims(x)
    window = _window(w, n, kernel_shape)
    strides, dilations = per_dim("strides", strides, n, 1), per_dim("dilations", dilations, n, 1)
    extra = per_dim("output_padding", output_padding, n, 0)
    check_auto_pad(auto_pad)
    if output_shape or auto_pad.startswith("SAME"):
        require(not any(pads), f"pads {list(pads)} where the output's shape decides them")
        if len(output_shape) == n + 2:  # some exporters list batch and channels too
            output_shape = output_shape[2:]
        wanted = per_dim("output_shape", output_shape, n, 0) if output_shape else _strided(x, strides)
        natural = [
            s * (i - 1) + o + d * (k - 1) + 1
            for i, k, s, d, o in zip(x.type.shape[2:], window, strides, dilations, extra, strict=True)
        ]
        # an output larger than the windows reach is filled with zeros at the end
        extra = tuple(o + max(0, a - b) for o, a, b in zip(extra, wanted, natural, strict=True))
        totals = [max(0, b - a) for a, b in zip(wanted, natural, strict=True)]
        pads = distribute(totals, upper=auto_pad == "SAME_UPPER")
    pads = per_dim("pads", pads, 2 * n, 0)
    op = ConvTranspose(tuple(strides), pads, tuple(dilations), extra, group)
    return _biased(g, g(op, x, w), b)


def _strided(x: Value, strides: Sequence[int]) -> tuple[int, ...]:
    return tuple(i * s for i, s in zip(x.type.shape[2:], strides, strict=True))


def _window(w: Value, n: int, kernel_shape: Sequence[int]) -> tuple[int, ...]:
    require(w.type.rank == n + 2, f"weight has rank {w.type.rank}, x rank {n + 2}")
    window = w.type.shape[2:]
    require(
        tuple(kernel_shape) in ((), window),
        f"kernel_shape {list(kernel_shape)}, but the weight is {list(w.type.shape)}",
    )
    return window


def _biased(g: Emitter, y: Value, b: Value | None) -> Value:
    if b is None:
        return y
    channels = y.type.shape[1]
    require(b.type.shape == (channels,), f"bias has shape {list(b.type.shape)}, not [{channels}]")
    return g(pw("add"), y, g.reshape(b, (1, channels, *([1] * (y.type.rank - 2)))))


TABLE: Table = {
    ("Conv", 1): conv,
    ("ConvTranspose", 1): conv_transpose,
}
