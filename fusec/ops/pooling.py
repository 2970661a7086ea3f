"""Define max and average pooling; a global pool is a reduction over the spatial dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fusec.ir import Array, DType, Op, TensorType
from fusec.ops.convolution import check_padded, check_window, pad_spatial, sliding
from fusec.ops.spec import require, require_arity, require_float, widened
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class Pool(Op):
    """Base of max and average pooling."""

    window: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]  # all starts, then all ends
    dilations: tuple[int, ...]
    ceil_mode: bool = False

    @property
    def geometry(self) -> tuple[Any, ...]:
        """Return the attributes that all pools have, in the order of the constructors."""
        return self.window, self.strides, self.pads, self.dilations, self.ceil_mode

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        x = operands[0]
        require(x.dtype.is_float or x.dtype.is_int, f"{self.name} takes numbers, not {x.dtype.value}")
        n = x.rank - 2
        require(1 <= n <= 3, f"{self.name} takes 1 to 3 spatial dims, x has shape {list(x.shape)}")
        require(len(self.window) == n and all(k >= 1 for k in self.window), f"window {list(self.window)} for {n} dims")
        check_window(self.name, n, self.strides, self.pads, self.dilations)
        for k, d, p in zip(self.window * 2, self.dilations * 2, self.pads, strict=True):
            require(p < d * (k - 1) + 1, f"a pad of {p} is as large as the window {k} (dilation {d})")
        check_padded(x, self.padded(x.shape[2:]))
        return (TensorType((*x.shape[:2], *self.counts(x.shape[2:])), x.dtype, x.order),)

    def padded(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """Return the length of each dim with its pads, and beyond them as far as the last window extends."""
        n = len(spatial)
        need = [
            (c - 1) * s + d * (k - 1) + 1
            for c, s, d, k in zip(self.counts(spatial), self.strides, self.dilations, self.window, strict=True)
        ]
        ends = self.pads[n:]
        return tuple(max(i + p0 + p1, m) for i, p0, p1, m in zip(spatial, self.pads[:n], ends, need, strict=True))

    def counts(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """Count windows along each dim.

        With ceil_mode a last window may extend beyond the end, if it starts inside the input or its leading pad (ONNX,
        and PyTorch's rule).
        """
        n = len(spatial)
        result: list[int] = []
        for i, k, s, d, p0, p1 in zip(
            spatial, self.window, self.strides, self.dilations, self.pads[:n], self.pads[n:], strict=True
        ):
            room = i + p0 + p1 - d * (k - 1) - 1
            fits = room >= 0 or (self.ceil_mode and room > -s)  # one window, which extends beyond the end
            require(fits, f"a window of {k} (dilation {d}) does not fit {i} padded by {p0}+{p1}")
            count = (-(-room // s) if self.ceil_mode else room // s) + 1
            if self.ceil_mode and (count - 1) * s >= i + p0:
                count -= 1
            result.append(count)
        return tuple(result)

    def windows(self, xp: Any, x: Array, fill: float) -> Array:
        """Return [N, C, window…, count…], where out-of-range elements are `fill`."""
        n = x.ndim - 2
        counts, starts = self.counts(x.shape[2:]), self.pads[:n]
        ends = [m - i - p0 for m, i, p0 in zip(self.padded(x.shape[2:]), x.shape[2:], starts, strict=True)]
        padded = pad_spatial(xp, x, (*self.pads[:n], *ends), fill)
        return sliding(xp, padded, self.window, self.strides, self.dilations, counts)


@dataclass(frozen=True)
class MaxPool(Pool):
    """Maximum over each window; padding never counts."""

    name: ClassVar[str] = "max_pool"

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        x = operands[0]
        dtype = DType.of(x.dtype)
        fill = -math.inf if dtype.is_float else int(np.iinfo(x.dtype).min)
        n = x.ndim - 2
        return (widened(lambda v: self.windows(xp, v, fill).max(axis=tuple(range(2, 2 + n))), x),)


@dataclass(frozen=True)
class AvgPool(Pool):
    """Mean over each window; padding counts as zeros if `count_include_pad`, else it does not count.

    With `ceil_mode`, elements beyond the padded input never count. The mean of no elements is 0.
    """

    count_include_pad: bool = False
    name: ClassVar[str] = "avg_pool"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        require_float(self.name, *operands)
        return super().infer(*operands)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        n = operands[0].ndim - 2
        axes = tuple(range(2, 2 + n))

        def compute(x: Array) -> Array:
            return self.windows(xp, x, 0.0).sum(axis=axes) / self.weights(xp, x.shape[2:], x.dtype)

        return (widened(compute, *operands),)

    def weights(self, xp: Any, spatial: Sequence[int], dtype: Any) -> Array:
        """Count the elements of each window, at least 1: [1, 1, count…]."""
        n = len(spatial)
        ones = xp.ones((1, 1, *spatial), dtype)
        if self.count_include_pad:
            ones = pad_spatial(xp, ones, self.pads, 1.0)
            beyond = [m - size for m, size in zip(self.padded(spatial), ones.shape[2:], strict=True)]
            ones = pad_spatial(xp, ones, (*([0] * n), *beyond))
            weight = sliding(xp, ones, self.window, self.strides, self.dilations, self.counts(spatial))
        else:
            weight = self.windows(xp, ones, 0.0)
        return xp.maximum(weight.sum(axis=tuple(range(2, 2 + n))), 1)
