"""Draw steps for the kernels of pointwise ops, and of ops that move elements."""

from __future__ import annotations

import numpy as np

from fusec.ir import DType, TensorType
from fusec.ops import Cast, Scatter, pw
from fusec.testing.generators.graph_builder import RandomGraph
from fusec.testing.generators.motifs.kernels.parts import image_input, image_side, op_with_epilogue
from fusec.testing.generators.motifs.layers import pointwise_sequence
from fusec.testing.generators.operations import DRAWS


def pointwise(b: RandomGraph) -> None:
    """Draw a sequence of pointwise ops."""
    with b.focused(b.input(TensorType(b.shape(1, 4), b.dtype))):
        pointwise_sequence(b)


def multi_tensor(b: RandomGraph) -> None:
    """Draw the same update of several parameters, with one rate for all and a gradient for each."""
    rate = b.input(TensorType((), DType.F32)) if b.chance(60) else b.constant((), DType.F32)
    kinds = [b.pick(["add", "mul", "sub", "max"]) for _ in range(b.between(1, 3))]
    halves = b.chance(30)
    for _ in range(b.between(2, 3)):
        shape = tuple(b.pick([3, 8, 5, 17, 33]) for _ in range(b.between(1, 2)))
        weight = b.input(TensorType(shape, DType.F32))
        gradient = b.constant(shape, DType.F32) if len(b.graph.inputs) > 5 else b.input(weight.type)
        y = b.insert(pw("mul"), gradient, rate).result
        for kind in kinds:
            y = b.insert(pw(kind), weight, y).result
        if halves:
            b.add(Cast(DType.F16), y)


def gather_resize(b: RandomGraph) -> None:
    """Draw a resize, a gather, a pad or a dilate, with pointwise ops after it."""
    x = image_input(b, b.pick([4, 8, 3]), b.pick([3, 4, 5]), b.pick([3, 4, 6]))
    op_with_epilogue(b, x, b.pick(["resize", "gather", "pad", "dilate"]))


def grid_sample(b: RandomGraph) -> None:
    """Draw an image that is read between its pixels, with pointwise ops after it."""
    op_with_epilogue(b, image_input(b, b.pick([4, 8, 3]), image_side(b), image_side(b)), "grid_sample")


def scatter(b: RandomGraph) -> None:
    """Draw a scatter of more rows than one thread compares, or of a few. Indices repeat only where they may."""
    count, width = b.pick([3, 17, 300, 1100]), b.pick([1, 1, 3])
    kind = b.pick(["none", "add", "mul", "max", "min"] if count < 100 else ["none", "add", "max", "min"])
    places = b.pick([5, 40]) if kind != "none" else 2 * count
    x = b.bounded(b.input(TensorType((places, width), b.dtype)), -1.0, 1.0)
    at = list(b.permutation(places))[:count] if kind == "none" else [b.below(places) for _ in range(count)]
    indices = b.graph.constant(np.array([i - places if b.chance(20) else i for i in at], np.int64))
    updates = b.bounded(b.fresh(TensorType((count, width), b.dtype)), -1.0, 1.0)
    b.add(Scatter(kind), x, indices, updates)


def all_finite(b: RandomGraph) -> None:
    """Draw a test for NaN and infinities in several tensors."""
    for shape in ((b.pick([5, 33, 300]),), (b.pick([2, 3]), b.pick([4, 129]))):
        b.input(TensorType(shape, b.pick([DType.F32, DType.F16, DType.BF16])))
    DRAWS["all_finite"](b)
