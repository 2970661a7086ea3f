"""Differentiate ops that read images between their pixels."""

from __future__ import annotations

import itertools
import math

import numpy as np

from fusec.builder import Tensor
from fusec.gradients.core import BackwardStep, Rule, by_formula
from fusec.ops import DeformConv, Gather, GridSample, RoiAlign, RoiPool
from fusec.ops.sampling import cubic

Tap = tuple[Tensor, Tensor]  # coordinates along one dim, and their weights


def _grid_sample(step: BackwardStep, x: Tensor, grid: Tensor) -> Tensor:
    """Express the op by a gather of pixels for each tap."""
    op: GridSample = step.op
    b, n, sizes = step.b, x.rank - 2, x.shape[2:]
    pixels = math.prod(sizes)
    order = (0, *range(2, x.rank), 1)
    rows = x.transpose(order).reshape(x.shape[0] * pixels, x.shape[1])
    first = b.constant(np.arange(x.shape[0]).reshape(-1, *[1] * n) * pixels, "i64")
    taps = [_taps(op, grid[..., n - 1 - d], size) for d, size in enumerate(sizes)]
    total: Tensor | None = None
    for chosen in itertools.product(*taps):
        place, inside, weight = first, None, None
        for d, ((at, part), size) in enumerate(zip(chosen, sizes, strict=True)):
            place = place + _limited(at, size).astype("i64") * math.prod(sizes[d + 1 :])
            within = (at >= 0.0).pointwise("logical_and", at <= float(size - 1))
            inside = within if inside is None else inside.pointwise("logical_and", within)
            weight = part if weight is None else weight * part
        assert inside is not None and weight is not None
        pixel = b.apply(Gather(0), rows, place)
        if op.padding == "zeros":
            pixel = b.where(inside[..., None], pixel, 0.0)
        part = pixel * weight.astype(x.dtype)[..., None]
        total = part if total is None else total + part
    assert total is not None
    return total.transpose((0, n + 1, *range(1, n + 1)))


def _taps(op: GridSample, at: Tensor, size: int) -> list[Tap]:
    if op.coordinates == "centres":
        at = (at + 1.0) * ((size - 1) / 2)
    elif op.coordinates == "edges":
        at = ((at + 1.0) * float(size) - 1.0) * 0.5
    if op.mode == "nearest":
        return [(_padded(op, _whole(at.pointwise("round")), size), at * 0.0 + 1.0)]
    if op.mode == "linear":
        at = _padded(op, at, size)
        low = _whole(at.pointwise("floor"))
        return [(low, 1.0 - (at - low)), (low + 1.0, at - low)]
    low = _whole(at.pointwise("floor"))
    return [(_padded(op, low + float(i), size), cubic(i, at - low)) for i in (-1, 0, 1, 2)]


def _whole(at: Tensor) -> Tensor:
    """Convert whole coordinates to integers and back, because no gradient passes through integers."""
    return at.astype("i64").astype(at.dtype)


def _padded(op: GridSample, at: Tensor, size: int) -> Tensor:
    if op.padding == "reflection":
        low, span = op.range[0], size - 1 + op.range[1] - op.range[0]
        if span == 0:
            return at * 0.0
        rest = (at - low).pointwise("abs").pointwise("mod", 2 * span)
        at = (span - (rest - span).pointwise("abs")) + low
    return at if op.padding == "zeros" else _limited(at, size)


def _limited(at: Tensor, size: int) -> Tensor:
    b = at.builder
    known = b.where(at.pointwise("is_nan"), 0.0, at)
    return known.pointwise("clip", min=0.0, max=float(size - 1))


