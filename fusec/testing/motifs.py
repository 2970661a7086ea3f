"""What graphs are made of more often than chance would have it: what fuses, and what tempts a partitioner to err."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from fusec.errors import VerifyError
from fusec.ir import DType, Op, TensorType, Value
from fusec.ops import (
    BatchNorm,
    Cast,
    Concat,
    Expand,
    LayerNorm,
    MatMul,
    MaxPool,
    Pad,
    Reduce,
    Reshape,
    RmsNorm,
    Slice,
    Softmax,
    Split,
    Transpose,
    pw,
)
from fusec.passes import rules
from fusec.passes.pattern import Rule, instantiate
from fusec.testing.builder import MAX_ELEMENTS, Builder, Unfit
from fusec.testing.operations import DRAWS
from fusec.testing.operations.pointwise import draw_pointwise
from fusec.testing.operations.products import multiply
from fusec.testing.operations.shapes import reshaped, turned
from fusec.testing.operations.windows import convolve, scatter

ACTIVATIONS = (
    *("relu", "relu", "clip", "sigmoid", "tanh", "leaky_relu", "elu", "gelu", "gelu_tanh", "swish", "hard_swish"),
    *("hard_sigmoid", "softplus", "mish", "abs", "neg", "identity", "prelu", "selu", "celu", "softsign"),
)
EQUATIONS: tuple[Rule, ...] = tuple(r for known in rules().values() for r in known if isinstance(r, Rule))


def _tail(b: Builder, x: Value, longest: int = 4) -> Value:
    """Bias, residual, activation, scale, clip: what follows an anchor, in any order."""
    rank = x.type.rank
    for _ in range(b.below(longest + 1)):
        kind = b.below(8)
        if kind <= 1:
            channels = (x.type.shape[1], *(1,) * (rank - 2)) if rank > 2 else x.type.shape[-1:]
            x = b.pointwise(
                b.pick(["add", "add", "mul", "sub"]), x, b.constant(b.pick([channels, (1, *channels)]), x.type.dtype)
            )
        elif kind <= 3:
            x = draw_pointwise(b, b.pick(ACTIVATIONS), x)
        elif kind == 4:
            x = b.pointwise(b.pick(["add", "add", "sub", "mul", "max"]), x, b.like(x))
        elif kind == 5:
            x = b.pointwise(b.pick(["mul", "add", "div"]), x, b.constant((), x.type.dtype, "positive"))
        elif kind == 6 and rank > 2:
            x = _normalised(b, x)
        else:
            x = b.pointwise(b.pick(["add", "mul"]), x, b.beside(x))
    return x


def _normalised(b: Builder, x: Value) -> Value:
    styles = ["", "", "", "positive"]
    parameters = [b.constant((x.type.shape[1],), x.type.dtype, style) for style in styles]
    return b.add(BatchNorm(b.pick([1e-5, 1e-3, 0.5])), x, *parameters)


def convolution_block(b: Builder) -> None:
    """[pad] [prologue] conv [epilogue]."""
    x = b.image(3, 5) if b.chance(70) else b.input(TensorType(b.image_shape(), b.dtype))
    if b.chance(15):
        spatial = x.type.rank - 2
        pads = tuple(b.below(2) for _ in range(2 * spatial))
        x = b.add(Pad((0, 0, *pads[:spatial], 0, 0, *pads[spatial:]), "constant", b.pick([0.0, 0.0, 1.0])), x)
    if b.chance(20):
        x = _tail(b, x, 3)
    _tail(b, convolve(b, x) if b.chance(85) else scatter(b, x))


def residual_block(b: Builder) -> None:
    """Two convolutions and the way around them."""
    x = b.image(3, 4)
    y = _tail(b, convolve(b, x, keep_size=True), 2)
    y = convolve(b, y, filters=x.type.shape[1], keep_size=True) if b.chance(50) else y
    if b.chance(50):
        y = b.pointwise("add", y, b.constant((y.type.shape[1], *(1,) * (y.type.rank - 2)), y.type.dtype))
    if y.type.same_value_type(x.type):
        y = b.pointwise("add", y, x)
    if b.chance(70):
        draw_pointwise(b, b.pick(ACTIVATIONS), y)


def product_block(b: Builder) -> None:
    """[transpose] matmul [epilogue]."""
    x = b.float_value(2, 4) if b.chance(70) else b.input(TensorType(b.shape(2, 4), b.dtype))
    if b.chance(20):
        x = draw_pointwise(b, b.pick(ACTIVATIONS), x)
    _tail(b, multiply(b, x))


def gate(b: Builder) -> None:
    """Squeeze and excitation: a value scaled by what its own mean over space says."""
    x = b.image(3, 5)
    axes = tuple(range(2, x.type.rank))
    squeezed = b.add(Reduce("mean", axes), x)
    if b.chance(60):
        squeezed = draw_pointwise(b, "relu", convolve(b, squeezed, x.type.shape[1], keep_size=True))
    b.pointwise("mul", x, b.pointwise(b.pick(["sigmoid", "hard_sigmoid"]), squeezed))


def attention(b: Builder) -> None:
    """softmax(q k^T * scale [+ mask]) v, in the forms that exporters give it."""
    if b.chance(20):  # of any rank, one value in several places
        q = b.float_value(2, 4)
        if q.type.size == 0:
            raise Unfit("no rows")
        k, v = b.like(q), b.like(q)
    else:
        q, k, v = _heads(b)
    rank = q.type.rank
    scale = b.pick([0.5, 0.35355339, 2.0])
    place = b.below(5)
    if place in (0, 1):
        q = _times(b, q, scale)
    keys = b.add(Transpose((*range(rank - 2), rank - 1, rank - 2)), k)
    if place in (1, 2):
        keys = _times(b, keys, scale)
    scores = b.add(MatMul(), q, keys)
    if place == 3:
        scores = _times(b, scores, scale) if b.chance(50) else b.pointwise("div", scores, _number(b, scores, 4.0))
    scores = _masked(b, scores)
    wide = b.chance(15)
    weights = b.add(Softmax(-1), b.add(Cast(DType.F32), scores) if wide else scores)
    weights = b.add(Cast(q.type.dtype), weights) if wide else weights
    if b.chance(40):
        weights = b.pointwise("where", b.pointwise("is_nan", weights), _number(b, weights, 0.0), weights)
    if rank == 3 and b.chance(30):
        weights = b.add(Reshape((1, *weights.type.shape)), weights)
        weights = b.add(Reshape(weights.type.shape[1:]), weights)
    made = b.add(MatMul(), weights, v)
    if rank == 4 and b.chance(60):
        batch, heads, rows, features = made.type.shape
        b.add(Reshape((batch, rows, heads * features)), b.add(Transpose((0, 2, 1, 3)), made))


def _heads(b: Builder) -> tuple[Value, Value, Value]:
    """Queries, keys and values by head: projections cut into heads, parts of one projection, shared heads."""
    batch, rows, heads, features = b.pick([1, 2]), b.pick([4, 3, 1, 5]), b.pick([2, 1, 4]), b.pick([4, 8, 3])
    x = b.fresh(TensorType((batch, rows, heads * features), b.dtype))
    kind = b.below(4)
    if kind == 0:
        x = b.fresh(TensorType((batch, rows, 3 * heads * features), b.dtype))
        parts = list(b.insert(Split(2, (heads * features,) * 3), x).results)
    elif kind == 1:
        parts = [b.add(MatMul(), x, b.constant((heads * features,) * 2, b.dtype)) for _ in range(3)]
        if b.chance(50):
            parts = [b.pointwise("add", p, b.constant((heads * features,), b.dtype)) for p in parts]
    else:
        parts = [x, b.like(x), b.like(x)]
    turned = [b.add(Transpose((0, 2, 1, 3)), b.add(Reshape((batch, rows, heads, features)), p)) for p in parts]
    if kind == 3:
        shared = [b.fresh(TensorType((batch, 1, rows, features), b.dtype)) for _ in range(2)]
        for i, k in enumerate(shared, 1):
            wide = b.add(Expand((batch, 1, heads, rows, features)), b.add(Reshape((batch, 1, 1, rows, features)), k))
            turned[i] = b.add(Reshape((batch, heads, rows, features)), wide)
    if b.chance(25):  # all heads of all images in one dim
        turned = [b.add(Reshape((batch * heads, rows, features)), t) for t in turned]
    return turned[0], turned[1], turned[2]


def _number(b: Builder, like: Value, number: float) -> Value:
    return b.graph.constant(np.asarray(number, like.type.dtype.numpy))


def _times(b: Builder, x: Value, number: float) -> Value:
    return b.pointwise("mul", x, _number(b, x, number))


def _masked(b: Builder, scores: Value) -> Value:
    """Scores with a mask or bias: added or chosen by, of the whole, of later keys, of any shape."""
    rows, columns = scores.type.shape[-2:]
    later = np.triu(np.full((rows, columns), -np.inf), 1).astype(scores.type.dtype.numpy)
    kind = b.below(6)
    if kind == 0:
        return b.pointwise("add", scores, b.graph.constant(later))
    if kind == 1:
        return b.pointwise("add", scores, b.beside(scores))
    if kind == 2:
        known, hides = b.chance(50), b.chance(40)  # hides: where it is true
        mask = b.graph.constant((later == 0) != hides) if known else b.mask(scores)
        least = float(ml_dtypes.finfo(scores.type.dtype.numpy).min) if known and b.chance(30) else -math.inf
        never = _number(b, scores, least)
        shown = (mask, never, scores) if hides else (mask, scores, never)
        if np.broadcast_shapes(mask.type.shape, scores.type.shape) != scores.type.shape:
            raise Unfit("a mask wider than the scores")
        return b.add(pw("where"), *shown)
    if kind == 3:
        mask = b.mask(scores)
        hidden = b.add(pw("where"), mask, _number(b, scores, 0.0), _number(b, scores, -math.inf))
        return b.pointwise("add", scores, hidden)
    return scores


def there_and_norm(b: Builder) -> None:
    """A norm or softmax in 32 bits between tensors of 16, or a value quantised and dequantised."""
    if b.chance(50):
        half = b.pick([DType.F16, DType.BF16])
        x = b.add(Cast(half), b.float_value(2, 4))
        wide = b.add(Cast(DType.F32), x)
        parameter = b.constant(wide.type.shape[-1:], half if b.chance(60) else DType.F32)
        if parameter.type.dtype is half:
            parameter = b.add(Cast(DType.F32), parameter)
        kind = b.below(3)
        y = b.add(Softmax(-1), wide) if kind == 0 else b.add((RmsNorm, LayerNorm)[kind - 1](), wide, parameter)
        b.add(Cast(b.pick([half, half, DType.F32])), y)
        return
    x = b.some(lambda t: t.dtype is DType.F32)
    scale, zero = _number(b, x, b.pick([0.5, 0.05, 2.0])), b.pick([0.0, 3.0, -7.0, 0.5])
    y = b.pointwise(b.pick(["round", "round", "floor"]), b.pointwise("div", x, scale))
    y = b.pointwise("add", y, _number(b, x, zero)) if zero else y
    low, high = b.pick([(-128.0, 127.0), (0.0, 255.0), (-128.0, 128.0)])
    integer = b.pick([DType.I8, DType.U8, DType.I16])
    y = b.add(Cast(DType.F32), b.add(Cast(integer), b.pointwise("clip", y, min=low, max=high)))
    y = b.pointwise("add", y, _number(b, x, -zero)) if zero else y
    b.pointwise("mul", y, scale)


def chain(b: Builder) -> None:
    """Pointwise ops in a row, values of other shapes joining."""
    x = b.float_value()
    for _ in range(b.between(2, 6)):
        x = draw_pointwise(b, b.pick(("add", "mul", "sub", "max", "min", *ACTIVATIONS)), x)


def equation(b: Builder) -> None:
    """The left side of a rewrite rule, so that every rule has something to match."""
    rule = b.pick(EQUATIONS)
    leaves: dict[str, Value] = {}
    for name, kind in rule.parameters.items():
        if kind in ("Tensor", "Weight"):
            leaves[name] = _leaf(b, rule, name, kind == "Weight")
    known: dict[str, Any] = {
        name: rule.sample.get(name, b.pick([0.5, 2.0, 0.1]))
        for name, kind in rule.parameters.items()
        if kind in ("Scalar", "Attribute")
    }
    known = {k: v for k, v in known.items() if rule.parameters[k] == "Scalar" or k in rule.sample}
    held = set(b.graph.values())
    stand_in = next(iter(leaves.values()))
    try:
        if leaves and stand_in.type.dtype is not DType.F32:  # numbers take the dtype of what stands at the root
            before = b.pointwise("identity", stand_in).node
            instantiate(b.graph, rule.pattern, leaves, known, before)
        else:
            instantiate(b.graph, rule.pattern, leaves, known)
    except VerifyError as error:
        raise Unfit(str(error)) from error
    made = [v for v in b.graph.values() if v not in held and v.literal is None and v.node is not None]
    if any(v.type.size > MAX_ELEMENTS for v in made):
        raise Unfit("too large")
    known_values = set(b.values)
    b.values += [v for v in made if v not in known_values]


def _leaf(b: Builder, rule: Rule, name: str, constant: bool) -> Value:
    """A value, or a constant, as the rule's sample has it: a shape, `positive`, or a length and a filling."""
    sample: Any = rule.sample.get(name)
    shape: tuple[int, ...] | None = sample if isinstance(sample, tuple) else None
    if shape and isinstance(shape[-1], float):
        filled = np.full(shape[0], shape[-1] if b.chance(80) else 0.5)
        return b.graph.constant(filled.astype(b.dtype.numpy))
    if constant:
        return b.constant(shape if shape is not None else b.pick([(), (4,), (3, 1)]), b.dtype)
    if shape is None or b.chance(50):
        rank = len(shape) if shape else 0
        x = b.float_value(rank, rank or 5)
        if shape is None or x.type.shape == shape:
            return b.bounded(x, 0.5, 4.0) if sample == "positive" else x
    return b.constant(shape, b.dtype) if len(shape) == 1 else b.fresh(TensorType(shape, b.dtype))


