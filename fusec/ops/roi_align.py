"""Define the op that pools regions of images, whose borders lie between pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fusec.ir import Array, Op, TensorType
from fusec.ops.spec import require, require_arity, require_float, wide

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
        require_arity(self.name, operands, 3)
        x, rois, batches = operands
        require_float(self.name, x)
        require_float(self.name, rois)
        require(self.mode in ("avg", "max"), f"roi_align knows no mode {self.mode!r}")
        require(x.rank == 4 and x.size > 0, f"roi_align takes images [N, C, H, W], not {x}")
        require(rois.rank == 2 and rois.shape[1] == 4, f"rois {rois} for {x}")
        require(batches.shape == rois.shape[:1] and batches.dtype.is_int, f"batches {batches} for rois {rois}")
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
                each = (self._counts(xp, rois[k]) for k in range(len(rois)))
                parts = [self._pooled(xp, x, rois[k : k + 1], batches[k : k + 1], n) for k, n in enumerate(each)]
                result = xp.concatenate(parts) if parts else xp.zeros((0, x.shape[1], *self.bins), x.dtype)
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
        if 0 in counts:
            return xp.zeros((len(rois), channels, tall, broad), x.dtype)
        found = [self._along(xp, rois, d, x.shape[2 + d], counts[d]) for d in range(2)]
        (rows_inside, *rows), (columns_inside, *columns) = found
        images = batches.astype(xp.int64)[:, None, None]
        total: Array | None = None
        for y, up in (rows[:2], rows[2:]):
            for at, left in (columns[:2], columns[2:]):
                part = x[images, :, y[:, :, None], at[:, None, :]]
                part = part * (up[:, :, None] * left[:, None, :])[..., None].astype(x.dtype)
                # the standard takes the maximum of each pixel times its weight, not of the interpolated samples
                total = part if total is None else total + part if self.mode == "avg" else xp.maximum(total, part)
        assert total is not None
        inside = (rows_inside[:, :, None] & columns_inside[:, None, :])[..., None]
        read: Any = xp.where(inside, total, xp.zeros_like(total))
        split = read.reshape(len(rois), tall, counts[0], broad, counts[1], channels)
        pooled = split.mean((2, 4)) if self.mode == "avg" else split.max((2, 4))
        return pooled.transpose(0, 3, 1, 2)

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
