"""Import ops whose result shape depends on values (NonZero, Compress, …). NumPy computes them on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusec.frontends.onnx.emit import Emitter, Table
from fusec.frontends.onnx.tensors import dtype_of
from fusec.ir import Array, Value
from fusec.ops import Gather
from fusec.ops.spec import normalize_axis, require

_BLOCK = 32  # boxes that NonMaxSuppression compares together


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

    A block of the best boxes is compared with all that are left. Later blocks lack what overlaps a chosen box. The
    boxes that a box overlaps are the bits of an integer, because Python combines these fastest.
    """
    likely = np.arange(len(score)) if least is None else np.flatnonzero(score > least)
    order = likely[np.argsort(-score[likely], kind="stable")]
    chosen: list[int] = []
    while len(order) and len(chosen) < limit:
        boxes, removed = corners[order], 0
        close = np.packbits(_overlaps(boxes[:_BLOCK], boxes) > overlap, axis=1, bitorder="little")
        for place, row in enumerate(close):
            if not removed >> place & 1:
                chosen.append(int(order[place]))
                removed |= int.from_bytes(row.tobytes(), "little")
        bits = np.frombuffer(removed.to_bytes(close.shape[1], "little"), np.uint8)
        stays = np.unpackbits(bits, count=len(order), bitorder="little") == 0
        order = order[_BLOCK:][stays[_BLOCK:]]
    return chosen[: max(limit, 0)]


def _corners(boxes: Array, centred: bool) -> Array:
    """Convert each box to its lower and its upper corner."""
    if centred:
        low, high = boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2
    else:
        low, high = np.minimum(boxes[..., :2], boxes[..., 2:]), np.maximum(boxes[..., :2], boxes[..., 2:])
    return np.concatenate([low, high], axis=-1)


def _overlaps(a: Array, b: Array) -> Array:
    """Divide the area of the intersection of each box of `a` with each of `b` by that of their union.

    The result is NaN for two boxes without area.
    """
    sides: list[Array] = []
    for low, high in ((0, 2), (1, 3)):
        side = np.minimum(a[:, high, None], b[:, high]) - np.maximum(a[:, low, None], b[:, low])
        sides.append(np.maximum(side, 0, out=side))
    shared = np.multiply(*sides, out=sides[0])
    areas = [(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) for boxes in (a, b)]
    return np.divide(shared, areas[0][:, None] + areas[1] - shared, out=shared)


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
