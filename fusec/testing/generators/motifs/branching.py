"""Draw groups of ops that a partitioner can get wrong: values that leave a possible partition, or branch and join."""

from __future__ import annotations

from fusec.ops import Concat, MaxPool, Reduce, Slice, Softmax, Split
from fusec.testing.generators.graph_builder import RandomGraph, Unfit
from fusec.testing.generators.motifs.layers import ACTIVATIONS, epilogue
from fusec.testing.generators.operations.pointwise import draw_pointwise
from fusec.testing.generators.operations.products import multiply
from fusec.testing.generators.operations.windows import convolve


def escape(b: RandomGraph) -> None:
    """Draw a possible partition with an inner value that an op outside also reads."""
    x = b.image(3, 4)
    anchored = convolve(b, x, keep_size=True) if b.chance(70) else multiply(b, x)
    inner = draw_pointwise(b, b.pick(ACTIVATIONS), anchored)
    b.add(Softmax(-1), inner if b.chance(70) else anchored)
    epilogue(b, inner, 2)


def cycle(b: RandomGraph) -> None:
    """Draw a path that leaves a possible partition and returns: a partition of both ends would make a cycle."""
    x = b.float_value(2, 4)
    if x.type.size == 0:
        raise Unfit("an empty value")
    anchored = convolve(b, x, keep_size=True) if x.type.rank > 2 else multiply(b, x, x.type.shape[-1])
    y = draw_pointwise(b, b.pick(ACTIVATIONS), anchored) if b.chance(60) else anchored
    kind = b.below(3)
    if kind == 0:
        outside = b.add(Softmax(-1), y)
    elif kind == 1 and y.type.rank > 2:
        n = y.type.rank - 2
        outside = b.add(MaxPool((3,) * n, (1,) * n, (1,) * 2 * n, (1,) * n), y)
    else:
        outside = b.add(Reduce("max", (y.type.rank - 1,)), y)
    if b.chance(40):
        outside = draw_pointwise(b, b.pick(ACTIVATIONS), outside)
    epilogue(b, b.pointwise(b.pick(["add", "mul"]), y, outside), 2)


def diamond(b: RandomGraph) -> None:
    """Draw two branches of one value that join again."""
    x = b.float_value()
    left, right = (draw_pointwise(b, b.pick(ACTIVATIONS), x) for _ in range(2))
    if b.chance(25):
        left = draw_pointwise(b, b.pick(ACTIVATIONS), left)
    b.pointwise(b.pick(["add", "mul", "sub", "max", "div"]) if b.chance(60) else "add", left, right)


def branches(b: RandomGraph) -> None:
    """Draw a value that is split into parts, and a concat of the parts after separate ops."""
    x = b.float_value(1, 4)
    axis = b.below(x.type.rank)
    size = x.type.shape[axis]
    if size < 2:
        raise Unfit("nothing to split")
    first = 1 + b.below(size - 1) if size % 2 or b.chance(50) else size // 2
    if b.chance(50):
        parts = list(b.insert(Split(axis, (first, size - first)), x).results)
    else:
        parts = []
        for start, length in ((0, first), (first, size - first)):
            starts = tuple(start if d == axis else 0 for d in range(x.type.rank))
            sizes = tuple(length if d == axis else s for d, s in enumerate(x.type.shape))
            parts.append(b.add(Slice(starts, sizes, (1,) * x.type.rank), x))
    if b.chance(40) and parts[0].type.shape == parts[1].type.shape:  # halves, joined along any axis
        b.insert(Concat(b.below(x.type.rank)), *parts)
        return
    if b.chance(70):
        parts = [draw_pointwise(b, b.pick(ACTIVATIONS), p) if b.chance(60) else p for p in parts]
    b.insert(Concat(axis), *(parts[::-1] if b.chance(40) else parts))
