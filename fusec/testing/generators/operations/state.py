"""Draw random_bits and all_finite."""

from __future__ import annotations

import numpy as np

from fusec.ir import DType, TensorType
from fusec.ops import AllFinite, RandomBits
from fusec.testing.generators.graph_builder import RandomGraph


def random_bits(b: RandomGraph) -> None:
    state = b.input(TensorType((2,), DType.U64))
    b.values.pop()  # no other op may read the state, because it would overflow
    bits = b.add(RandomBits(b.shape(0, 3), b.pick([0, 1, 7])), state)
    b.values.pop()  # nor these bits, which overflow 16-bit floats
    b.pointwise("shift_right", bits, b.graph.constant(np.uint32(24)))


def all_finite(b: RandomGraph) -> None:
    """Draw all_finite of inputs, because a computed value can overflow in one precision and not in another."""
    inputs = [v for v in b.graph.inputs if v.type.dtype.is_float and not v.type.dtype.is_narrow]
    if not inputs:
        inputs = [b.input(TensorType(b.shape(0, 3), b.dtype))]
    b.add(AllFinite(), *(b.pick(inputs) for _ in range(b.pick([1, 2, 3]))))
