"""Define convolution, plain, flipped and transposed, in 1, 2 or 3 spatial dims; a bias is a separate add."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from fusec.ir import Array, Op, TensorType
from fusec.ops.shape import Slice
from fusec.ops.spec import product_dtype, require, require_arity, require_float, summed, widened
from fusec.system.dataclass import dataclass

IM2COL_BYTES = 1 << 26  # memory that a convolution may use in addition to its operands and result


@dataclass(frozen=True)
class Conv(Op):
    """Cross-correlation: x[N, C, spatial…] with w[K, C/groups, window…] -> [N, K, spatial…].

    Floats, or i8 with exact sums in i32. Attributes have one entry per spatial dim; `pads` has all starts, then all
    ends.
    """

    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int = 1
    name: ClassVar[str] = "conv"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        return _infer_convolution(self, operands)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return (summed(lambda x, w: correlate(xp, x, w, self), *operands),)


@dataclass(frozen=True)
class FlippedConv(Op):
    """Convolution in the mathematical sense: as `conv`, with filters reversed along each spatial dim."""

    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int = 1
    name: ClassVar[str] = "conv_flipped"

    @property
    def unflipped(self) -> Conv:
        """The convolution that takes the reversed filters."""
        return Conv(self.strides, self.pads, self.dilations, self.groups)

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        return _infer_convolution(self, operands)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return (summed(lambda x, w: correlate(xp, x, flipped(w), self.unflipped), *operands),)


@dataclass(frozen=True)
class ConvTranspose(Op):
    """Gradient of a convolution as an op: x[N, C, …] with w[C, K/groups, window…] -> [N, K, …]."""

    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int = 1
    name: ClassVar[str] = "conv_transpose"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 2)
        x, w = operands
        require_float(self.name, x, w)
        _check_window(self.name, x, w, self.strides, self.pads, self.dilations)
        n = x.rank - 2
        require(len(self.output_padding) == n, f"output_padding needs {n} entries, not {len(self.output_padding)}")
        require(all(p >= 0 for p in self.output_padding), f"negative output_padding {self.output_padding}")
        require(self.groups >= 1 and x.shape[1] % self.groups == 0, f"groups={self.groups} with {x.shape[1]} channels")
        require(x.shape[1] == w.shape[0], f"weight takes {w.shape[0]} channels, x has {x.shape[1]}")
        require(0 not in (*x.shape[2:], *w.shape[2:]), f"empty window or image: {list(w.shape)} over {list(x.shape)}")
        spatial = tuple(
            s * (i - 1) + o + d * (k - 1) + 1 - p0 - p1
            for i, k, s, d, o, p0, p1 in zip(
                x.shape[2:],
                w.shape[2:],
                self.strides,
                self.dilations,
                self.output_padding,
                self.pads[:n],
                self.pads[n:],
                strict=True,
            )
        )
        require(all(s >= 1 for s in spatial), f"the pads leave nothing of the output: {list(spatial)}")
        result = TensorType((x.shape[0], w.shape[1] * self.groups, *spatial), x.dtype, x.order)
        check_padded(result, [i + p0 + p1 for i, p0, p1 in zip(spatial, self.pads[:n], self.pads[n:], strict=True)])
        return (result,)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return (widened(lambda x, w: scatter(xp, x, w, self), *operands),)


def _infer_convolution(op: Conv | FlippedConv, operands: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    require_arity(op.name, operands, 2)
    x, w = operands
    dtype = product_dtype(op.name, x, w)
    _check_window(op.name, x, w, op.strides, op.pads, op.dilations)
    require(op.groups >= 1, f"groups is {op.groups}")
    require(
        x.shape[1] == w.shape[1] * op.groups,
        f"weight takes {w.shape[1] * op.groups} channels, x has {x.shape[1]} (groups={op.groups})",
    )
    require(w.shape[0] % op.groups == 0, f"{w.shape[0]} filters do not divide into {op.groups} groups")
    spatial = windows_along(x.shape[2:], w.shape[2:], op.strides, op.pads, op.dilations)
    n = x.rank - 2
    check_padded(x, [i + p0 + p1 for i, p0, p1 in zip(x.shape[2:], op.pads[:n], op.pads[n:], strict=True)])
    return (TensorType((x.shape[0], w.shape[0], *spatial), dtype, x.order),)


def _check_window(
    op: str, x: TensorType, w: TensorType, strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int]
) -> None:
    n = x.rank - 2
    require(1 <= n <= 3, f"{op} takes 1 to 3 spatial dims, x has shape {list(x.shape)}")
    require(w.rank == x.rank, f"weight has rank {w.rank}, x rank {x.rank}")
    check_window(op, n, strides, pads, dilations)


def check_window(op: str, n: int, strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int]) -> None:
    """Check the attributes of a sliding window over `n` spatial dims."""
    require(len(strides) == n, f"strides needs {n} entries, not {len(strides)}")
    require(len(dilations) == n, f"dilations needs {n} entries, not {len(dilations)}")
    require(len(pads) == 2 * n, f"pads needs {2 * n} entries, not {len(pads)}")
    require(all(s >= 1 for s in strides), f"strides must be positive: {list(strides)}")
    require(all(d >= 1 for d in dilations), f"dilations must be positive: {list(dilations)}")
    require(all(p >= 0 for p in pads), f"{op}: negative pads {list(pads)}")


def check_padded(x: TensorType, spatial: Sequence[int]) -> None:
    """Raise SizeError if the padded image is too large; the result may be small because of strides."""
    TensorType((*x.shape[:2], *spatial), x.dtype)


def windows_along(
    spatial: Sequence[int], window: Sequence[int], strides: Sequence[int], pads: Sequence[int], dilations: Sequence[int]
) -> tuple[int, ...]:
    """Count the windows along each spatial dim. Raises VerifyError if a dim is smaller than its window."""
    n = len(spatial)
    result: list[int] = []
    for i, k, s, p0, p1, d in zip(spatial, window, strides, pads[:n], pads[n:], dilations, strict=True):
        room = i + p0 + p1 - d * (k - 1) - 1
        require(room >= 0 and k >= 1, f"a window of {k} (dilation {d}) does not fit {i} padded by {p0}+{p1}")
        result.append(room // s + 1)
    return tuple(result)


def sliding(
    xp: Any, x: Array, window: Sequence[int], strides: Sequence[int], dilations: Sequence[int], count: Sequence[int]
) -> Array:
    """Return a view [N, C, window…, count…] of x[N, C, spatial…], which is already padded."""
    step = x.strides[2:]
    shape = (*x.shape[:2], *window, *count)
    by = (
        *x.strides[:2],
        *(b * d for b, d in zip(step, dilations, strict=True)),
        *(b * s for b, s in zip(step, strides, strict=True)),
    )
    return xp.lib.stride_tricks.as_strided(x, shape, by)


def pad_spatial(xp: Any, x: Array, pads: Sequence[int], value: float = 0.0) -> Array:
    """Pad x[N, C, spatial…] by `pads` (starts, then ends)."""
    n = x.ndim - 2
    if not any(pads):
        return x
    widths = [(0, 0), (0, 0), *zip(pads[:n], pads[n:], strict=True)]
    return xp.pad(x, widths, constant_values=value)


def flipped(w: Array) -> Array:
    """Return a view of filters[K, C, window…] that reverses each spatial dim."""
    return w[(slice(None), slice(None), *[slice(None, None, -1)] * (w.ndim - 2))]


def reversal(shape: Sequence[int]) -> Slice:
    """Return the op that reverses each spatial dim of filters [K, C, window…] of this shape."""
    return Slice((0, 0, *(size - 1 for size in shape[2:])), tuple(shape), (1, 1, *[-1] * (len(shape) - 2)))


def correlate(xp: Any, x: Array, w: Array, op: Conv) -> Array:
    """Convolve by im2col and batched matmuls over blocks of output rows."""
    count = windows_along(x.shape[2:], w.shape[2:], op.strides, op.pads, op.dilations)
    groups, taps = op.groups, math.prod(w.shape[1:])
    filters = w.reshape(groups, w.shape[0] // groups, taps)
    padded = pad_spatial(xp, x, op.pads)
    columns = sliding(xp, padded, w.shape[2:], op.strides, op.dilations, count)
    result = xp.empty((x.shape[0], w.shape[0], *count), x.dtype)
    row = groups * taps * math.prod(count[1:]) * x.dtype.itemsize
    rows = max(1, IM2COL_BYTES // max(row, 1))
    for image in range(x.shape[0]):
        for first in range(0, count[0], rows):
            block = slice(first, min(first + rows, count[0]))
            shape = (block.stop - first, *count[1:])
            window = (slice(None),) * (x.ndim - 1)
            matrix = columns[image][(*window, block)].reshape(groups, taps, math.prod(shape))
            result[image, :, block] = xp.matmul(filters, matrix).reshape(w.shape[0], *shape)
            del matrix  # because the next one is allocated before this name is bound again
    return result


def scatter(xp: Any, x: Array, w: Array, op: ConvTranspose) -> Array:
    """Compute a transposed convolution tap by tap: each input element adds its multiple of the filter to the output."""
    n, groups = x.ndim - 2, op.groups
    batch, channels = x.shape[:2]
    spatial, window = x.shape[2:], w.shape[2:]
    filters = w.reshape(groups, channels // groups, w.shape[1], *window)
    flat = x.reshape(batch, groups, channels // groups, math.prod(spatial))
    full = [
        s * (i - 1) + d * (k - 1) + 1 + o
        for i, k, s, d, o in zip(spatial, window, op.strides, op.dilations, op.output_padding, strict=True)
    ]
    result = xp.zeros((batch, groups * w.shape[1], *full), x.dtype)
    for tap in indices_of(window):
        place = tuple(
            slice(t * d, t * d + s * (i - 1) + 1, s)
            for t, d, s, i in zip(tap, op.dilations, op.strides, spatial, strict=True)
        )
        part = xp.matmul(xp.swapaxes(filters[(..., *tap)], 1, 2)[None], flat)
        result[(slice(None), slice(None), *place)] += part.reshape(batch, groups * w.shape[1], *spatial)
    crop = tuple(slice(p0, size - p1) for p0, p1, size in zip(op.pads[:n], op.pads[n:], full, strict=True))
    return result[(slice(None), slice(None), *crop)]


def indices_of(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return every index of an array of that shape, the last dim fastest."""
    return list(itertools.product(*map(range, shape)))
