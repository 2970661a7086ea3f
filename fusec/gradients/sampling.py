"""Differentiate the op that reads images between their pixels."""

from __future__ import annotations

import itertools
import math

import numpy as np

from fusec.builder import Tensor
from fusec.gradients.core import BackwardStep, Rule, by_formula
from fusec.ops import Gather, GridSample
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


RULES: dict[str, Rule] = {"grid_sample": by_formula(_grid_sample)}
