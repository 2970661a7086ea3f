"""Define the op that reads images between their pixels, at places that another tensor gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fusec.ir import Array, Op, TensorType
from fusec.ops.spec import require, require_arity, require_float, wide
from fusec.system.dataclass import dataclass

CUBIC = -0.75  # the parameter of the cubic kernel


@dataclass(frozen=True)
class GridSample(Op):
    """Images x[N, C, spatial…] at the places grid[N, places…, dims], the last spatial dim first: y[N, C, places…].

    `mode`: nearest, linear or cubic. `coordinates`: edges (-1 and 1 are the outer borders of an image), centres (of its
    border pixels), or pixels (a place is an index). `padding`, of places outside: zeros, border or reflection.
    """

    mode: str = "linear"
    padding: str = "zeros"
    coordinates: str = "edges"
    name: ClassVar[str] = "grid_sample"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 2)
        x, grid = operands
        require_float(self.name, grid)
        require(self.mode in ("nearest", "linear", "cubic"), f"grid_sample knows no mode {self.mode!r}")
        require(self.padding in ("zeros", "border", "reflection"), f"grid_sample knows no padding {self.padding!r}")
        require(self.coordinates in ("edges", "centres", "pixels"), f"knows no coordinates {self.coordinates!r}")
        require(x.dtype.is_float or self.mode == "nearest", f"grid_sample of {x.dtype.value}")
        require(x.rank >= 3 and x.size > 0, f"grid_sample takes images [N, C, spatial…], not {x}")
        fits = grid.rank == x.rank and grid.shape[0] == x.shape[0] and grid.shape[-1] == x.rank - 2
        require(fits, f"grid {grid} for x {x}")
        return (TensorType((*x.shape[:2], *grid.shape[1:-1]), x.dtype),)

    @property
    def range(self) -> tuple[float, float]:
        """Return how far outside the first and the last pixel an image is reflected."""
        return (0.0, 0.0) if self.coordinates == "centres" else (-0.5, 0.5)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):  # a place may be infinite
            return (self._read(xp, wide(operands[0]), wide(operands[1])).astype(operands[0].dtype),)

    def _read(self, xp: Any, x: Array, grid: Array) -> Array:
        n, sizes = x.ndim - 2, x.shape[2:]
        taps = [self._taps(xp, grid[..., n - 1 - d], size) for d, size in enumerate(sizes)]
        flat = x.reshape(*x.shape[:2], -1)
        images, channels = xp.arange(x.shape[0])[:, None, None], xp.arange(x.shape[1])[None, :, None]
        total: Array | None = None
        for chosen in itertools.product(*taps):
            place, inside, weight = self._combined(xp, chosen, sizes)
            shape = (x.shape[0], 1, -1)
            pixel = flat[images, channels, place.reshape(shape)]
            if self.padding == "zeros":
                pixel = xp.where(inside.reshape(shape), pixel, xp.zeros_like(pixel))
            if self.mode != "nearest":
                pixel = pixel * weight.reshape(shape).astype(x.dtype)
            total = pixel if total is None else total + pixel
        assert total is not None
        return total.reshape(*x.shape[:2], *grid.shape[1:-1])

    def _taps(self, xp: Any, at: Array, size: int) -> list[tuple[Array, Array]]:
        """Return the coordinates along a dim that a result adds up, and their weights."""
        at = self._pixel(at, size)
        if self.mode == "nearest":
            return [(self._padded(xp, xp.rint(at), size), xp.ones_like(at))]
        if self.mode == "linear":
            at = self._padded(xp, at, size)
            low = xp.floor(at)
            return [(low, 1 - (at - low)), (low + 1, at - low)]
        low = xp.floor(at)
        return [(self._padded(xp, low + i, size), cubic(i, at - low)) for i in (-1, 0, 1, 2)]

    def _pixel(self, at: Array, size: int) -> Array:
        """Convert coordinates to indices of pixels, which may be fractions."""
        if self.coordinates == "pixels":
            return at
        return (at + 1) * ((size - 1) / 2) if self.coordinates == "centres" else ((at + 1) * size - 1) / 2

    def _padded(self, xp: Any, at: Array, size: int) -> Array:
        """Move coordinates outside into the image, as `padding` says."""
        if self.padding == "reflection":
            low, high = self.range[0], size - 1 + self.range[1]
            span = high - low
            if span == 0:
                return at * 0
            rest = xp.fmod(xp.abs(at - low), 2 * span)
            at = (span - xp.abs(rest - span)) + low
        return at if self.padding == "zeros" else _limited(xp, at, size)

    def _combined(
        self, xp: Any, chosen: Sequence[tuple[Array, Array]], sizes: Sequence[int]
    ) -> tuple[Array, Array, Array]:
        """Return the index of a pixel in its image, if it is inside, and its weight, of one tap for each dim."""
        place, inside, weight = 0, True, 1
        for (at, part), size, stride in zip(chosen, sizes, _strides(sizes), strict=True):
            place = place + _limited(xp, at, size).astype(xp.int64) * stride
            inside = inside & (at >= 0) & (at <= size - 1)
            weight = weight * part
        return place, inside, weight


def cubic(offset: int, t: Any) -> Any:
    """Return the weight of the pixel `offset` from the one before a place that is `t` after it."""
    near, far = (CUBIC + 2, -(CUBIC + 3), 0.0, 1.0), (CUBIC, -5 * CUBIC, 8 * CUBIC, -4 * CUBIC)
    d = abs(t - offset)
    weight: Any = 0 * t
    for factor in near if offset in (0, 1) else far:
        weight = weight * d + factor
    return weight


def _limited(xp: Any, at: Array, size: int) -> Array:
    """Clip coordinates to those of pixels; NaN becomes 0, so that they are valid indices."""
    return xp.clip(xp.where(xp.isnan(at), xp.zeros_like(at), at), 0, size - 1)


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
