"""Import ops whose result shape depends on values (NonZero, Compress, …).

NumPy computes most of them on the host, and Pillow decodes images there. The device computes NonMaxSuppression, and the
host reads how many boxes stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, Table
from fusec.frontends.onnx.model_file.tensors import dtype_of
from fusec.frontends.onnx.movement import image_files
from fusec.ir import Array, DType, Value
from fusec.ops import Gather, NonMaxSuppression
from fusec.ops.non_max_suppression import require_boxes
from fusec.ops.spec import normalize_axis, require

MAX_ROWS = 1 << 21  # of the result of a NonMaxSuppression on the device; it takes 24 bytes a row


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
    require_boxes(boxes.type, scores.type)
    given = {"max_output_boxes_per_class": most, "iou_threshold": iou, "score_threshold": least}
    limits = {name: value for name, value in given.items() if value is not None}
    for name, value in limits.items():
        require(value.type.size == 1, f"{name} must be one number, not of shape {list(value.type.shape)}")

    def op_of(arrays: Sequence[Array]) -> NonMaxSuppression:
        numbers = {name: a.reshape(-1)[0].item() for name, a in zip(limits, arrays, strict=True)}
        return NonMaxSuppression(
            max(0, int(numbers.get("max_output_boxes_per_class", 0))),
            numbers.get("iou_threshold", 0.0),
            numbers.get("score_threshold", -math.inf),
            bool(center_point_box),
        )

    def compute(arrays: Sequence[Array]) -> tuple[Array, ...]:
        return (op_of(arrays[2:]).rows(*arrays[:2]),)

    known = [value.literal for value in limits.values() if value.literal is not None]
    if len(known) == len(limits) and (boxes.literal is None or scores.literal is None):
        op = op_of([literal.array for literal in known])
        if 0 < op.infer(boxes.type, scores.type)[0].shape[0] <= MAX_ROWS:
            return g.bounded("the number of boxes that stay", op, boxes, scores)
    return g.on_host("the boxes and scores", compute, boxes, scores, *limits.values())[0]


def bit_cast(g: Emitter, x: Value, /, *, to: int) -> Value:
    dtype = dtype_of(to)
    require(dtype.itemsize == x.type.dtype.itemsize, f"{x.type.dtype.value} and {dtype.value} differ in size")
    if dtype.is_narrow or x.type.dtype.is_narrow:
        full = {d for d in (dtype, x.type.dtype) if d.is_narrow} <= {d for d in (dtype, x.type.dtype) if "8" in d.value}
        require(full, f"{x.type.dtype.value} to {dtype.value} is not supported")

    def compute(arrays: Sequence[Array]) -> tuple[Array, ...]:
        return (np.ascontiguousarray(arrays[0]).view(dtype.numpy).reshape(x.type.shape),)

    return g.on_host("the operand of BitCast", compute, x)[0]


def image_decoder(g: Emitter, encoded: Value, /, *, pixel_format: str = "RGB") -> Value:
    """Import ImageDecoder. Pillow is looked for here, so that a model that needs it fails before its first call."""
    kind = encoded.type
    require(kind.dtype is DType.U8 and kind.rank == 1, f"needs the bytes of a file, u8 of one dim, not {kind}")
    formats = image_files.MODES
    require(pixel_format in formats, f"pixel_format must be one of {', '.join(formats)}, not {pixel_format!r}")
    image_files.require_pillow()

    def compute(arrays: Sequence[Array]) -> tuple[Array, ...]:
        return (image_files.decode(arrays[0].tobytes(), pixel_format),)

    return g.on_host("the bytes of the image", compute, encoded)[0]


TABLE: Table = {
    ("NonZero", 9): non_zero,
    ("Compress", 9): compress,
    ("Unique", 11): unique,
    ("NonMaxSuppression", 10): non_max_suppression,
    ("BitCast", 26): bit_cast,
    ("ImageDecoder", 20): image_decoder,
}
