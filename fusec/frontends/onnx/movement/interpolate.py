"""Import resizes that the IR's op lacks (cubic, antialiased, cropped), as weighted sums of windows, dim by dim."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter
from fusec.frontends.onnx.model_file.limits import require_constant
from fusec.ir import DType, TensorType, Value
from fusec.ops import Gather, Reduce, pw
from fusec.ops.shape import on_ties
from fusec.ops.spec import require
from fusec.system.dataclass import dataclass

Weights = np.ndarray[Any, np.dtype[np.float64]]
Places = np.ndarray[Any, np.dtype[np.int64]]
COORDINATES = (
    *("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"),
    *("tf_half_pixel_for_nn", "tf_crop_and_resize"),
)
ROUNDINGS: dict[str, Callable[[float], float]] = {
    "floor": math.floor,
    "ceil": math.ceil,
    "round_prefer_floor": lambda x: math.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: math.floor(x + 0.5),
}


@dataclass(frozen=True)
class Interpolation:
    """Interpolation attributes of ONNX's Resize."""

    mode: str
    coordinates: str
    rounding: str
    antialias: bool = False
    cubic_a: float = -0.75
    exclude_outside: bool = False
    fill: float = 0.0


def interpolated(
    g: Emitter,
    x: Value,
    sizes: Sequence[int],
    scales: Sequence[float],
    crop: Sequence[tuple[float, float]],
    how: Interpolation,
) -> Value:
    """Resize x dim by dim. `crop`: start and end of each dim as fractions of it, for tf_crop_and_resize."""
    require(how.coordinates in COORDINATES, f"knows no coordinate_transformation_mode {how.coordinates!r}")
    require(how.rounding in ROUNDINGS, f"knows no nearest_mode {how.rounding!r}")
    require(how.mode in ("nearest", "linear", "cubic"), f"knows no mode {how.mode!r}")
    require(how.mode == "nearest" or x.type.dtype.is_float, f"{how.mode} of {x.type.dtype.value} is not supported")
    own = x.type.dtype
    if how.mode != "nearest" and own.itemsize == 2:
        x = g.cast(x, DType.F32)  # rounded once, after the last dim
    outside: list[np.ndarray[Any, np.dtype[np.bool_]]] = []
    shape = x.type.shape
    for dim, (n, count, scale) in enumerate(zip(shape, sizes, scales, strict=True)):
        weights = 1 if how.mode == "nearest" else n  # for each coordinate; coordinates are a list of Python numbers
        require_constant(TensorType((count, max(weights, 16)), DType.F64), f"the weights that resize dim {dim},")
        at = on_ties(np, np.array(_coordinates(n, count, scale, crop[dim], how.coordinates))).tolist()
        beyond = np.array([how.coordinates == "tf_crop_and_resize" and not 0 <= c <= n - 1 for c in at])
        outside.append(beyond.reshape([-1 if d == dim else 1 for d in range(len(shape))]))
        if at == [float(i) for i in range(n)] and (scale >= 1 or not how.antialias):
            continue
        x = _along(g, x, dim, at, scale, how)
    x = g.cast(x, own)
    if not any(o.any() for o in outside):
        return x
    require_constant(TensorType(tuple(sizes), DType.BOOL), "the mask of elements outside the image,")
    mask = np.zeros(sizes, bool)
    for part in outside:
        mask |= part
    return g(pw("where"), g.constant(mask), g.scalar(how.fill, x), x)


def _coordinates(n: int, count: int, scale: float, crop: tuple[float, float], kind: str) -> list[float]:
    """Compute the input coordinate of each output index."""
    whole = range(count)
    if kind == "asymmetric":
        return [i / scale for i in whole]
    if kind == "align_corners":
        return [i * (n - 1) / (count - 1) if count > 1 else 0.0 for i in whole]
    if kind == "tf_half_pixel_for_nn":
        return [(i + 0.5) / scale for i in whole]
    if kind == "tf_crop_and_resize":
        start, end = crop
        if count == 1:
            return [0.5 * (start + end) * (n - 1)]
        return [start * (n - 1) + i * (end - start) * (n - 1) / (count - 1) for i in whole]
    if kind == "pytorch_half_pixel" and count == 1:
        return [0.0]
    shift = n / 2 * (1 - count / (scale * n)) if kind == "half_pixel_symmetric" else 0.0
    return [shift + (i + 0.5) / scale - 0.5 for i in whole]


def _along(g: Emitter, x: Value, dim: int, at: Sequence[float], scale: float, how: Interpolation) -> Value:
    n = x.type.shape[dim]
    if how.mode == "nearest":
        picked = [min(max(int(ROUNDINGS[how.rounding](c)), 0), n - 1) for c in at]
        return g(Gather(dim), x, g.constant(np.array(picked, np.int64)))
    windows = [_window(c, n, min(scale, 1.0) if how.antialias else 1.0, how) for c in at]
    taps = max(len(places) for places, _ in windows)
    # a shorter window repeats its first index with weight 0: any other element could be NaN, and 0 * NaN is NaN
    indices = np.array([np.append(p, [p[0]] * (taps - len(p))) for p, _ in windows], np.int64)
    weights = np.array([np.append(w, [0.0] * (taps - len(w))) for _, w in windows])
    shape = (*weights.shape, *[1] * (x.type.rank - dim - 1))
    read = g(Gather(dim), x, g.constant(indices))  # [..., output, tap, ...]
    weighed = g(pw("mul"), read, g.constant(weights.reshape(shape).astype(x.type.dtype.numpy)))
    return g(Reduce("sum", (dim + 1,), False), weighed)


def _window(at: float, n: int, scale: float, how: Interpolation) -> tuple[Places, Weights]:
    """Return indices and weights of the input elements for one coordinate. A `scale` below 1 widens the filter."""
    reach = (1.0 if how.mode == "linear" else 2.0) / scale
    places = np.arange(math.floor(at - reach) + 1, math.floor(at + reach) + 1)
    distance = np.abs(places - at) * scale
    weights = np.clip(1 - distance, 0, None) if how.mode == "linear" else _cubic(distance, how.cubic_a)
    if how.exclude_outside:
        weights = np.where((places >= 0) & (places < n), weights, 0.0)
    if how.exclude_outside or scale < 1:
        weights = weights / weights.sum()
    return np.clip(places, 0, n - 1), weights


def _cubic(d: Weights, a: float) -> Weights:
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))
