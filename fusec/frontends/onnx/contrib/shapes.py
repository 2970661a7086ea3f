"""Import ops that make or change shapes: Range, ExpandDims."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.frontends.onnx.movement.shape import unsqueeze
from fusec.frontends.onnx.ops.constant import range_
from fusec.ir import Value


def range_of(g: Emitter, start: Value, limit: Value, delta: Value | None = None, /) -> Value:
    return range_(g, start, limit, g.constant(np.ones((), start.type.dtype.numpy)) if delta is None else delta)


def expand_dims(g: Emitter, x: Value, axis: Value, /) -> Value:
    return unsqueeze(g, x, g.reshape(axis, (1,)))


TABLE: Mapping[str, OpFunction] = {
    "Range": range_of,
    "ExpandDims": expand_dims,
}
