"""Import Resize and Upsample, by scales or by sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, Table, axes_of
from fusec.frontends.onnx.movement.interpolate import COORDINATES, Interpolation, interpolated
from fusec.ir import DType, TensorType, Value
from fusec.ops import Resize, pw
from fusec.ops.spec import require

# Integers are rounded towards zero after a linear resize, as in onnxruntime. A result that rounding left just below an
# integer is that integer.
ABOVE = 1 + 2.0**-16


def upsample_7(g: Emitter, x: Value, /, *, scales: Sequence[float], mode: str = "nearest") -> Value:
    return _upsample(g, x, scales, mode, down="floor")


def upsample_9(g: Emitter, x: Value, scales: Value, /, *, mode: str = "nearest") -> Value:
    return _upsample(g, x, _floats(g, scales), mode, down="floor")


def resize_10(g: Emitter, x: Value, scales: Value, /, *, mode: str = "nearest") -> Value:
    return _upsample(g, x, _floats(g, scales), mode, down="ceil")


def _upsample(g: Emitter, x: Value, scales: Sequence[float], mode: str, down: str) -> Value:
    """Resize with coordinates x / scale. Nearest rounds down, but `down` is the rounding of dims that shrink.

    Resize-10 rounds these up, as onnxruntime does.
    """
    _check_scales(x, scales)
    how = Interpolation(mode, "asymmetric", "floor")
    mixed = mode == "nearest" and down != "floor" and any(s < 1 for s in scales)
    if not mixed:
        return _resized(g, x, scales, _sizes(x, scales), how)
    shrunk = [min(s, 1.0) for s in scales]
    x = _resized(g, x, shrunk, _sizes(x, shrunk), Interpolation(mode, "asymmetric", down))
    grown = [max(s, 1.0) for s in scales]
    return _resized(g, x, grown, _sizes(x, grown), how)


def resize(
    g: Emitter,
    x: Value,
    roi: Value | None = None,  # used by tf_crop_and_resize only
    scales: Value | None = None,
    sizes: Value | None = None,
    /,
    *,
    antialias: int = 0,
    axes: Sequence[int] = (),
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,  # used by cubic only
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Value:
    how = Interpolation(
        mode,
        coordinate_transformation_mode,
        nearest_mode,
        bool(antialias),
        cubic_coeff_a,
        bool(exclude_outside),
        extrapolation_value,
    )
    dims = tuple(a % x.type.rank for a in axes) if axes_of(axes, x.type.rank) else tuple(range(x.type.rank))
    by_scale = scales is not None and scales.type.size > 0
    by_size = sizes is not None and sizes.type.size > 0
    require(by_scale != by_size, "needs either scales or sizes" + (", not both" if by_scale else ""))
    if by_scale:
        assert scales is not None
        factors = _spread(_floats(g, scales), dims, x, 1.0)
        _check_scales(x, factors)
        return _chosen(g, x, factors, _sizes(x, factors), _crop(g, roi, dims, x, how), how)
    assert sizes is not None
    wanted = g.ints(sizes, "sizes")
    require(len(wanted) == len(dims), f"{len(wanted)} sizes for {len(dims)} dims")
    lengths = [x.type.shape[d] for d in dims]
    same = all((s > 0) == (d > 0) and s >= 0 for s, d in zip(wanted, lengths, strict=True))
    require(same, f"resize {list(x.type.shape)} to {list(wanted)}")
    ratios = [s / d if d else 1.0 for s, d in zip(wanted, lengths, strict=True)]
    if keep_aspect_ratio_policy != "stretch":
        policies = {"not_larger": min, "not_smaller": max}
        require(keep_aspect_ratio_policy in policies, f"knows no keep_aspect_ratio_policy {keep_aspect_ratio_policy!r}")
        ratios = [policies[keep_aspect_ratio_policy](ratios)] * len(dims)
        wanted = [math.floor(r * x.type.shape[d] + 0.5) for r, d in zip(ratios, dims, strict=True)]
    shape = [int(s) for s in _spread(wanted, dims, x, 0)]
    shape = [new if d in dims else old for d, (new, old) in enumerate(zip(shape, x.type.shape, strict=True))]
    factors = _spread(ratios, dims, x, 1.0)
    return _chosen(g, x, factors, shape, _crop(g, roi, dims, x, how), how)


def _chosen(
    g: Emitter,
    x: Value,
    scales: Sequence[float],
    sizes: Sequence[int],
    crop: Sequence[tuple[float, float]],
    how: Interpolation,
) -> Value:
    """Use the IR's resize op if it has this interpolation, else weighted sums along each dim."""
    known = how.mode in ("nearest", "linear") and how.coordinates in COORDINATES[:5] and not how.antialias
    if known or not x.type.size:
        return _resized(g, x, scales, sizes, how)
    require(all(s >= 1 for s in sizes), f"resize {list(x.type.shape)} to {list(sizes)}")
    return interpolated(g, x, sizes, scales, crop, how)