def escape(b: Builder) -> None:
    """A value inside what would be one partition is also read by an op that never joins it."""
    x = b.image(3, 4)
    anchored = convolve(b, x, keep_size=True) if b.chance(70) else multiply(b, x)
    inner = draw_pointwise(b, b.pick(ACTIVATIONS), anchored)
    b.add(Softmax(-1), inner if b.chance(70) else anchored)
    _tail(b, inner, 2)


def cycle(b: Builder) -> None:
    """A way out of a would-be partition and back into it: merging both ends would close a cycle."""
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
    _tail(b, b.pointwise(b.pick(["add", "mul"]), y, outside), 2)


def diamond(b: Builder) -> None:
    """One value, two ways, joined again."""
    x = b.float_value()
    left, right = (draw_pointwise(b, b.pick(ACTIVATIONS), x) for _ in range(2))
    if b.chance(25):
        left = draw_pointwise(b, b.pick(ACTIVATIONS), left)
    b.pointwise(b.pick(["add", "mul", "sub", "max", "div"]) if b.chance(60) else "add", left, right)


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


def there_and_back(b: Builder) -> None:
    """A value cast to another dtype and back: what was rounded away stays away."""
    x = b.some(lambda t: t.dtype.is_float)
    narrow = b.add(Cast(b.pick([DType.F16, DType.BF16, DType.F32, DType.F64])), x)
    b.add(Cast(x.type.dtype), narrow)


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


