"""Define deformable convolution, which reads each element of a window at a place of its own."""

from __future__ import annotations

import itertools
import math
from typing import Any, ClassVar

import numpy as np

from fusec.ir import Array, Op, TensorType
from fusec.ops.convolution import IM2COL_BYTES, check_window, windows_along
from fusec.ops.spec import require, require_arity, require_float, wide
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class DeformConv(Op):
    """Convolution of x[N, C, H, W] with w[K, C/groups, window], whose elements move by an offset: y[N, K, windows].

    `offset`[N, offset_groups * taps * 2, windows] moves each tap of each window by rows and columns, the same for
    C/offset_groups channels. `mask`[N, offset_groups * taps, windows], which may be missing, multiplies what is read.
    Numbers between pixels are interpolated linearly, with zeros outside of the image.
    """

    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int = 1
    offset_groups: int = 1
    name: ClassVar[str] = "deform_conv"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 3, 4)
        require_float(self.name, *operands)
        x, w, offset = operands[:3]
        require(x.rank == 4 and w.rank == 4, f"deform_conv takes 2 spatial dims, not {x} and {w}")
        require(0 not in (*x.shape[1:], *w.shape), f"deform_conv of {w} over {x}")
        check_window(self.name, 2, self.strides, self.pads, self.dilations)
        groups = f"{self.groups} groups and {self.offset_groups} offset groups"
        require(self.groups >= 1 and self.offset_groups >= 1, f"deform_conv of {groups}")
        batch, channels, *image = x.shape
        filters, of_group, *window = w.shape
        divides = not (channels % self.offset_groups or filters % self.groups)
        require(divides and of_group * self.groups == channels, f"weight {w} for {channels} channels in {groups}")
        out = windows_along(image, window, self.strides, self.pads, self.dilations)
        moved = self.offset_groups * math.prod(window)
        for name, value, count in zip(("offset", "mask"), operands[2:], (2 * moved, moved), strict=False):
            wanted = (batch, count, *out)
            require(value.shape == wanted, f"{name} of shape {list(value.shape)}, not {list(wanted)}")
        return (TensorType((batch, filters, *out), offset.dtype, x.order),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        x, w, offset, *mask = map(wide, operands)
        batch, (filters, of_group, *window) = len(x), w.shape
        taps, rows, columns = math.prod(window), *offset.shape[2:]
        matrix = w.reshape(self.groups, filters // self.groups, of_group * taps)
        result = xp.empty((batch, filters, rows, columns), x.dtype)
        step = max(1, IM2COL_BYTES // max(x.shape[1] * taps * columns * x.dtype.itemsize, 1))
        with np.errstate(all="ignore"):  # an offset may be infinite
            for n, first in itertools.product(range(batch), range(0, rows, step)):
                block = slice(first, min(first + step, rows))
                read = self._read(xp, x[n], offset[n, :, block], window, first)
                if mask:
                    read = read * mask[0][n, :, block].reshape(self.offset_groups, 1, taps, -1)
                read = read.reshape(self.groups, of_group * taps, -1)
                result[n, :, block] = xp.matmul(matrix, read).reshape(filters, -1, columns)
        return (result.astype(operands[0].dtype),)

    def _read(self, xp: Any, x: Array, offset: Array, window: list[int], first: int) -> Array:
        """Read an image for some rows of windows: [offset_groups, channels, taps, windows]."""
        groups, taps = self.offset_groups, math.prod(window)
        _, *sizes = x.shape
        moves = offset.reshape(groups, taps, 2, *offset.shape[1:])
        near: list[list[tuple[Array, Array, Array]]] = []
        for d, size in enumerate(sizes):
            tap = xp.arange(taps) // window[1] if d == 0 else xp.arange(taps) % window[1]
            start = xp.arange(moves.shape[3 + d]) + (0 if d else first)
            start = start[:, None] if d == 0 else start[None, :]
            at = start * self.strides[d] - self.pads[d] + (tap * self.dilations[d])[:, None, None]
            at = (moves[:, :, d] + at.astype(x.dtype)).reshape(groups, 1, taps, -1)
            low = xp.floor(at)
            near.append([_tap(xp, low, 1 - (at - low), size), _tap(xp, low + 1, at - low, size)])
        flat = x.reshape(groups, -1, math.prod(sizes))
        image, channel = xp.arange(groups)[:, None, None, None], xp.arange(flat.shape[1])[:, None, None]
        total: Array | None = None
        for (row, is_row, above), (column, is_column, left) in itertools.product(*near):
            pixel = flat[image, channel, row * sizes[1] + column]
            part = xp.where(is_row & is_column, pixel, xp.zeros_like(pixel)) * (above * left)
            total = part if total is None else total + part
        assert total is not None
        return total


def _tap(xp: Any, at: Array, weight: Array, size: int) -> tuple[Array, Array, Array]:
    """Return valid indices for whole coordinates along a dim, if these are inside, and their weights."""
    index = xp.clip(xp.where(xp.isnan(at), xp.zeros_like(at), at), 0, size - 1).astype(xp.int64)
    return index, (at >= 0) & (at <= size - 1), weight
