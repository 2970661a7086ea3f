"""Import pools. A global pool becomes a reduction over the spatial dims."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, Table
from fusec.frontends.onnx.model_file.limits import require_constant
from fusec.frontends.onnx.movement.window_attributes import WindowAttributes, per_dim, spatial_dims
from fusec.ir import DType, TensorType, Value
from fusec.ops import AvgPool, Conv, Gather, MaxPool, Pad, Reduce, Scatter, pw
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
    storage_order: int = 0,
    strides: Sequence[int] = (),
) -> Value | tuple[Value, ...]:
    """Import MaxPool. Its second result has the index of each maximum in x flattened (column-major if requested)."""
    attributes = WindowAttributes(kernel_shape, strides, dilations, pads, auto_pad)
    op = MaxPool(*attributes.resolved(x), bool(ceil_mode))
    y = g(op, x)
    return y if g.outputs == 1 else (y, _places(g, op, x, y, storage_order))


def _places(g: Emitter, op: MaxPool, x: Value, y: Value, storage_order: int) -> Value:
    n, spatial = x.type.rank - 2, x.type.shape[2:]
    size = math.prod(spatial)
    # the gather of the windows has an index for each element of each window
    require_constant(TensorType((*op.window, *y.type.shape[2:]), DType.I64), "the places of the maxima,")
    require_constant(TensorType(op.padded(spatial), DType.I64), "the places of the maxima,")
    at = np.arange(size, dtype=np.int64).reshape(1, 1, *spatial)
    windows = op.windows(np, at, size)  # [1, 1, window…, count…], `size` where there is padding
    taps = math.prod(windows.shape[2 : 2 + n])
    taken = windows.reshape(taps, -1)
    flat = g.reshape(x, (*x.type.shape[:2], size))
    read = g(Gather(2), flat, g.constant(np.minimum(taken, size - 1)))
    best = g.reshape(y, (*y.type.shape[:2], 1, math.prod(y.type.shape[2:])))
    found = g(pw("cmp_eq"), read, best)
    if x.type.dtype.is_float:  # the maximum of a NaN is NaN, which equals nothing
        found = g(pw("logical_or"), found, g(pw("cmp_neq"), read, read))
    found = g(pw("logical_and"), found, g.constant(taken < size))
    first = g(Reduce("min", (2,), False), g(pw("where"), found, g.constant(taken), g.constant(np.array(size))))
    if storage_order:
        order = np.arange(size, dtype=np.int64).reshape(spatial[::-1]).transpose(tuple(reversed(range(n)))).reshape(-1)
        first = g(Gather(0), g.constant(np.append(order, 0)), first)
    images = g.indexed((*x.type.shape[:2], 1), lambda i: i * size)
    return g.reshape(g(pw("add"), first, images), y.type.shape)


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
    window = WindowAttributes(kernel_shape, strides, dilations, pads, auto_pad).resolved(x)
    return g(AvgPool(*window, bool(ceil_mode), count_include_pad=bool(count_include_pad)), x)


def _over_space(g: Emitter, kind: str, x: Value) -> Value:
    require(x.type.rank >= 3, f"needs spatial dims, x has shape {list(x.type.shape)}")
    return g(Reduce(kind, tuple(range(2, x.type.rank))), x)


def lp_pool(
    g: Emitter,
    x: Value,
    /,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] = (),
    p: int = 2,
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Value:
    """Import LpPool: the p-th root of the sum of |x|^p over each window, by a depthwise convolution with ones."""
    require(p >= 1, f"p is {p}")
    window = WindowAttributes(kernel_shape, strides, dilations, pads, auto_pad).resolved(x)
    shape, steps, padding, spread = window
    n, channels = len(shape), x.type.shape[1]
    (pooled,) = MaxPool(*window, bool(ceil_mode)).infer(x.type)
    counts = pooled.shape[2:]
    need = [(c - 1) * s + d * (k - 1) + 1 for c, s, d, k in zip(counts, steps, spread, shape, strict=True)]
    ends = [max(e, m - i - b) for e, m, i, b in zip(padding[n:], need, x.type.shape[2:], padding, strict=False)]
    powers = g(pw("pow"), g(pw("abs"), x), g.scalar(p, x))
    ones = g.full(TensorType((channels, 1, *shape), x.type.dtype), np.ones((), x.type.dtype.numpy))
    total = g(Conv(steps, (*padding[:n], *ends), spread, channels), powers, ones)
    return g(pw("pow"), total, g.scalar(1 / p, x))


def max_unpool(
    g: Emitter,
    x: Value,
    places: Value,
    shape: Value | None = None,
    /,
    *,
    kernel_shape: Sequence[int],
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Value:
    """Import MaxUnpool: write each element to the index of its maximum, and 0 elsewhere."""
    n = spatial_dims(x)
    steps, padding = per_dim("strides", strides, n, 1), per_dim("pads", pads, 2 * n, 0)
    require(len(kernel_shape) == n, f"kernel_shape needs {n} entries, not {len(kernel_shape)}")
    require(places.type.shape == x.type.shape, f"indices {places.type} for x {x.type}")
    natural = [
        (i - 1) * s + k - b - e
        for i, s, k, b, e in zip(x.type.shape[2:], steps, kernel_shape, padding[:n], padding[n:], strict=True)
    ]
    result = (*x.type.shape[:2], *natural)
    wanted = result if shape is None else g.ints(shape, "output_shape")
    require(len(wanted) == len(result), f"output_shape {list(wanted)} for {len(result)} dims")
    at = g.cast(g.reshape(places, (places.type.size,)), DType.I64)
    zeros = g.full(TensorType((math.prod(result),), x.type.dtype), np.zeros((), x.type.dtype.numpy))
    y = g.reshape(g(Scatter(), zeros, at, g.reshape(x, (x.type.size,))), result)
    # indices are for the natural shape; a larger output_shape is padded at the end
    more = tuple(w - r for w, r in zip(wanted, result, strict=True))
    require(all(m >= 0 for m in more), f"output_shape {list(wanted)} is smaller than {list(result)}")
    return g(Pad((0,) * len(more) + more), y) if any(more) else y


def global_average_pool(g: Emitter, x: Value, /) -> Value:
    return _over_space(g, "mean", x)


def global_max_pool(g: Emitter, x: Value, /) -> Value:
    return _over_space(g, "max", x)


def global_lp_pool(g: Emitter, x: Value, /, *, p: int = 2) -> Value:
    require(p >= 1, f"p is {p}")
    if p <= 2:
        return _over_space(g, f"l{p}", x)
    powers = g(pw("pow"), g(pw("abs"), x), g.scalar(p, x))
    return g(pw("pow"), _over_space(g, "sum", powers), g.scalar(1 / p, x))


TABLE: Table = {
    ("MaxPool", 1): max_pool,
    ("LpPool", 2): lp_pool,
    ("MaxUnpool", 9): max_unpool,
    ("AveragePool", 7): average_pool,
    ("GlobalAveragePool", 1): global_average_pool,
    ("GlobalMaxPool", 1): global_max_pool,
    ("GlobalLpPool", 2): global_lp_pool,
}