def branches(b: Builder) -> None:
    """A value cut in parts that go their own ways and are joined."""
    x = b.float_value(1, 4)
    axis = b.below(x.type.rank)
    size = x.type.shape[axis]
    if size < 2:
        raise Unfit("nothing to cut")
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


def dense_block(b: Builder) -> None:
    """Layers that each read what all before them made, joined along channels: a concat may hold another's parts."""
    x = b.image(3, 5)
    wide = b.pick([8, 8, 4, 1])
    kept = [draw_pointwise(b, b.pick(ACTIVATIONS), x) if b.chance(20) else convolve(b, x, wide, True)]
    for _ in range(b.pick([1, 2, 3])):
        joined = kept[0] if len(kept) == 1 else b.add(Concat(1), *kept)
        read = draw_pointwise(b, b.pick(ACTIVATIONS), joined) if b.chance(60) else joined
        made = convolve(b, read, wide, True)
        kept = [made, *kept] if b.chance(15) else [*kept, made]
    whole = b.add(Concat(1), *kept)
    if b.chance(60):
        draw_pointwise(b, b.pick(ACTIVATIONS), whole)


def turned_rows(b: Builder) -> None:
    """A linear layer between transposes of its rows, as sequences come first in some models and images in others."""
    rows, features = [b.pick([2, 3, 4]) for _ in range(b.pick([2, 2, 3]))], b.pick([4, 8, 3])
    count = len(rows)
    x = b.fresh(TensorType((*rows, features), b.dtype))
    if b.chance(80):
        x = b.add(Transpose((*b.permutation(count), count)), x)
    y = b.add(MatMul(), x, b.constant((features, b.pick([4, 6])), b.dtype))
    if b.chance(60):
        y = b.pointwise("add", y, b.constant(y.type.shape[-1:], b.dtype))
    y = b.add(Transpose((*b.permutation(count), count)), y)
    if b.chance(50):
        b.add(Reshape((math.prod(y.type.shape[:-1]), y.type.shape[-1])), y)


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


