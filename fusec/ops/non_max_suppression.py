"""Define non-maximum suppression: choose boxes by score, without those that overlap a chosen box too much."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from fusec.ir import Array, DType, Op, TensorType
from fusec.ops.spec import require, require_arity, require_float
from fusec.system.dataclass import dataclass

_BLOCK = 32  # boxes that are compared together


@dataclass(frozen=True)
class NonMaxSuppression(Op):
    """Indices i64[M, (image, class, box)] of the boxes[N, B, 4] that stay, by scores[N, C, B], and their number i64[].

    Each class of an image keeps its best boxes, at most `most`, so M is N * C * min(most, B); rows after the number are
    zero. A box goes if a chosen one of its class overlaps it by more than `iou`, or if its score is at most `least`;
    with -inf no score is too low. Of equal scores the first is better, and NaN is the worst. Two opposite corners are
    a box, or with `centred` its centre and size. All is computed in fp32, as in onnxruntime.
    """

    most: int
    iou: float = 0.0
    least: float = -math.inf
    centred: bool = False
    name: ClassVar[str] = "non_max_suppression"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 2)
        boxes, scores = operands
        require_float(self.name, boxes)
        require_float(self.name, scores)
        require_boxes(boxes, scores)
        require(self.most >= 0, f"{self.name} keeps {self.most} boxes")
        images, classes, count = scores.shape
        return (
            TensorType((images * classes * min(self.most, count), 3), DType.I64),
            TensorType((), DType.I64),
        )

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        boxes, scores = (operand if xp is np else operand.get() for operand in operands)
        found = self.rows(boxes, scores)
        rows = np.zeros((scores.shape[0] * scores.shape[1] * min(self.most, scores.shape[2]), 3), np.int64)
        rows[: len(found)] = found
        return (xp.asarray(rows), xp.asarray(np.array(len(found), np.int64)))

    def rows(self, boxes: Array, scores: Array) -> Array:
        """Return a row (image, class, box) for each box that stays, in NumPy."""
        with np.errstate(over="ignore"):
            boxes, scores = boxes.astype(np.float32), scores.astype(np.float32)
        corners = _corners(boxes, self.centred)
        found = [
            (image, kind, box)
            for image, classes in enumerate(scores)
            for kind, score in enumerate(classes)
            for box in self._chosen(corners[image], score)
        ]
        return np.array(found, np.int64).reshape(-1, 3)

    def _chosen(self, corners: Array, score: Array) -> list[int]:
        """Return the boxes of one class that stay, by descending score.

        A block of the best boxes is compared with all that are left. Later blocks lack what overlaps a chosen box. The
        boxes that a box overlaps are the bits of an integer, because Python combines these fastest.
        """
        likely = np.arange(len(score))
        if self.least > -math.inf:
            likely = np.flatnonzero(score > np.float32(self.least))
        order = likely[np.argsort(-score[likely], kind="stable")]
        chosen: list[int] = []
        while len(order) and len(chosen) < self.most:
            boxes, removed = corners[order], 0
            close = np.packbits(_overlaps(boxes[:_BLOCK], boxes) > np.float32(self.iou), axis=1, bitorder="little")
            for place, row in enumerate(close):
                if not removed >> place & 1:
                    chosen.append(int(order[place]))
                    removed |= int.from_bytes(row.tobytes(), "little")
            bits = np.frombuffer(removed.to_bytes(close.shape[1], "little"), np.uint8)
            stays = np.unpackbits(bits, count=len(order), bitorder="little") == 0
            order = order[_BLOCK:][stays[_BLOCK:]]
        return chosen[: self.most]


def require_boxes(boxes: TensorType, scores: TensorType) -> None:
    """Check that scores are of boxes. Raises VerifyError if they do not fit."""
    shapes = boxes.shape, scores.shape
    fit = len(shapes[0]) == len(shapes[1]) == 3 and shapes[0] == (shapes[1][0], shapes[1][2], 4)
    floats = boxes.dtype.is_float and scores.dtype.is_float
    require(fit and floats, f"takes [N, boxes, 4] and [N, classes, boxes] of floats, not {boxes}, {scores}")


def _corners(boxes: Array, centred: bool) -> Array:
    """Convert each box to its lower and its upper corner."""
    first, second = boxes[..., :2], boxes[..., 2:]
    with np.errstate(all="ignore"):
        if centred:
            half = second / np.float32(2)
            return np.concatenate([first - half, first + half], axis=-1)
        swapped = first >= second
        return np.concatenate([np.where(swapped, second, first), np.where(swapped, first, second)], axis=-1)


def _overlaps(a: Array, b: Array) -> Array:
    """Divide the area of the intersection of each box of `a` with each of `b` by that of their union.

    The result is -1 where there is no area. NaN compares as it does in onnxruntime.
    """
    with np.errstate(all="ignore"):
        sides: list[Array] = []
        for low, high in ((0, 2), (1, 3)):
            lowest, highest = b[:, low], b[:, high]
            start = np.where(a[:, low, None] < lowest, lowest, a[:, low, None])
            end = np.where(highest < a[:, high, None], highest, a[:, high, None])
            sides.append(np.where(end <= start, np.float32(0), end - start))
        shared = sides[0] * sides[1]
        areas = [(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) for boxes in (a, b)]
        united = areas[0][:, None] + areas[1] - shared
        none = (shared <= 0) | (areas[0] <= 0)[:, None] | (areas[1] <= 0) | (united <= 0)
        return np.where(none, np.float32(-1), shared / united)
