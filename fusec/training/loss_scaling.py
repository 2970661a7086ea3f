"""Scale the loss so that gradients do not vanish in fp16, and say whether all are finite."""

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
    """Gradients of a loss by way of a larger one, whose own do not vanish in fp16; and whether all are finite.

    The factor is state: halved where a gradient is not finite (pass the second result to an optimiser as `keep`),
    doubled after `growth` steps in which all were.
    """
    b = loss.builder
    scale, good = b.parameter("loss.scale", np.float32(start)), b.parameter("loss.good", np.zeros((), np.float32))
    found = backward(loss.astype(DType.F32) * scale, parameters)
    gradients = [g.astype(DType.F32) / scale for g in found]
    finite = b.apply(AllFinite(), *map(_narrowest, found))
    steps = b.where(finite, good + 1.0, 0.0)
    full = steps >= float(growth)
    b.update(good, b.where(full, 0.0, steps))
    b.update(scale, b.where(finite, b.where(full, scale * 2.0, scale), (scale * 0.5).maximum(1.0)))
    return gradients, finite


def _narrowest(gradient: Tensor) -> Tensor:
    """What a gradient was cast from, if it was narrower: as finite, and the cast need not be stored."""
    node = gradient.value.node
    if node is None or not isinstance(node.op, Cast):
        return gradient
    source = node.operands[0]
    fits = source.type.dtype.is_float and source.type.dtype.itemsize <= gradient.dtype.itemsize
    return Tensor(gradient.builder, source) if fits else gradient
