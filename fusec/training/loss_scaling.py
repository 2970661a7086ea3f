"""Scale the loss so that gradients do not become zero in fp16, and test if all of them are finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusec.builder import Tensor
from fusec.gradients import backward
from fusec.ir import DType
from fusec.ops import AllFinite, Cast


def scaled_backward(
    loss: Tensor, parameters: Sequence[Tensor], growth: int = 2000, start: float = 2.0**15
) -> tuple[list[Tensor], Tensor]:
    """Compute gradients of a loss that is scaled up, because small gradients become zero in fp16.

    Returns the gradients of the unscaled loss, and a bool: all of them are finite. Pass the bool to an optimiser as
    `keep`. The scale is a parameter of the graph. A step with a gradient that is not finite halves it.

    growth: number of finite steps in a row that doubles the scale.
    start: first value of the scale.
    """
    b = loss.builder
    scale, good = b.parameter("loss.scale", np.float32(start)), b.parameter("loss.good", np.zeros((), np.float32))
    found = backward(loss.astype(DType.F32) * scale, parameters)
    gradients = [g.astype(DType.F32) / scale for g in found]
    finite = b.apply(AllFinite(), *map(narrowest, found))
    steps = b.where(finite, good + 1.0, 0.0)
    full = steps >= float(growth)
    b.update(good, b.where(full, 0.0, steps))
    b.update(scale, b.where(finite, b.where(full, scale * 2.0, scale), (scale * 0.5).maximum(1.0)))
    return gradients, finite


def narrowest(gradient: Tensor) -> Tensor:
    """Return the tensor that a gradient was cast from, if it is no wider.

    It is finite where the gradient is, and the cast then need not reach memory.
    """
    node = gradient.value.node
    if node is None or not isinstance(node.op, Cast):
        return gradient
    source = node.operands[0]
    fits = source.type.dtype.is_float and source.type.dtype.itemsize <= gradient.dtype.itemsize
    return Tensor(gradient.builder, source) if fits else gradient
