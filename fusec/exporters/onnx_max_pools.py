"""Export max pooling in training, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import numpy as np
from onnx import TensorProto

from fusec.errors import LoweringError
from fusec.exporters.onnx_emit import Exporter
from fusec.ir import HostArray, Node, print_node
from fusec.ops import MaxPoolBackward, MaxPoolTrain
from fusec.ops.pooling import Pool

Shape = tuple[int, ...]


def max_pool_train(e: Exporter, node: Node, operands: list[str]) -> list[str]:
    """Export max_pool_train: MaxPool gives the index of each maximum in the image, and places are those in the window.

    Raises LoweringError if a window covers padding only, because it has no maximum.
    """
    op, image = cast(MaxPoolTrain, node.op), node.operands[0].type.shape
    pooled = node.results[0].type.shape
    _require_elements(node, image, pooled)
    a = dict(op.attributes)
    y, at = e.several("MaxPool", operands, 2, {"kernel_shape": a.pop("window"), **a})
    place = ""
    for d, starts in enumerate(_starts(op, pooled)):
        pixel = e.op("Mod", e.op("Div", at, e.ints([math.prod(image[3 + d :])])), e.ints([image[2 + d]]))
        tap = e.op("Div", e.op("Sub", pixel, e.ints(starts)), e.ints([op.dilations[d]]))
        place = e.op("Add", e.op("Mul", place, e.ints([op.window[d]])), tap) if place else tap
    return [y, e.op("Cast", place, to=TensorProto.UINT8)]


def pool_gradient(e: Exporter, node: Node, dy: str, x: str) -> str:
    """Export max_pool_backward: add each gradient at the index of the maximum that MaxPool gives, or the given place.

    Raises LoweringError if a window covers padding only, because it has no maximum.
    """
    op, shape, pooled = cast(MaxPoolBackward, node.op), node.result.type.shape, node.operands[0].type.shape
    _require_elements(node, shape, pooled)
    if op.image:
        at = _index_of_places(e, op, x, shape, pooled)
    else:
        a = {name: value for name, value in op.attributes.items() if name not in ("window", "image")}
        _, at = e.several("MaxPool", [x], 2, {"kernel_shape": op.window, **a})
    flat = [e.op("Reshape", v, e.ints([-1])) for v in (at, dy)]
    zeros = e.op("Expand", e.number(0, node), e.ints([math.prod(shape)]))
    added = e.op("ScatterElements", zeros, *flat, axis=0, reduction="add")
    return e.op("Reshape", added, e.ints(shape))


def _index_of_places(e: Exporter, op: MaxPoolBackward, places: str, shape: Shape, pooled: Shape) -> str:
    """Return the index in the flat image of the maximum at each place."""
    place = e.op("Cast", places, to=TensorProto.INT64)
    images = np.arange(math.prod(shape[:2]), dtype=np.int64).reshape(*shape[:2], *[1] * len(op.window))
    index = e.ints(images)
    for d, starts in enumerate(_starts(op, pooled)):
        tap = e.op("Mod", e.op("Div", place, e.ints([math.prod(op.window[d + 1 :])])), e.ints([op.window[d]]))
        pixel = e.op("Add", e.op("Mul", tap, e.ints([op.dilations[d]])), e.ints(starts))
        index = e.op("Add", e.op("Mul", index, e.ints([shape[2 + d]])), pixel)
    return index


def _starts(op: Pool, pooled: Shape) -> Iterator[HostArray]:
    """Yield, for each spatial dim, where the windows along it start in the image, shaped to broadcast to the result."""
    for d, (step, pad) in enumerate(zip(op.strides, op.pads, strict=False)):  # op.pads starts with the start pads
        starts = np.arange(pooled[2 + d], dtype=np.int64) * step - pad
        yield starts.reshape(-1, *[1] * (len(op.window) - 1 - d))


def _require_elements(node: Node, image: Shape, pooled: Shape) -> None:
    """Raise LoweringError if a window covers no element of the image."""
    op = cast(Pool, node.op)
    dims = zip(image[2:], _starts(op, pooled), op.window, op.dilations, strict=True)
    for size, starts, taps, apart in dims:
        places = starts.reshape(-1, 1) + np.arange(taps) * apart
        if not ((places >= 0) & (places < size)).any(axis=1).all():
            raise LoweringError(f"{print_node(node)}: a window over padding alone has no maximum in ONNX")
