"""Import ops whose result shape depends on values (NonZero, Compress, …). NumPy computes them on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusec.frontends.onnx.emit import Emitter, Table
from fusec.frontends.onnx.tensors import dtype_of
from fusec.ir import Array, Value
from fusec.ops import Gather
from fusec.ops.spec import normalize_axis, require

_BLOCK = 64  # boxes that NonMaxSuppression compares together


def non_zero(g: Emitter, x: Value, /) -> Value:
    def compute(arrays: Sequence[Array]) -> tuple[Array, ...]:
        return (np.array(np.nonzero(np.atleast_1d(arrays[0])), np.int64),)

    return g.on_host("the operand of NonZero", compute, x)[0]


def compress(g: Emitter, x: Value, condition: Value, /, *, axis: int | None = None) -> Value:
    """Import Compress. The host makes indices of the condition only; x stays where it is."""
    if axis is None:
        x, axis = g.reshape(x, (x.type.size,)), 0
    axis = normalize_axis(axis, x.type.rank)
    size = x.type.shape[axis]

    def compute(arrays: Sequence[Array]) -> tuple[Array, ...]:
        chosen = np.flatnonzero(arrays[0]).astype(np.int64)
        require(not len(chosen) or chosen[-1] < size, f"the condition is longer than dim {axis} of {x.type}")
        return (chosen,)

    return g(Gather(axis), x, *g.on_host("the condition", compute, condition))


def unique(g: Emitter, x: Value, /, *, axis: int | None = None, sorted: int = 1) -> tuple[Value, ...]:
    if axis is not None:
        axis = normalize_axis(axis, x.type.rank)

    def compute(arrays: Sequence[Array]) -> tuple[Array, ...]:
        items, first, inverse, counts = np.unique(
            arrays[0], return_index=True, return_inverse=True, return_counts=True, axis=axis
        )
        inverse = inverse.reshape(-1)
        if not sorted:  # in the order of their first occurrence
            order = np.argsort(first)
            rank = np.empty_like(order)
            rank[order] = np.arange(len(order))
            items = np.take(items, order, axis=axis or 0)
            first, counts, inverse = first[order], counts[order], rank[inverse]
        return (items, *(np.asarray(a, np.int64) for a in (first, inverse, counts)))

    return g.on_host("the operand of Unique", compute, x)


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
    given = {"max_output_boxes_per_class": most, "iou_threshold": iou, "score_threshold": least}
    limits = {name: value for name, value in given.items() if value is not None}
    for name, value in limits.items():
        require(value.type.size == 1, f"{name} must be one number, not of shape {list(value.type.shape)}")

    def compute(arrays: Sequence[Array]) -> tuple[Array, ...]:
        numbers = {name: a.reshape(-1)[0].item() for name, a in zip(limits, arrays[2:], strict=True)}
        corners = _corners(arrays[0].astype(np.float64), bool(center_point_box))
        limit, overlap = int(numbers.get("max_output_boxes_per_class", 0)), numbers.get("iou_threshold", 0.0)
        rows = [
            (image, kind, box)
            for image, classes in enumerate(arrays[1])
            for kind, score in enumerate(classes)
            for box in _suppressed(corners[image], score, limit, overlap, numbers.get("score_threshold"))
        ]
        return (np.array(rows, np.int64).reshape(-1, 3),)

    return g.on_host("the boxes and scores", compute, boxes, scores, *limits.values())[0]


def _suppressed(corners: Array, score: Array, limit: int, overlap: float, least: float | None) -> list[int]:
    """Return the boxes of one class that stay, by descending score.

    Boxes are compared block by block, with those chosen before and with each other, which NumPy does fastest.
    """
    likely = np.arange(len(score)) if least is None else np.flatnonzero(score > least)
    order = likely[np.argsort(-score[likely], kind="stable")]
    chosen = order[:0]
    for start in range(0, len(order), _BLOCK):
        if len(chosen) >= limit:
            break
        block = order[start : start + _BLOCK]
        block = block[(_overlaps(corners[block], corners[chosen]) <= overlap).all(axis=1)]
        too_close = _overlaps(corners[block], corners[block]) > overlap
        stays = np.ones(len(block), np.bool_)
        for i in range(len(block)):
            if stays[i]:
                stays[i + 1 :] &= ~too_close[i, i + 1 :]
        chosen = np.concatenate([chosen, block[stays]])
    return [int(box) for box in chosen[: max(limit, 0)]]


def _corners(boxes: Array, centred: bool) -> Array:
    """Convert each box to its lower and its upper corner."""
    if centred:
        low, high = boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2
    else:
        low, high = np.minimum(boxes[..., :2], boxes[..., 2:]), np.maximum(boxes[..., :2], boxes[..., 2:])
    return np.concatenate([low, high], axis=-1)


def _overlaps(a: Array, b: Array) -> Array:
    """Divide the area of the intersection of each box of `a` with each of `b` by that of their union."""
    sides = np.minimum(a[:, None, 2:], b[None, :, 2:]) - np.maximum(a[:, None, :2], b[None, :, :2])
    shared = np.prod(np.maximum(sides, 0), axis=-1)
    total = np.prod(a[:, 2:] - a[:, :2], axis=1)[:, None] + np.prod(b[:, 2:] - b[:, :2], axis=1)[None] - shared
    return np.divide(shared, total, out=np.zeros_like(shared), where=total > 0)


def bit_cast(g: Emitter, x: Value, /, *, to: int) -> Value:
    dtype = dtype_of(to)
    require(dtype.itemsize == x.type.dtype.itemsize, f"{x.type.dtype.value} and {dtype.value} differ in size")
    if dtype.is_narrow or x.type.dtype.is_narrow:
        full = {d for d in (dtype, x.type.dtype) if d.is_narrow} <= {d for d in (dtype, x.type.dtype) if "8" in d.value}
        require(full, f"{x.type.dtype.value} to {dtype.value} is not supported")

    def compute(arrays: Sequence[Array]) -> tuple[Array, ...]:
        return (np.ascontiguousarray(arrays[0]).view(dtype.numpy).reshape(x.type.shape),)

    return g.on_host("the operand of BitCast", compute, x)[0]


TABLE: Table = {
    ("NonZero", 9): non_zero,
    ("Compress", 9): compress,
    ("Unique", 11): unique,
    ("NonMaxSuppression", 10): non_max_suppression,
    ("BitCast", 26): bit_cast,
}
