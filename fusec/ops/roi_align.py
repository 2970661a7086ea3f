"""Define the ops that pool regions of images: between pixels (roi_align), and over whole pixels (roi_pool)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fusec.ir import Array, Op, TensorType
from fusec.ops.spec import require, require_arity, require_float, wide
from fusec.system.dataclass import dataclass

MAX_SAMPLES = 4096  # along a dim of a bin


@dataclass(frozen=True)
class RoiAlign(Op):
    """Regions rois[K, (x1, y1, x2, y2)] of x[N, C, H, W] in the images batches[K], pooled to `bins`: y[K, C, bins].

    `bins`: height and width. `mode`: avg or max of `samples` by `samples` points of a bin; 0: about one for each pixel
    of the region. A region is multiplied by `scale`. `half_pixel`: then half a pixel is subtracted; else a region has
    at least one pixel.
    """

    bins: tuple[int, int]
    samples: int
    mode: str = "avg"
    scale: float = 1.0
    half_pixel: bool = True
    name: ClassVar[str] = "roi_align"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require(self.mode in ("avg", "max"), f"roi_align knows no mode {self.mode!r}")
        x, rois = _images_and_regions(self.name, operands)
        shown = "x".join(map(str, self.bins))
        fits = len(self.bins) == 2 and min(self.bins) >= 1 and max(self.bins) <= MAX_SAMPLES
        require(fits and 0 <= self.samples <= MAX_SAMPLES, f"{shown} bins of {self.samples}x{self.samples} samples")
        return (TensorType((rois.shape[0], x.shape[1], *self.bins), x.dtype),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        x, rois, batches = wide(operands[0]), wide(operands[1]), operands[2]
        with np.errstate(all="ignore"):  # a region may be infinite
            rois = rois * rois.dtype.type(self.scale) - rois.dtype.type(0.5 if self.half_pixel else 0)
            if self.samples:
                result = self._pooled(xp, x, rois, batches, (self.samples, self.samples))
            else:
                result = xp.zeros((len(rois), x.shape[1], *self.bins), x.dtype)
                for k in range(len(rois)):
                    result[k] = self._pooled_inside(xp, x, rois[k : k + 1], batches[k : k + 1])
        return (result.astype(operands[0].dtype),)

    def _length(self, xp: Any, start: Array, end: Array) -> Array:
        return end - start if self.half_pixel else xp.maximum(end - start, end.dtype.type(1))

    def _counts(self, xp: Any, roi: Array) -> tuple[int, int]:
        """Return the number of samples in a bin of one region, in height and width."""
        counts: list[int] = []
        for d, number in ((1, self.bins[0]), (0, self.bins[1])):
            count = xp.ceil(self._length(xp, roi[d], roi[d + 2]) / roi.dtype.type(number))
            counts.append(int(xp.clip(xp.where(xp.isnan(count), xp.zeros_like(count), count), 0, MAX_SAMPLES)))
        return counts[0], counts[1]

    def _pooled(self, xp: Any, x: Array, rois: Array, batches: Array, counts: tuple[int, int]) -> Array:
        """Pool regions that have the same number of samples in a bin."""
        (tall, broad), channels = self.bins, x.shape[1]
        found = [self._along(xp, rois, d, x.shape[2 + d], counts[d]) for d in range(2)]
        (rows_inside, *rows), (columns_inside, *columns) = found
        total = self._interpolated(xp, x, batches, rows, columns)
        inside = (rows_inside[:, :, None] & columns_inside[:, None, :])[..., None]
        read: Any = xp.where(inside, total, xp.zeros_like(total))
        split = read.reshape(len(rois), tall, counts[0], broad, counts[1], channels)
        pooled = split.mean((2, 4)) if self.mode == "avg" else split.max((2, 4))
        return pooled.transpose(0, 3, 1, 2)

    def _pooled_inside(self, xp: Any, x: Array, roi: Array, batch: Array) -> Array:
        """Pool one region [1, 4] from its samples inside the image, because those of an enormous one are many."""
        counts, result = self._counts(xp, roi[0]), xp.zeros((x.shape[1], *self.bins), x.dtype)
        if 0 in counts:
            return result
        found = [self._along(xp, roi, d, x.shape[2 + d], counts[d]) for d in range(2)]
        inside = [xp.flatnonzero(along[0][0]) for along in found]
        rows, columns = ([part[:, at] for part in along[1:]] for along, at in zip(found, inside, strict=True))
        total = self._interpolated(xp, x, batch, rows, columns)[0]
        for i in range(self.bins[0]):
            row = total[inside[0] // counts[0] == i]
            for j in range(self.bins[1]):
                own = row[:, inside[1] // counts[1] == j]
                number = own.shape[0] * own.shape[1]
                if self.mode == "avg":
                    result[:, i, j] = own.sum((0, 1)) / x.dtype.type(counts[0] * counts[1])
                elif number:
                    largest = own.max((0, 1))
                    outside = number < counts[0] * counts[1]  # where samples are zero
                    result[:, i, j] = xp.maximum(largest, xp.zeros_like(largest)) if outside else largest
        return result

    def _interpolated(self, xp: Any, x: Array, batches: Array, rows: Sequence[Array], columns: Sequence[Array]) -> Any:
        """Read the samples [K, rows, columns, C] from the pixels around them, each given with its weight."""
        images = batches.astype(xp.int64)[:, None, None]
        total: Array | None = None
        for y, up in (rows[:2], rows[2:]):
            for at, left in (columns[:2], columns[2:]):
                part = x[images, :, y[:, :, None], at[:, None, :]]
                part = part * (up[:, :, None] * left[:, None, :])[..., None].astype(x.dtype)
                # the standard takes the maximum of each pixel times its weight, not of the interpolated samples
                total = part if total is None else total + part if self.mode == "avg" else xp.maximum(total, part)
        return total

    def _along(self, xp: Any, rois: Array, d: int, size: int, count: int) -> tuple[Array, ...]:
        """Return for the samples along a dim if they count, and the pixels before and after them with weights."""
        start, end = rois[:, 1 - d : 2 - d], rois[:, 3 - d : 4 - d]
        total = self.bins[d] * count
        steps = ((xp.arange(total) + 0.5) / total).astype(rois.dtype)
        at = start + self._length(xp, start, end) * steps
        inside = (at >= -1) & (at <= size)
        at = xp.clip(xp.where(xp.isnan(at), xp.zeros_like(at), at), 0, size - 1)
        low = xp.floor(at)
        high = xp.minimum(low + 1, size - 1)
        return inside, low.astype(xp.int64), 1 - (at - low), high.astype(xp.int64), at - low


@dataclass(frozen=True)
class RoiPool(Op):
    """The maximum of each bin of regions rois[K, (x1, y1, x2, y2)] of x[N, C, H, W] in the images batches[K].

    The result is y[K, C, bins]. A region is multiplied by `scale` and rounded, halves away from zero; it includes its
    last row and column. A pixel at the border of two bins counts in both. A bin outside of the image is zero.
    """

    bins: tuple[int, int]
    scale: float = 1.0
    name: ClassVar[str] = "roi_pool"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        x, rois = _images_and_regions(self.name, operands)
        shown = "x".join(map(str, self.bins))
        require(len(self.bins) == 2 and 1 <= min(self.bins) <= max(self.bins) <= MAX_SAMPLES, f"{shown} bins")
        return (TensorType((rois.shape[0], x.shape[1], *self.bins), x.dtype),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        x, rois, batches = wide(operands[0]), wide(operands[1]), operands[2]
        rows, columns = (self._edges(xp, rois, d, x.shape[2 + d]) for d in range(2))
        result = xp.zeros((len(rois), x.shape[1], *self.bins), x.dtype)
        for k in range(len(rois)):
            image = x[int(batches[k])]
            for i, (top, bottom) in enumerate(rows[k]):
                for j, (left, right) in enumerate(columns[k]):
                    if top < bottom and left < right:
                        result[k, :, i, j] = image[:, top:bottom, left:right].max((1, 2))
        return (result.astype(operands[0].dtype),)

    def _edges(self, xp: Any, rois: Array, d: int, size: int) -> list[list[list[int]]]:
        """Return the first pixel of each bin of each region along a dim, and the one after its last."""
        number = rois.dtype.type
        with np.errstate(all="ignore"):  # a region may be infinite
            start, end = (_rounded(xp, rois[:, i] * number(self.scale))[:, None] for i in (1 - d, 3 - d))
            length = xp.maximum(end - start + number(1), number(1)) / number(self.bins[d])
            bins = xp.arange(self.bins[d]).astype(rois.dtype)
            found = xp.stack([xp.floor(bins * length) + start, xp.ceil((bins + number(1)) * length) + start], -1)
            return xp.clip(xp.where(xp.isnan(found), xp.zeros_like(found), found), 0, size).astype(xp.int64).tolist()


def _images_and_regions(name: str, operands: Sequence[TensorType]) -> tuple[TensorType, TensorType]:
    """Check the operands of an op that pools regions, and return the types of images and regions."""
    require_arity(name, operands, 3)
    x, rois, batches = operands
    require_float(name, x)
    require_float(name, rois)
    require(x.rank == 4 and x.size > 0, f"{name} takes images [N, C, H, W], not {x}")
    require(rois.rank == 2 and rois.shape[1] == 4, f"rois {rois} for {x}")
    require(batches.shape == rois.shape[:1] and batches.dtype.is_int, f"batches {batches} for rois {rois}")
    return x, rois


def _rounded(xp: Any, x: Array) -> Array:
    """Round to whole numbers, halves away from zero."""
    size = xp.abs(x)
    whole = xp.floor(size)
    return xp.sign(x) * (whole + (size - whole >= 0.5).astype(x.dtype))
