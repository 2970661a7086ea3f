"""Draw ops that move elements, with pointwise ops between them, for the passes that move and join views."""

from __future__ import annotations

import math

from fusec.ir import TensorType
from fusec.ops import Concat, Expand, Pad, Reduce, Reshape, Slice, Transpose
from fusec.testing.generators.graph_builder import RandomGraph
from fusec.testing.generators.motifs.layers import ACTIVATIONS
from fusec.testing.generators.operations import DRAWS
from fusec.testing.generators.operations.pointwise import draw_pointwise
from fusec.testing.generators.operations.shapes import reshaped, transposed


def shuffle(b: RandomGraph) -> None:
    """Draw reshapes and transposes with pointwise ops between them."""
    x = b.float_value(2, 5)
    shape = x.type.shape
    for _ in range(b.between(1, 4)):
        kind = b.below(4)
        if kind == 0:
            x = reshaped(b, x)
        elif kind == 1:
            x = transposed(b, x)
        elif kind == 2:
            x = draw_pointwise(b, b.pick(ACTIVATIONS), x)
        else:
            x = b.pointwise(b.pick(["add", "mul"]), x, b.broadcastable(x))
    if x.type.size == TensorType(shape, x.type.dtype).size and b.chance(50):
        b.add(Reshape(shape), x)


_MOVES = (
    *("slice", "pad", "cast", "concat", "expand", "reduce", "transpose", "reshape", "max_pool", "avg_pool"),
    *("gather", "split", "resize", "dilate"),
)


def move_sequence(b: RandomGraph) -> None:
    """Draw a sequence of ops that move elements, often the same op twice, because rules join such pairs."""
    x, name = b.float_value(1, 5) if b.chance(70) else b.some(), b.pick(_MOVES)
    for _ in range(2 + b.below(2)):
        with b.focused(x):
            DRAWS[name](b)
        x, name = b.values[-1], name if b.chance(60) else b.pick(_MOVES)


def padded_pool(b: RandomGraph) -> None:
    """Draw an explicit pad before a pool or convolution, of zeros or of numbers that a pool ignores."""
    x = b.image(3, 4)
    spatial = x.type.rank - 2
    pads = tuple(b.below(2) for _ in range(2 * spatial))
    value = b.pick([0.0, 0.0, -math.inf, 1.0])
    padded = b.add(Pad((0, 0, *pads[:spatial], 0, 0, *pads[spatial:]), "constant", value), x)
    with b.focused(padded):
        DRAWS[b.pick(["avg_pool", "max_pool", "conv"])](b)


def transposed_operands(b: RandomGraph) -> None:
    """Draw an op whose operands have the same transpose, which a pass can move after the op."""
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


def sliced_twice(b: RandomGraph) -> None:
    """Draw two slices in sequence, one of them with a step of 2."""
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


def expanded(b: RandomGraph) -> None:
    """Draw an explicit broadcast before an op that broadcasts by itself."""
    x = b.float_value(1, 4)
    small = b.fresh(TensorType(b.broadcast_shape(x.type.shape), x.type.dtype))
    wide = b.add(Expand(x.type.shape), draw_pointwise(b, b.pick(ACTIVATIONS), small) if b.chance(30) else small)
    b.pointwise(b.pick(["add", "mul", "sub", "max", "min"]), *((x, wide) if b.chance(50) else (wide, x)))


def square(b: RandomGraph) -> None:
    """Draw a pointwise op of a square matrix with its transpose, a row or a column; or of one row in both shapes."""
    size = b.between(2, 4)
    x = b.fresh(TensorType((1, size, size), b.dtype))
    y = b.add(Reshape((size, size)), b.pointwise("abs", x))
    if b.chance(50):  # one value, as column and as row
        row = b.fresh(TensorType((size,), b.dtype))
        y, other = (b.add(Reshape(shape), row) for shape in ((size, 1), (1, size)))
    elif b.chance(30):
        other = b.add(Transpose((1, 0)), y)
    else:
        other = b.constant(b.pick([(size, 1), (size, 1), (1, size), (size,)]), b.dtype)
    b.pointwise(b.pick(["add", "mul"]), y, other)