def _deform_conv(step: BackwardStep, x: Tensor, w: Tensor, offset: Tensor, mask: Tensor | None = None) -> Tensor:
    """Express the op by a grid_sample of all elements of all windows, and a product with the filters."""
    op: DeformConv = step.op
    b, (batch, channels, *image), (filters, of_group, *window) = step.b, x.shape, w.shape
    taps, out, images = math.prod(window), offset.shape[2:], batch * op.offset_groups
    moves = offset.reshape(images, taps, 2, *out)
    tap, places = np.indices(window).reshape(2, taps), np.indices(out)
    along: list[Tensor] = []
    for d in (1, 0):  # a grid has the last dim first
        start = places[d] * op.strides[d] - op.pads[d] + tap[d].reshape(taps, 1, 1) * op.dilations[d]
        along.append((moves[:, :, d] + b.constant(start, x.dtype)).reshape(images, taps * out[0], out[1], 1))
    grid = b.concat(along, -1)
    read = b.apply(
        GridSample("linear", "zeros", "pixels"), x.reshape(images, channels // op.offset_groups, *image), grid
    )
    if mask is not None:
        read = read * mask.reshape(images, 1, taps * out[0], out[1])
    read = read.reshape(batch, op.groups, of_group * taps, math.prod(out))
    return (w.reshape(1, op.groups, filters // op.groups, of_group * taps) @ read).reshape(batch, filters, *out)


def _roi_align(step: BackwardStep, x: Tensor, rois: Tensor, batches: Tensor) -> Tensor:
    """Express the op by a gather of four pixels for each sample."""
    op: RoiAlign = step.op
    b, (_, channels, *sizes), s = step.b, x.shape, op.samples
    if not s:
        raise b.error("a gradient of roi_align whose number of samples depends on the regions: give samples")
    rois = rois * op.scale - (0.5 if op.half_pixel else 0.0)
    first = batches.astype("i64").reshape(-1, 1, 1) * math.prod(sizes)
    rows = x.transpose((0, 2, 3, 1)).reshape(x.shape[0] * math.prod(sizes), channels)
    inside: list[Tensor] = []
    taps: list[list[Tap]] = []
    for d, (size, number) in enumerate(zip(sizes, op.bins, strict=True)):
        start, end = rois[:, 1 - d : 2 - d], rois[:, 3 - d : 4 - d]
        length = end - start if op.half_pixel else (end - start).pointwise("max", 1.0)
        at = start + length * b.constant((np.arange(number * s) + 0.5) / (number * s), rois.dtype)
        shape = (-1, number * s, 1) if d == 0 else (-1, 1, number * s)
        within = (at >= -1.0).pointwise("logical_and", at <= float(size))
        at = _limited(at, size).reshape(*shape)
        low = _whole(at.pointwise("floor"))
        inside.append(within.reshape(*shape))
        taps.append([(low, 1.0 - (at - low)), ((low + 1.0).pointwise("min", float(size - 1)), at - low)])
    total: Tensor | None = None
    for (row, up), (column, left) in itertools.product(*taps):
        pixel = b.apply(Gather(0), rows, first + row.astype("i64") * sizes[1] + column.astype("i64"))
        part = pixel * (up * left).astype(x.dtype)[..., None]
        total = part if total is None else total + part if op.mode == "avg" else total.pointwise("max", part)
    assert total is not None
    read = b.where(inside[0].pointwise("logical_and", inside[1])[..., None], total, 0.0)
    split = read.reshape(-1, op.bins[0], s, op.bins[1], s, channels)
    pooled = split.mean((2, 4)) if op.mode == "avg" else split.max((2, 4))
    return pooled.transpose((0, 3, 1, 2))


def _roi_pool(step: BackwardStep, x: Tensor, rois: Tensor, batches: Tensor) -> Tensor:
    """Express the op by maxima over the rows of each bin, then over its columns."""
    op: RoiPool = step.op
    b, (_, channels, height, width), (tall, broad), count = step.b, x.shape, op.bins, rois.shape[0]
    rows, columns = (_pixels_of_bins(op, rois, d, x.shape[2 + d]) for d in range(2))
    images = b.apply(Gather(0), x, batches.astype("i64")).reshape(count, channels, 1, height, width)
    by_rows = b.where(rows.reshape(count, 1, tall, height, 1), images, -math.inf).max(3)
    by_rows = by_rows.reshape(count, channels, tall, 1, width)
    pooled = b.where(columns.reshape(count, 1, 1, broad, width), by_rows, -math.inf).max(4)
    some_row, some_column = (own.astype("f32").max(2) > 0.0 for own in (rows, columns))
    some = some_row.reshape(count, 1, tall, 1).pointwise("logical_and", some_column.reshape(count, 1, 1, broad))
    return b.where(some, pooled, 0.0)


def _pixels_of_bins(op: RoiPool, rois: Tensor, d: int, size: int) -> Tensor:
    """Return which pixels along a dim belong to each bin of each region: bool[K, bins, size]."""
    b, bins = rois.builder, op.bins[d]
    start, end = (_rounded(rois[:, i : i + 1] * op.scale) for i in (1 - d, 3 - d))
    length = (end - start + 1.0).pointwise("max", 1.0) / float(bins)
    first, last = (
        ((b.constant(np.arange(bins) + i, rois.dtype) * length).pointwise(whole) + start).reshape(-1, bins, 1)
        for i, whole in ((0, "floor"), (1, "ceil"))
    )
    at = b.constant(np.arange(size), rois.dtype)
    return (first <= at).pointwise("logical_and", last > at)


def _rounded(x: Tensor) -> Tensor:
    """Round to whole numbers, halves away from zero."""
    size = x.pointwise("abs")
    whole = _whole(size.pointwise("floor"))
    return x.pointwise("sign") * (whole + (size - whole >= 0.5).astype(x.dtype))


RULES: dict[str, Rule] = {
    "grid_sample": by_formula(_grid_sample),
    "deform_conv": by_formula(_deform_conv),
    "roi_align": by_formula(_roi_align),
    "roi_pool": by_formula(_roi_pool),
}
