"""Find where rounding may move a result across a discontinuity.

Examples are a comparison, a floor, and an infinity times zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusec.ir import Node, Op
from fusec.ops import Cast
from fusec.testing.error_bounds.op_rounding import (
    PRODUCTS,
    at_zero,
    infinite_divisors,
    is_move,
    label_of,
    lost_in_attention,
    undefined,
    vanished_slope,
    visible_below_masked,
)
from fusec.testing.error_bounds.perturbed import SAFETY, Rounding, Samples

Array = np.ndarray[Any, Any]


def flips(node: Node, operands: list[Samples], result: Array, rounding: Rounding) -> Array | None:
    """Find the elements whose result may be on the other side of a discontinuity; None if there are none."""
    op = node.op
    label = label_of(op)
    plain = [s.plain for s in operands]
    nowhere = _undefined_cast(op, operands) if isinstance(op, Cast) else at_zero(op, plain)
    if rounding.meaning and (low := visible_below_masked(op, plain)) is not None:
        nowhere = low
    if not rounding.meaning and (huge := infinite_divisors(op, plain)) is not None:
        nowhere = huge if nowhere is None else nowhere | huge
    if not rounding.meaning and result.size:
        attends = op.name.startswith("attention")
        lost = _lost_in_attention(op, operands, result) if attends else vanished_slope(op, plain)
        nowhere = nowhere if lost is None else lost if nowhere is None else nowhere | lost
    unsure = not rounding.meaning and not all(s.exact for s in operands)
    if unsure and op.name in (*PRODUCTS, "mul") and any(np.isinf(x).any() for x in plain):
        # an infinity times a number that may be rounded to zero
        nowhere = ~np.isfinite(result) if nowhere is None else nowhere | ~np.isfinite(result)
    if op.name == "resize" and not rounding.meaning and not np.isfinite(plain[0]).all() and not is_move(op):
        # NaN or an infinity times a weight of zero, a term that some implementations leave out
        nowhere = np.ones(result.shape, np.bool_)
    if label is None or not any(v.type.dtype.is_float for v in node.operands):
        return nowhere
    if all(s.exact for s in operands):
        return nowhere
    reach = [SAFETY * s.spread() if s.plain.dtype.kind == "f" else None for s in operands]
    here = label(op, plain)
    flipped = np.zeros(result.shape, np.bool_) if nowhere is None else nowhere
    for signs in ((1, 1), (-1, -1)) if len(plain) == 1 else ((1, 1), (-1, -1), (1, -1), (-1, 1)):
        moved = [x if r is None else _moved(x, s * r) for x, r, s in zip(plain, reach, signs, strict=False)]
        there = label(op, moved)
        flipped = flipped | ~((there == here) | ((there != there) & (here != here)))
    return flipped if flipped.any() else None


def _moved(x: Array, by: Array) -> Array:
    """Add `by` to numbers; a NaN that may be any number becomes an infinity."""
    return np.where(np.isnan(x) & np.isinf(by), by, x + by)


def _undefined_cast(op: Cast, operands: list[Samples]) -> Array | None:
    """Find where a cast may give any number.

    Either no integer is near, or the integer that becomes a float may be another one. In the second case a rule that
    removes a pair of casts keeps the float, which may be NaN.
    """
    (value,) = operands
    if value.plain.dtype.kind not in "iu" or not op.to.is_float or value.exact:
        return undefined(op, [value.plain])
    unsure = value.spread() > 0
    return unsure if unsure.any() else None


def _lost_in_attention(op: Op, operands: list[Samples], result: Array) -> Array | None:
    """Find what a fused attention may lose.

    The samples are checked, too: an operand may overflow its storage there.
    """
    found: Array | None = None
    for arrays in zip(*([s.plain, *s.disturbed] for s in operands), strict=True):
        lost = lost_in_attention(op, list(arrays), result)
        found = lost if found is None else found if lost is None else found | lost
    return found