def _crop(
    g: Emitter, roi: Value | None, dims: Sequence[int], x: Value, how: Interpolation
) -> list[tuple[float, float]]:
    """Return start and end of each dim, as fractions of it."""
    crop = [(0.0, 1.0)] * x.type.rank
    if how.coordinates != "tf_crop_and_resize":
        return crop
    require(roi is not None and roi.type.shape == (2 * len(dims),), "tf_crop_and_resize needs 2 numbers a dim as roi")
    assert roi is not None
    numbers = [float(v) for v in g.array(roi, "roi")]
    for i, dim in enumerate(dims):
        crop[dim] = (numbers[i], numbers[i + len(dims)])
    return crop


def _spread(values: Sequence[float], dims: Sequence[int], x: Value, default: float) -> list[float]:
    """Return one value for each dim of x: those in `values` for `dims`, else the default."""
    require(len(values) == len(dims), f"{len(values)} scales for {len(dims)} dims")
    spread = [default] * x.type.rank
    for value, dim in zip(values, dims, strict=True):
        spread[dim] = value
    return spread


def _floats(g: Emitter, scales: Value) -> list[float]:
    require(scales.type.dtype.is_float and scales.type.rank == 1, f"scales must be a list of floats, not {scales.type}")
    return [float(s) for s in g.array(scales, "scales")]


def _check_scales(x: Value, scales: Sequence[float]) -> None:
    require(len(scales) == x.type.rank, f"{len(scales)} scales for {x.type.rank} dims")
    require(all(0 < s < math.inf for s in scales), f"scales must be positive: {list(scales)}")


def _sizes(x: Value, scales: Sequence[float]) -> list[int]:
    """Multiply sizes by scales, and round down. The product is in f32, because there 0.7 * 10 is exactly 7."""
    with np.errstate(over="ignore"):
        products = [float(np.float32(d) * np.float32(s)) for d, s in zip(x.type.shape, scales, strict=True)]
    require(all(map(math.isfinite, products)), f"scales {list(scales)} of {list(x.type.shape)}")
    return [math.floor(p) for p in products]


def _resized(g: Emitter, x: Value, scales: Sequence[float], sizes: Sequence[int], how: Interpolation) -> Value:
    if tuple(sizes) == x.type.shape and all(s == 1.0 for s in scales):
        return x
    if not x.type.size:  # no image, as where nothing was detected
        return g.full(TensorType(tuple(sizes), x.type.dtype), np.zeros((), x.type.dtype.numpy))
    op = Resize(tuple(sizes), tuple(scales), how.mode, how.coordinates, how.rounding)
    if how.mode == "nearest" or x.type.dtype.is_float:
        return g(op, x)
    require(x.type.dtype in (DType.U8, DType.I8), f"linear resize of {x.type.dtype.value}")
    y = g(op, g.cast(x, DType.F32))
    return g.cast(g(pw("mul"), y, g.scalar(ABOVE, y)), x.type.dtype)


TABLE: Table = {
    ("Upsample", 7): upsample_7,
    ("Upsample", 9): upsample_9,
    ("Resize", 10): resize_10,
    ("Resize", 11): resize,
}
