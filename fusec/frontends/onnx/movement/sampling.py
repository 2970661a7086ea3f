"""Import ops that read images between their pixels (GridSample, RoiAlign, DeformConv), and Col2Im."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fusec.frontends.onnx.emit import Emitter, Table
from fusec.frontends.onnx.limits import require_constant
from fusec.frontends.onnx.window_attributes import per_dim, spatial_dims
from fusec.ir import Array, DType, TensorType, Value
from fusec.ops import Gather, GridSample, MatMul, Reduce, Scatter, Transpose, pw
from fusec.ops.spec import require

_MAX_BINS = 4096
Taps = Sequence[tuple[Value, Value]]  # coordinates along one dim with their weights


@dataclass(frozen=True)
class _Images:
    """Pixels of a batch of images, as rows.

    rows: [images * pixels, C].
    base: index of the first row of each image; broadcasts with the coordinates.
    shape: spatial dims of an image.
    """

    rows: Value
    base: Value
    shape: Sequence[int]


@dataclass(frozen=True)
class _Bins:
    """Attributes of RoiAlign.

    counts: number of bins in height and width.
    samples: number of samples along each dim of a bin.
    scale, shift: a region is multiplied by `scale`, then reduced by `shift`, to get pixel coordinates.
    """

    mode: str
    counts: tuple[int, int]
    samples: int
    scale: float
    shift: float


def _limited(g: Emitter, at: Value, n: int) -> Value:
    """Clip coordinates to 0..n-1, and replace NaN by 0, so that they are valid indices."""
    at = g(pw("where"), g(pw("is_nan"), at), g.scalar(0, at), at)
    return g(pw("clip", min=0.0, max=float(n - 1)), at)


def _inside(g: Emitter, at: Value, n: int) -> Value:
    return g(pw("logical_and"), g(pw("cmp_ge"), at, g.scalar(0, at)), g(pw("cmp_le"), at, g.scalar(n - 1, at)))


def _pixels(g: Emitter, images: _Images, at: Sequence[Value], zeros: bool) -> Value:
    """Read pixels at integer coordinates (as floats, one tensor for each dim).

    zeros: pixels out of range are 0; else they are those of the border.
    """
    place, within = images.base, None
    strides = TensorType(tuple(images.shape), DType.BOOL).strides
    for coordinate, n, stride in zip(at, images.shape, strides, strict=True):
        index = g.cast(_limited(g, coordinate, n), DType.I64)
        place = g(pw("add"), place, g(pw("mul"), index, g.scalar(stride, index)))
        inside = _inside(g, coordinate, n)
        within = inside if within is None else g(pw("logical_and"), within, inside)
    read = g(Gather(0), images.rows, place)
    if not zeros or within is None:
        return read
    return g(pw("where"), g.reshape(within, (*within.type.shape, 1)), read, g.scalar(0, read))


def _rows(g: Emitter, x: Value) -> Value:
    """Reshape [N, C, spatial…] to [N*pixels, C]."""
    n, c, *spatial = x.type.shape
    flat = g.reshape(x, (n, c, math.prod(spatial)))
    return g.reshape(g(Transpose((0, 2, 1)), flat), (n * math.prod(spatial), c))


def _linear_taps(g: Emitter, at: Value) -> Taps:
    """Return the two nearest pixels along a dim, with their weights."""
    low = g(pw("floor"), at)
    weight = g(pw("sub"), at, low)
    one = g.scalar(1, at)
    return [(low, g(pw("sub"), one, weight)), (g(pw("add"), low, one), weight)]


def _interpolated(g: Emitter, images: _Images, taps: Sequence[Taps], zeros: bool, combine: str = "add") -> Value:
    """Add up (or take the maximum of) pixel times weights, over all combinations of one tap for each dim.

    zeros: pixels out of range are 0; else they are those of the border.
    """
    total: Value | None = None
    for chosen in itertools.product(*taps):
        weight = chosen[0][1]
        for _, more in chosen[1:]:
            weight = g(pw("mul"), weight, more)
        pixel = _pixels(g, images, [at for at, _ in chosen], zeros)
        part = g(pw("mul"), pixel, g.cast(g.reshape(weight, (*weight.type.shape, 1)), pixel.type.dtype))
        total = part if total is None else g(pw(combine), total, part)
    assert total is not None
    return total


def grid_sample_16(
    g: Emitter,
    x: Value,
    grid: Value,
    /,
    *,
    align_corners: int = 0,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
) -> Value:
    modes = {"bilinear": "linear", "bicubic": "cubic", "nearest": "nearest"}
    require(mode in modes, f"knows no mode {mode!r}")
    return grid_sample(g, x, grid, align_corners=align_corners, mode=modes[mode], padding_mode=padding_mode)


def grid_sample(
    g: Emitter,
    x: Value,
    grid: Value,
    /,
    *,
    align_corners: int = 0,
    mode: str = "linear",
    padding_mode: str = "zeros",
) -> Value:
    """Import GridSample. The last dim of the grid has coordinates from -1 to 1, the last spatial dim first."""
    n = spatial_dims(x)
    batch = x.type.shape[0]
    require(mode in ("linear", "nearest", "cubic"), f"knows no mode {mode!r}")
    require(padding_mode in ("zeros", "border", "reflection"), f"knows no padding_mode {padding_mode!r}")
    require(grid.type.rank == n + 2 and grid.type.shape[-1] == n, f"grid {grid.type} for x {x.type}")
    require(grid.type.shape[0] == batch and x.type.size > 0, f"grid {grid.type} for x {x.type}")
    return g(GridSample(mode, padding_mode, "centres" if align_corners else "edges"), x, grid)


def roi_align_10(
    g: Emitter,
    x: Value,
    rois: Value,
    batches: Value,
    /,
    *,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Value:
    bins = _Bins(mode, (output_height, output_width), sampling_ratio, spatial_scale, 0.0)
    return _roi_align(g, x, rois, batches, bins)


def roi_align(
    g: Emitter,
    x: Value,
    rois: Value,
    batches: Value,
    /,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Value:
    known = coordinate_transformation_mode in ("half_pixel", "output_half_pixel")
    require(known, f"knows no coordinate_transformation_mode {coordinate_transformation_mode!r}")
    shift = 0.5 if coordinate_transformation_mode == "half_pixel" else 0.0
    bins = _Bins(mode, (output_height, output_width), sampling_ratio, spatial_scale, shift)
    return _roi_align(g, x, rois, batches, bins)


def _roi_align(g: Emitter, x: Value, rois: Value, batches: Value, bins: _Bins) -> Value:
    """Import RoiAlign: the average or the maximum of the samples in each bin.

    Raises VerifyError: when sampling_ratio is 0, because the number of samples would depend on the regions.
    """
    mode, (tall, broad), s, shift = bins.mode, bins.counts, bins.samples, bins.shift
    require(mode in ("avg", "max"), f"knows no mode {mode!r}")
    require(x.type.rank == 4 and rois.type.rank == 2 and rois.type.shape[1] == 4, f"rois {rois.type} for {x.type}")
    require(s > 0, "sampling_ratio=0 is not supported: the number of samples would depend on the rois")
    count = rois.type.shape[0]
    require(min(tall, broad) >= 1 and max(tall, broad, s) <= _MAX_BINS, f"{tall}x{broad} bins of {s}x{s} samples")
    require(batches.type.shape == (count,), f"batch_indices {batches.type} for {count} rois")
    scaled = g(pw("sub"), g(pw("mul"), rois, g.scalar(bins.scale, rois)), g.scalar(shift, rois))
    corners = [g.reshape(g.window(scaled, 1, i, 1), (count, 1)) for i in range(4)]  # x1, y1, x2, y2
    at: list[Value] = []
    for start, end, number in ((corners[1], corners[3], tall), (corners[0], corners[2], broad)):
        length = g(pw("sub"), end, start)
        if not shift:
            length = g(pw("max"), length, g.scalar(1, length))
        # the samples of all bins along this dim, evenly spaced
        fractions = (np.arange(number * s) + 0.5) / (number * s)
        steps = g.constant(fractions.astype(rois.type.dtype.numpy).reshape(1, -1))
        at.append(g(pw("add"), start, g(pw("mul"), length, steps)))
    rows_at = g.reshape(at[0], (count, tall * s, 1))
    columns_at = g.reshape(at[1], (count, 1, broad * s))
    height, width = x.type.shape[2:]
    base = g(pw("mul"), g.cast(batches, DType.I64), g.constant(np.array(height * width, np.int64)))
    near = [_at_most_one_outside(g, c, n) for c, n in ((rows_at, height), (columns_at, width))]
    taps = [_linear_taps(g, _limited(g, c, n)) for c, n in ((rows_at, height), (columns_at, width))]
    # the standard takes the maximum of each pixel times its weight, not of the interpolated samples
    combine = "add" if mode == "avg" else "max"
    images = _Images(_rows(g, x), g.reshape(base, (count, 1, 1)), (height, width))
    read = _interpolated(g, images, taps, False, combine)
    inside = g(pw("logical_and"), near[0], near[1])
    read = g(pw("where"), g.reshape(inside, (*inside.type.shape, 1)), read, g.scalar(0, read))
    channels = x.type.shape[1]
    split = g.reshape(read, (count, tall, s, broad, s, channels))
    pooled = g(Reduce("mean" if mode == "avg" else "max", (2, 4), False), split)
    return g(Transpose((0, 3, 1, 2)), pooled)


def _at_most_one_outside(g: Emitter, at: Value, n: int) -> Value:
    """Tell if coordinates are at most one pixel outside: such samples read the border, others are 0."""
    return g(pw("logical_and"), g(pw("cmp_ge"), at, g.scalar(-1, at)), g(pw("cmp_le"), at, g.scalar(n, at)))


def deform_conv(
    g: Emitter,
    x: Value,
    w: Value,
    offset: Value,
    b: Value | None = None,
    mask: Value | None = None,
    /,
    *,
    dilations: Sequence[int] = (),
    group: int = 1,
    kernel_shape: Sequence[int] = (),
    offset_group: int = 1,
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Value:
    """Import DeformConv: read each element of each window at its own offset, then multiply by the weights."""
    require(x.type.rank == 4 and w.type.rank == 4, "takes 2 spatial dims")
    batch, channels, *spatial = x.type.shape
    filters, window = w.type.shape[0], w.type.shape[2:]
    require(tuple(kernel_shape) in ((), window), f"kernel_shape {list(kernel_shape)}, the weight is {w.type}")
    steps, spread = per_dim("strides", strides, 2, 1), per_dim("dilations", dilations, 2, 1)
    edges = per_dim("pads", pads, 4, 0)
    taps = math.prod(window)
    require(all(v >= 1 for v in (*steps, *spread)), "strides and dilations must be positive")
    out = [
        (n + edges[d] + edges[d + 2] - spread[d] * (window[d] - 1) - 1) // steps[d] + 1 for d, n in enumerate(spatial)
    ]
    require(group >= 1 and offset_group >= 1, f"group is {group} and offset_group {offset_group}")
    require(channels % offset_group == 0 and channels % group == 0 and filters % group == 0, "groups do not divide")
    require(w.type.shape[1] * group == channels, f"weight {w.type} for {channels} channels in {group} groups")
    wanted = (batch, offset_group * taps * 2, *out)
    require(offset.type.shape == wanted, f"offset of shape {list(offset.type.shape)}, not {list(wanted)}")
    moved = g.reshape(offset, (batch, offset_group, *window, 2, *out))
    at: list[Value] = []
    for d in range(2):
        shape = [1, 1, *(window[i] if i == d else 1 for i in range(2)), *(out[i] if i == d else 1 for i in range(2))]

        def own(index: Array, d: int = d) -> Array:
            """Return the coordinate without offset of tap `index // out` of window `index % out`."""
            return index // out[d] * spread[d] + index % out[d] * steps[d] - edges[d]

        part = g.reshape(g.window(moved, 4, d, 1), (batch, offset_group, *window, *out))
        at.append(g(pw("add"), part, g.indexed(shape, own, x.type.dtype)))
    per = channels // offset_group
    grouped = g.reshape(x, (batch * offset_group, per, *spatial))
    pixels = math.prod(spatial)
    first = g.indexed((batch, offset_group, 1, 1, 1, 1), lambda i: i * pixels)
    read = _interpolated(g, _Images(_rows(g, grouped), first, spatial), [_linear_taps(g, a) for a in at], True)
    if mask is not None:  # [batch, offset_group, window…, out…, per]
        weight = g.reshape(mask, (batch, offset_group, *window, *out, 1))
        read = g(pw("mul"), read, weight)
    columns = g(Transpose((0, 1, 6, 2, 3, 4, 5)), read)
    columns = g.reshape(columns, (batch, group, channels // group * taps, math.prod(out)))
    weights = g.reshape(w, (1, group, filters // group, channels // group * taps))
    y = g.reshape(g(MatMul(), weights, columns), (batch, filters, *out))
    return y if b is None else g(pw("add"), y, g.reshape(b, (1, filters, 1, 1)))


def col2im(
    g: Emitter,
    x: Value,
    image_shape: Value,
    block_shape: Value,
    /,
    *,
    dilations: Sequence[int] = (),
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Value:
    """Import Col2Im: add each column's block to the image at the position of its window."""
    image, block = g.ints(image_shape, "image_shape"), g.ints(block_shape, "block_shape")
    n = len(image)
    require(len(block) == n and x.type.rank == 3, f"blocks {list(block)} of an image {list(image)}, x {x.type}")
    steps, spread = per_dim("strides", strides, n, 1), per_dim("dilations", dilations, n, 1)
    edges = per_dim("pads", pads, 2 * n, 0)
    taps = math.prod(block)
    require(all(v >= 1 for v in (*block, *image, *steps, *spread)), "sizes, strides and dilations must be positive")
    counts = [
        (i + edges[d] + edges[d + n] - spread[d] * (block[d] - 1) - 1) // steps[d] + 1 for d, i in enumerate(image)
    ]
    batch, rows, columns = x.type.shape
    require(rows % taps == 0 and columns == math.prod(counts), f"x {x.type} for blocks {list(block)} of {list(image)}")
    require_constant(TensorType((taps * columns,), DType.I64))
    place, inside = np.zeros((1,) * (2 * n), np.int64), np.ones((1,) * (2 * n), bool)
    for d in range(n):
        tap = (np.arange(block[d]) * spread[d]).reshape([-1 if i == d else 1 for i in range(2 * n)])
        start = (np.arange(counts[d]) * steps[d] - edges[d]).reshape([-1 if i == n + d else 1 for i in range(2 * n)])
        at = tap + start
        inside = inside & (at >= 0) & (at < image[d])
        place = place * image[d] + np.clip(at, 0, image[d] - 1)
    size = math.prod(image)
    targets = np.where(inside, place, size).reshape(-1)  # elements in the padding go to an extra row
    channels = rows // taps
    flat = g.reshape(x, (batch * channels, taps * columns))
    zeros = g.full(TensorType((size + 1, batch * channels), x.type.dtype), np.zeros((), x.type.dtype.numpy))
    added = g(Scatter("add"), zeros, g.constant(targets), g(Transpose((1, 0)), flat))
    return g.reshape(g(Transpose((1, 0)), g.window(added, 0, 0, size)), (batch, channels, *image))


TABLE: Table = {
    ("GridSample", 16): grid_sample_16,
    ("GridSample", 20): grid_sample,
    ("RoiAlign", 10): roi_align_10,
    ("RoiAlign", 16): roi_align,
    ("DeformConv", 19): deform_conv,
    ("Col2Im", 18): col2im,
}
