"""Let samples overflow where storage or fp32 may overflow."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from fusec.ir import DType, HostArray, Node
from fusec.ops import DeformConv, Pointwise
from fusec.testing.error_bounds.op_rounding import POLES, never_zero
from fusec.testing.error_bounds.perturbed import SAFETY, Samples

# Ops that square what they read, and whose results are small again.
_NORMS = frozenset(
    (
        *("instance_norm", "group_norm", "layer_norm", "rms_norm", "lrn", "batch_norm_train", "channel_sums"),
        *("batch_norm_backward", "layer_norm_backward"),
    )
)
MAX = {d: float(ml_dtypes.finfo(d.numpy).max) for d in DType if d.is_float}


def overflow(
    node: Node,
    plain: HostArray,
    samples: list[HostArray],
    dtype: DType | None,
    squares: bool,
    operands: list[HostArray],
) -> None:
    """Let every other sample overflow where storage or fp32 may overflow; the others neither over- nor underflow.

    Results that depend on the overflow therefore differ among samples.

    samples: changed in place.
    dtype: the type that the result is stored in; None if it is computed in float64.
    squares: the op may square numbers in fp32, or round what it reads.
    """
    most = float(np.fmax.reduce(np.abs(plain), axis=None, initial=0.0))  # NaN is no number
    own = node.results[0].type.dtype  # a constant is computed in its own type before it is narrowed
    limit = 0.999 * min(MAX[dtype], MAX[own]) if dtype is not None and own.is_float else math.inf
    if limit < math.inf and (beyond := _may_exceed(limit, plain, samples)) is not None:
        samples[::2] = [np.where(beyond & ~np.isnan(s), np.copysign(np.inf, s), s) for s in samples[::2]]
    if squares and isinstance(node.op, DeformConv):
        beyond = _reads_beyond(node.op, limit, operands)
        samples[::2] = [np.where(beyond, np.nan, s) for s in samples[::2]]
    if np.isinf(most) and node.op.name not in POLES and (finite := _finite(node, plain, operands)) is not None:
        endless = np.isinf(plain) & finite
        samples[1::2] = [np.where(endless, np.copysign(1e300, plain), s) for s in samples[1::2]]
    if never_zero(node.op) and (np.abs(plain) < 1e-290).any():
        vanished = (np.abs(plain) < 1e-290) & ~np.isneginf(operands[0])  # subnormal in float64, or less
        samples[1::2] = [np.where(vanished, 1e-290, s) for s in samples[1::2]]
    squared = [plain, *operands] if node.op.name in _NORMS else [plain]
    if squares and any(map(_overflows_squared, squared)):
        samples[::2] = [np.full_like(s, np.nan) for s in samples[::2]]


def _overflows_squared(numbers: HostArray) -> bool:
    """Tell if the square of a number, or the sum of some, overflows fp32."""
    return numbers.dtype.kind == "f" and bool(((np.abs(numbers) > 1e18) & np.isfinite(numbers)).any())


def _finite(node: Node, plain: HostArray, operands: list[HostArray]) -> HostArray | None:
    """Tell for each result of a pointwise op if its operands are finite, for other ops if all are; None if none is."""
    if isinstance(node.op, Pointwise):
        finite = np.all([np.broadcast_to(np.isfinite(x), plain.shape) for x in operands], axis=0)
    else:
        finite = np.array(all(np.isfinite(x).all() for x in operands))
    return finite if finite.any() else None


def _may_exceed(limit: float, plain: HostArray, samples: list[HostArray]) -> HostArray | None:
    """Find the numbers that rounding may put beyond a limit; None if there are none."""
    most = max(float(np.fmax.reduce(np.abs(x), axis=None, initial=0.0)) for x in (plain, *samples))
    if most * (1 + 2 * SAFETY) < limit:  # samples are at most twice `most` apart
        return None
    beyond = np.abs(plain) + SAFETY * Samples(plain, samples).spread() >= limit
    return beyond if beyond.any() else None


def _reads_beyond(op: DeformConv, limit: float, operands: list[HostArray]) -> HostArray:
    """Tell for each result of a deformable convolution if it reads a number that exceeds a limit.

    A number is read between pixels and multiplied by the mask. Kernels round it to the type of the image, where it may
    be an infinity. Filters that each pass on one number of a window show all that is read.
    """
    x, w, offset, *mask = operands
    elements = math.prod(w.shape[1:])
    each = np.tile(np.eye(elements).reshape(elements, *w.shape[1:]), (op.groups, 1, 1, 1))
    (read,) = op.reference(np, np.abs(x), each, offset, *map(np.abs, mask))
    batch, _, *windows = read.shape
    beyond = ((read >= limit) & np.isfinite(read)).reshape(batch, op.groups, elements, *windows).any(axis=2)
    return np.repeat(beyond, len(w) // op.groups, axis=1)
