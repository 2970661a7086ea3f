"""What the pools mean; a global pool is a reduction over the spatial dims."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.frontends.onnx.emit import Emitter, Table
from fusec.frontends.onnx.windows import explicit_pads, per_dim, spatial_dims
from fusec.ir import Value
from fusec.ops import AvgPool, MaxPool, Reduce
from fusec.ops.spec import require


def max_pool(
    g: Emitter,
    x: Value,
    /,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] = (),
    pads: Sequence[int] = (),
    storage_order: int = 0,  # about the second output only
    strides: Sequence[int] = (),
) -> Value:
    return g(MaxPool(*_window(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)), x)


def average_pool(
    g: Emitter,
    x: Value,
    /,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Sequence[int] = (),
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Value:
    window = _window(x, kernel_shape, auto_pad, ceil_mode, dilations, pads, strides)
    return g(AvgPool(*window, count_include_pad=bool(count_include_pad)), x)


def _window(
    x: Value,
    kernel_shape: Sequence[int],
    auto_pad: str,
    ceil_mode: int,
    dilations: Sequence[int],
    pads: Sequence[int],
    strides: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]:
    n = spatial_dims(x)
    require(len(kernel_shape) == n, f"kernel_shape needs {n} entries, not {len(kernel_shape)}")
    strides, dilations = per_dim("strides", strides, n, 1), per_dim("dilations", dilations, n, 1)
    pads = explicit_pads(auto_pad, pads, x.type.shape[2:], kernel_shape, strides, dilations)
    return tuple(kernel_shape), tuple(strides), pads, tuple(dilations), bool(ceil_mode)


def _over_space(g: Emitter, kind: str, x: Value) -> Value:
    require(x.type.rank >= 3, f"needs spatial dims, x has shape {list(x.type.shape)}")
    return g(Reduce(kind, tuple(range(2, x.type.rank))), x)


def global_average_pool(g: Emitter, x: Value, /) -> Value:
    return _over_space(g, "mean", x)


def global_max_pool(g: Emitter, x: Value, /) -> Value:
    return _over_space(g, "max", x)


def global_lp_pool(g: Emitter, x: Value, /, *, p: int = 2) -> Value:
    require(p in (1, 2), f"p={p} is not supported, only 1 and 2")
    return _over_space(g, f"l{p}", x)


TABLE: Table = {
    ("MaxPool", 1): max_pool,
    ("AveragePool", 7): average_pool,
    ("GlobalAveragePool", 1): global_average_pool,
    ("GlobalMaxPool", 1): global_max_pool,
    ("GlobalLpPool", 2): global_lp_pool,
}