def alike(b: Builder) -> None:
    """A few ops twice, apart: with another number or attribute, or a value more that is kept, it is other work."""
    x = b.float_value(1, 4)
    kind = b.pick([0, 1, 2, 2])
    op = pw(b.pick(("mul", "add", "max", "min")))
    first, second = b.pick([(0.5, 2.0), (-1.0, 3.0)])
    for number in (first, second):
        if kind == 0:
            x = b.add(op, x, b.graph.constant(np.asarray(number, x.type.dtype.numpy)))
        elif kind == 1:
            x = b.add(pw("elu", alpha=abs(number)), x)
        else:
            inner = b.add(pw("abs"), x)
            if number == second:
                b.add(Softmax(-1), inner)  # which reads it from memory
            x = b.add(pw("sigmoid"), inner)
        x = b.add(Softmax(-1), x)


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


def twins(b: Builder) -> None:
    """An op again: on the same operands, on the same in another order, or with one attribute changed."""
    nodes = [n for n in b.graph.nodes if n.operands and n.op.name != "constant"]
    if not nodes:
        raise Unfit("no node yet")
    node, kind = b.pick(nodes[-4:]), b.below(3)
    operands = node.operands[::-1] if kind == 1 else node.operands
    if kind == 0 and all(v.type.dtype.is_float for v in operands) and b.chance(50):  # other numbers, other values
        operands = tuple(
            b.constant(v.type.shape, v.type.dtype, "number") if v.scalar() is not None else b.like(v) for v in operands
        )
    again = b.insert(_changed(b, node.op) if kind == 2 else node.op, *operands).results[0]
    if again.type.same_value_type(node.results[0].type) and again.type.dtype is not DType.BOOL and b.chance(60):
        b.pointwise("add", node.results[0], again)


