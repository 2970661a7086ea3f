"""Elements moved back and forth, with work between: what views are moved through."""

from __future__ import annotations

import math

from fusec.ir import TensorType
from fusec.ops import Concat, Expand, Pad, Reduce, Reshape, Slice, Transpose
from fusec.testing.generators.graph_builder import Builder
from fusec.testing.generators.motifs.layers import ACTIVATIONS
from fusec.testing.generators.operations import DRAWS
from fusec.testing.generators.operations.pointwise import draw_pointwise
from fusec.testing.generators.operations.shapes import reshaped, turned


def shuffle(b: Builder) -> None:
    """Reshape, transpose, reshape, pointwise ops between them: what views are moved through."""
    x = b.float_value(2, 5)
    shape = x.type.shape
    for _ in range(b.between(1, 4)):
        kind = b.below(4)
        if kind == 0:
            x = reshaped(b, x)
        elif kind == 1:
            x = turned(b, x)
        elif kind == 2:
            x = draw_pointwise(b, b.pick(ACTIVATIONS), x)
        else:
            x = b.pointwise(b.pick(["add", "mul"]), x, b.beside(x))
    if x.type.size == TensorType(shape, x.type.dtype).size and b.chance(50):
        b.add(Reshape(shape), x)


_IN_A_ROW = (
    *("slice", "pad", "cast", "concat", "expand", "reduce", "transpose", "reshape", "max_pool", "avg_pool"),
    *("gather", "split", "resize"),
)


def row(b: Builder) -> None:
    """Ops that move elements, one on the result of the other: most often the same twice, as rules join them."""
    b.focus = b.float_value(1, 5) if b.chance(70) else b.some()
    try:
        name = b.pick(_IN_A_ROW)
        for _ in range(2 + b.below(2)):
            DRAWS[name](b)
            b.focus = b.values[-1]
            name = name if b.chance(60) else b.pick(_IN_A_ROW)
    finally:
        b.focus = None


def padded_pool(b: Builder) -> None:
    """An explicit pad in front of a pool or convolution, of zeros or of what a pool ignores."""
    x = b.image(3, 4)
    spatial = x.type.rank - 2
    pads = tuple(b.below(2) for _ in range(2 * spatial))
    value = b.pick([0.0, 0.0, -math.inf, 1.0])
    padded = b.add(Pad((0, 0, *pads[:spatial], 0, 0, *pads[spatial:]), "constant", value), x)
    b.focus = padded
    try:
        DRAWS[b.pick(["avg_pool", "max_pool", "conv"])](b)
    finally:
        b.focus = None


def turned_together(b: Builder) -> None:
    """An op on values that were all transposed alike: the transpose may follow it."""
    x = b.float_value(2, 4)
    rank = x.type.rank
    perm = b.permutation(rank)
    y = b.add(Transpose(perm), x)
    kind = b.below(5)
    if kind == 0:
        b.add(Concat(b.below(rank)), y, b.add(Transpose(perm), b.like(x)))
    elif kind == 1:
        b.add(Pad(tuple(b.below(3) for _ in range(2 * rank)), "constant", b.pick([0.0, 1.0])), y)
    elif kind == 2:
        sizes = tuple(1 + b.below(d) if d else 0 for d in y.type.shape)
        b.add(Slice((0,) * rank, sizes, (1,) * rank), y)
    elif kind == 3:
        b.add(Reduce(b.pick(["sum", "max"]), (b.below(rank),)), y)
    else:
        draw_pointwise(b, b.pick(("add", "mul", *ACTIVATIONS)), y)


def sliced_twice(b: Builder) -> None:
    """Every second element from some place on, and of those a part."""
    x = b.some(lambda t: t.rank > 0 and max(t.shape) >= 4)
    dim = x.type.shape.index(max(x.type.shape))
    for step in (2, 1) if b.chance(70) else (1, 2):
        size = x.type.shape[dim]
        start = b.below(min(size, 3))
        sizes = tuple(1 + (size - start - 1) // step if d == dim else n for d, n in enumerate(x.type.shape))
        x = b.add(
            Slice(
                tuple(start if d == dim else 0 for d in range(x.type.rank)),
                sizes,
                tuple(step if d == dim else 1 for d in range(x.type.rank)),
            ),
            x,
        )


def expanded(b: Builder) -> None:
    """An explicit broadcast in front of an op that broadcasts by itself."""
    x = b.float_value(1, 4)
    small = b.fresh(TensorType(b.part(x.type.shape), x.type.dtype))
    wide = b.add(Expand(x.type.shape), draw_pointwise(b, b.pick(ACTIVATIONS), small) if b.chance(30) else small)
    b.pointwise(b.pick(["add", "mul", "sub", "max", "min"]), *((x, wide) if b.chance(50) else (wide, x)))


def square(b: Builder) -> None:
    """A square matrix, joined by its transpose or a constant row or column; or made of a row and itself as column."""
    size = b.between(2, 4)
    x = b.fresh(TensorType((1, size, size), b.dtype))
    y = b.add(Reshape((size, size)), b.pointwise("abs", x))
    if b.chance(50):  # one value, read in two ways
        row = b.fresh(TensorType((size,), b.dtype))
        y, other = (b.add(Reshape(shape), row) for shape in ((size, 1), (1, size)))
    elif b.chance(30):
        other = b.add(Transpose((1, 0)), y)
    else:
        other = b.constant(b.pick([(size, 1), (size, 1), (1, size), (size,)]), b.dtype)
    b.pointwise(b.pick(["add", "mul"]), y, other)
