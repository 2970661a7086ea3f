"""Import ops whose result shape depends on values (NonZero, Compress, …), if these values are known at import."""

from __future__ import annotations

import numpy as np

from fusec.frontends.onnx.emit import Emitter, Table
from fusec.frontends.onnx.tensors import dtype_of
from fusec.ir import Array, Value
from fusec.ops import Gather
from fusec.ops.spec import normalize_axis, require


def non_zero(g: Emitter, x: Value, /) -> Value:
    array = np.atleast_1d(g.array(x, "the operand of NonZero"))
    return g.constant(np.array(np.nonzero(array), np.int64))


def compress(g: Emitter, x: Value, condition: Value, /, *, axis: int | None = None) -> Value:
    """Import Compress. The condition must be known at import, x need not be."""
    chosen = np.flatnonzero(g.array(condition, "the condition")).astype(np.int64)
    if axis is None:
        x, axis = g.reshape(x, (x.type.size,)), 0
    axis = normalize_axis(axis, x.type.rank)
    require(not len(chosen) or chosen[-1] < x.type.shape[axis], f"the condition is longer than dim {axis} of {x.type}")
    return g(Gather(axis), x, g.constant(chosen))


def unique(g: Emitter, x: Value, /, *, axis: int | None = None, sorted: int = 1) -> tuple[Value, ...]:
    array = g.array(x, "the operand of Unique")
    if axis is not None:
        axis = normalize_axis(axis, array.ndim)
    items, first, inverse, counts = np.unique(
        array, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not sorted:  # in the order of their first occurrence
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        items = np.take(items, order, axis=axis or 0)
        first, counts, inverse = first[order], counts[order], rank[inverse]
    return (g.constant(items), *(g.constant(np.asarray(a, np.int64)) for a in (first, inverse, counts)))


def non_max_suppression(
    g: Emitter,
    boxes: Value,
    scores: Value,
    most: Value | None = None,
    iou: Value | None = None,
    least: Value | None = None,
    /,
    *,
    center_point_box: int = 0,
) -> Value:
    """Import NonMaxSuppression: choose boxes by descending score, without those that overlap a chosen box too much.

    most: number of boxes per class.
    iou: largest overlap.
    least: smallest score.

    Returns one row [batch, class, box] for each box.
    """
    shapes = boxes.type.shape, scores.type.shape
    fit = len(shapes[0]) == len(shapes[1]) == 3 and shapes[0] == (shapes[1][0], shapes[1][2], 4)
    floats = boxes.type.dtype.is_float and scores.type.dtype.is_float
    require(fit and floats, f"takes [N, boxes, 4] and [N, classes, boxes] of floats, not {boxes.type}, {scores.type}")
    limit = 0 if most is None else int(g.number(most, "max_output_boxes_per_class"))
    overlap = 0.0 if iou is None else g.number(iou, "iou_threshold")
    all_boxes, all_scores = g.array(boxes, "the boxes"), g.array(scores, "the scores")
    rows: list[tuple[int, int, int]] = []
    for image, corners in enumerate(_corners(all_boxes.astype(np.float64), bool(center_point_box))):
        for kind, score in enumerate(all_scores[image]):
            order = [int(i) for i in np.argsort(-score, kind="stable")]
            if least is not None:
                order = [i for i in order if score[i] > g.number(least, "score_threshold")]
            chosen: list[int] = []
            for i in order:
                if len(chosen) >= limit:
                    break
                if all(_overlap(corners[i], corners[j]) <= overlap for j in chosen):
                    chosen.append(i)
            rows += [(image, kind, i) for i in chosen]
    return g.constant(np.array(rows, np.int64).reshape(-1, 3))


def _corners(boxes: Array, centred: bool) -> Array:
    """Convert each box to its lower and its upper corner."""
    if centred:
        low, high = boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2
    else:
        low, high = np.minimum(boxes[..., :2], boxes[..., 2:]), np.maximum(boxes[..., :2], boxes[..., 2:])
    return np.concatenate([low, high], axis=-1)


def _overlap(a: Array, b: Array) -> float:
    """Divide the area of the intersection of two boxes by that of their union."""
    sides = np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])
    shared = float(np.prod(np.maximum(sides, 0)))
    total = float(np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2])) - shared
    return shared / total if total > 0 else 0.0


def bit_cast(g: Emitter, x: Value, /, *, to: int) -> Value:
    array, dtype = g.array(x, "the operand of BitCast"), dtype_of(to)
    require(dtype.itemsize == x.type.dtype.itemsize, f"{x.type.dtype.value} and {dtype.value} differ in size")
    if dtype.is_narrow or x.type.dtype.is_narrow:
        full = {d for d in (dtype, x.type.dtype) if d.is_narrow} <= {d for d in (dtype, x.type.dtype) if "8" in d.value}
        require(full, f"{x.type.dtype.value} to {dtype.value} is not supported")
    return g.constant(np.ascontiguousarray(array).view(dtype.numpy).reshape(array.shape))


TABLE: Table = {
    ("NonZero", 9): non_zero,
    ("Compress", 9): compress,
    ("Unique", 11): unique,
    ("NonMaxSuppression", 10): non_max_suppression,
    ("BitCast", 26): bit_cast,
}