def _changed(b: Builder, op: Op) -> Op:
    """The op with one attribute changed; Unfit if it has none that can be."""
    options: dict[str, Any] = {}
    for name, value in op.attributes.items():
        if isinstance(value, bool):
            options[name] = not value
        elif isinstance(value, float):
            options[name] = 0.5 if value != 0.5 else 0.25
        elif isinstance(value, int):
            options[name] = value - 1 if value > 0 else value + 1
        elif isinstance(value, tuple) and len(set(value)) > 1:
            options[name] = value[::-1]
    if not options:
        raise Unfit("no attribute to change")
    name = b.pick(sorted(options))
    return type(op)(**{**op.attributes, name: options[name]})


def of_constants(b: Builder) -> None:
    """Ops whose operands are all constant: folded at compile time."""
    shape = b.shape(0, 3)
    x = b.constant(shape, b.dtype)
    y = draw_pointwise(
        b, b.pick(ACTIVATIONS), b.pointwise(b.pick(["add", "mul"]), x, b.constant(b.part(shape), b.dtype))
    )
    z = b.some(lambda t: t.dtype is b.dtype)
    if b.chance(70):
        b.pointwise(b.pick(["add", "mul"]), z, y)


def any_op(b: Builder) -> None:
    """One op of the registry, each as likely as another."""
    DRAWS[b.pick(_OPS)](b)


_OPS = tuple(DRAWS)

# how many times in a hundred or so
MOTIFS: Mapping[Callable[[Builder], None], int] = {
    any_op: 34,
    convolution_block: 14,
    chain: 6,
    product_block: 7,
    equation: 10,
    residual_block: 5,
    gate: 3,
    attention: 5,
    there_and_norm: 2,
    escape: 4,
    cycle: 4,
    diamond: 4,
    shuffle: 6,
    row: 7,
    padded_pool: 4,
    there_and_back: 2,
    turned_together: 4,
    branches: 5,
    dense_block: 4,
    turned_rows: 3,
    sliced_twice: 2,
    alike: 5,
    square: 3,
    expanded: 2,
    twins: 4,
    of_constants: 2,
}
