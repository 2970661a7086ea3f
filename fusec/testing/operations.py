"""How each op of the registry is drawn: attributes and operands that its inference takes, edges among them.

DRAWS has one entry for every op of `fusec.ops.ALL`; a function adds at least one such node to the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fusec.ir import DType, TensorType, Value
from fusec.ops import (
    CLASSES,
    AllFinite,
    Attention,
    AttentionBackward,
    AttentionTrain,
    AvgPool,
    BatchNorm,
    BatchNormBackward,
    BatchNormTrain,
    Cast,
    Concat,
    Conv,
    ConvTranspose,
    ConvWgrad,
    Cumulate,
    Expand,
    Gather,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LayerNormBackward,
    LocalResponseNorm,
    MatMul,
    MaxPool,
    MaxPoolBackward,
    Pad,
    RandomBits,
    Reduce,
    Relayout,
    Reshape,
    Resize,
    RmsNorm,
    Rotary,
    Scatter,
    Slice,
    Softmax,
    Split,
    TopK,
    Transpose,
)
from fusec.ops.convolution import windows_along
from fusec.testing.builder import Builder, Unfit

Draw = Callable[[Builder], None]

INTEGERS = (DType.I32, DType.I64, DType.I8, DType.U8, DType.I16, DType.U32, DType.U16, DType.U64)
CASTS = (DType.F32, DType.F16, DType.BF16, DType.F64, DType.BOOL, *INTEGERS)
# what each attribute of a pointwise op is drawn from, beside its default
ATTRIBUTES: Mapping[str, Sequence[float]] = {
    "alpha": (0.1, 0.3, 1.5, 0.5),
    "beta": (0.5, 1.702, 0.25),
    "gamma": (0.9,),
    "min": (-math.inf, -1.0, 0.0, -0.5),
    "max": (6.0, 1.0, math.inf, 0.5),
}
# operands outside these give NaN, infinity or numbers that drown all others
DOMAIN: Mapping[str, tuple[float, float]] = {
    "acos": (-0.9, 0.9),
    "asin": (-0.9, 0.9),
    "atanh": (-0.9, 0.9),
    "acosh": (1.25, 9.0),
    "tan": (-1.25, 1.25),
    "exp": (-6.0, 6.0),
    "sinh": (-6.0, 6.0),
    "cosh": (-6.0, 6.0),
    "tanh_backward": (-6.0, 6.0),
}
POSITIVE = frozenset({"log", "sqrt", "rsqrt", "reciprocal"})
QUOTIENTS = frozenset({"div", "mod", "floor_mod"})


# pointwise ---------------------------------------------------------------------------------------


def _attributes(b: Builder, name: str, rank: int) -> dict[str, float]:
    drawn: dict[str, float] = {}
    for key, default in CLASSES[name].row.defaults.items():
        if key == "axis":
            if rank == 0:
                raise Unfit("no axis")
            drawn[key] = b.below(rank)
        elif b.chance(60):
            drawn[key] = b.pick((default, *ATTRIBUTES[key]))
    if drawn.get("min", -math.inf) > drawn.get("max", math.inf) and not b.chance(10):
        drawn["min"], drawn["max"] = drawn["max"], drawn["min"]
    return drawn


def _integer_value(b: Builder) -> Value:
    try:
        return b.some(lambda t: t.dtype.is_int)
    except Unfit:
        return b.fresh(TensorType(b.shape(), b.pick(INTEGERS)))


def _unsigned_value(b: Builder) -> Value:
    """ONNX shifts no others."""
    try:
        return b.some(lambda t: t.dtype.value.startswith("u"))
    except Unfit:
        return b.fresh(TensorType(b.shape(), b.pick((DType.U8, DType.U16, DType.U32, DType.U64))))


def _first(b: Builder, name: str) -> Value:
    rule = CLASSES[name].row.rule
    if rule == "bool":
        return b.mask(b.float_value())
    if rule == "integer":
        return _unsigned_value(b) if name.startswith("shift") else _integer_value(b)
    if rule in ("number", "any", "compare", "select") and b.chance(12):
        return b.mask(b.float_value()) if rule in ("any", "select") and b.chance(30) else _integer_value(b)
    return b.float_value()


def draw_pointwise(b: Builder, name: str, x: Value | None = None) -> Value:
    """Add the pointwise op to a value (of any kind that it takes)."""
    row = CLASSES[name].row
    x = x or _first(b, name)
    is_float = x.type.dtype.is_float
    if name in POSITIVE and is_float:
        x = b.away_from_zero(x)
    elif name in DOMAIN and row.arity == 1:
        x = b.bounded(x, *DOMAIN[name])
    if row.rule == "select":
        return b.add(CLASSES[name](), b.mask(x), x, b.beside(x))
    op = CLASSES[name](**_attributes(b, name, x.type.rank))
    if row.arity == 1:
        return b.add(op, x)
    if row.rule == "bool":
        return b.add(op, x, b.mask(x))
    if name in QUOTIENTS:
        return b.add(
            op, x, b.away_from_zero(x) if is_float else b.constant(b.part(x.type.shape), x.type.dtype, "positive")
        )
    if name == "pow":
        if not is_float:
            return b.add(op, x, b.constant((), x.type.dtype, "positive"))
        if b.chance(50):  # squares take any operand
            return b.add(op, x, b.graph.constant(x.type.dtype.numpy.type(b.pick([2, 3, 1, 0]))))
        return b.add(op, b.away_from_zero(x), b.bounded(b.beside(x), -2.0, 2.0))
    if name in DOMAIN:
        return b.add(op, b.beside(x), b.bounded(x, *DOMAIN[name]))
    operands = (x, b.beside(x))
    return b.add(op, *(operands[::-1] if b.chance(35) else operands))


def _pointwise(name: str) -> Draw:
    def draw(b: Builder) -> None:
        draw_pointwise(b, name)

    return draw


def _cast(b: Builder) -> None:
    x = b.some()
    to = b.pick(CASTS)
    if x.type.dtype.is_float and to.is_int:  # out of range is no number in C
        x = b.pointwise("clip", x, min=0.0 if to.value.startswith("u") else -100.0, max=100.0)
    elif x.type.dtype.is_int and to.value.startswith("u"):  # a negative number wraps around to a huge one
        x = b.pointwise("relu", x)
    b.add(Cast(to), x)


# windows -----------------------------------------------------------------------------------------


def window(b: Builder, sizes: Sequence[int], pads_below_window: bool = False) -> tuple[tuple[int, ...], ...]:
    """Window, strides, pads and dilations that fit an image of these spatial sizes."""
    n = len(sizes)
    kernel = [b.pick([3, 1, 2, 5]) for _ in range(n)] if b.chance(85) else [1] * n
    dilations = [b.pick([1, 1, 1, 2]) for _ in range(n)]
    starts, ends = list[int](), list[int]()
    same = b.chance(40)
    for i, size in enumerate(sizes):
        most = dilations[i] * (kernel[i] - 1)
        pads = [0, 0]
        if same:
            pads = [most // 2, most // 2]
        elif b.chance(40):
            pads = [b.below(min(most, 2) + 1), b.below(min(most, 2) + 1)]
        if not pads_below_window and b.chance(4):
            pads[1] += 2
        while size + sum(pads) < dilations[i] * (kernel[i] - 1) + 1:
            kernel[i] -= 1
            if pads_below_window:
                pads = [min(p, dilations[i] * (kernel[i] - 1)) for p in pads]
        starts.append(pads[0])
        ends.append(pads[1])
    strided = b.chance(35 if max(kernel, default=1) > 1 else 70)
    strides = tuple(b.pick([2, 1, 3, 1]) for _ in range(n)) if strided else (1,) * n
    return tuple(kernel), strides, (*starts, *ends), tuple(dilations)


def convolve(b: Builder, x: Value, filters: int = 0, keep_size: bool = False) -> Value:
    """A convolution of an image; `keep_size` gives a result of the image's spatial size."""
    channels, spatial = x.type.shape[1], x.type.shape[2:]
    n = len(spatial)
    groups = b.pick([1, 1, 1, *(g for g in (2, channels) if g > 1 and channels % g == 0)])
    filters = filters or groups * b.pick([1, 2, 4, 8, 3]) if filters == 0 or filters % groups else filters
    if keep_size:
        side = b.pick([1, 3])
        kernel, strides, pads, dilations = (side,) * n, (1,) * n, (side // 2,) * 2 * n, (1,) * n
    else:
        kernel, strides, pads, dilations = window(b, spatial)
    shape = (filters, channels // groups, *kernel)
    if math.prod(shape) > 1500:
        raise Unfit("too many weights")
    type = TensorType(shape, x.type.dtype)
    weight = b.fresh(type) if b.chance(8) else b.constant(shape, x.type.dtype)
    return b.add(Conv(strides, pads, dilations, groups), x, weight)


def _conv(b: Builder) -> None:
    convolve(b, b.image())


def _conv_transpose(b: Builder) -> None:
    scatter(b, b.image())


def scatter(b: Builder, x: Value) -> Value:
    """A transposed convolution of an image."""
    channels, spatial = x.type.shape[1], x.type.shape[2:]
    n = len(spatial)
    groups = b.pick([1, 1, *(g for g in (2, channels) if channels % g == 0)])
    kernel = tuple(b.pick([2, 3, 1]) for _ in range(n))
    strides = tuple(b.pick([1, 2, 3]) for _ in range(n))
    dilations = tuple(b.pick([1, 1, 2]) for _ in range(n))
    pads = tuple(b.below(2) for _ in range(2 * n)) if b.chance(50) else (0,) * 2 * n
    extra = tuple(b.below(s) for s in strides) if b.chance(40) else (0,) * n
    weight = b.constant((channels, b.pick([1, 2, 3]), *kernel), x.type.dtype)
    return b.add(ConvTranspose(strides, pads, dilations, extra, groups), x, weight)


def _pool(kind: type[MaxPool] | type[AvgPool]) -> Draw:
    def draw(b: Builder) -> None:
        x = b.image()
        kernel, strides, pads, dilations = window(b, x.type.shape[2:], pads_below_window=True)
        ceil_mode = b.chance(30)
        if kind is AvgPool:
            b.add(AvgPool(kernel, strides, pads, dilations, ceil_mode, b.chance(40)), x)
        else:
            b.add(MaxPool(kernel, strides, pads, dilations, ceil_mode), x)

    return draw


# products, norms, reductions ---------------------------------------------------------------------


def multiply(b: Builder, x: Value, columns: int = 0) -> Value:
    """A matrix product with a constant, another value, or the value itself transposed."""
    *batch, _, inner = x.type.shape
    columns = columns or b.pick([4, 8, 3, 1, 16, 5])
    kind = b.below(6)
    if kind <= 2:
        return b.add(MatMul(), x, b.constant((inner, columns), x.type.dtype))
    if kind == 3:
        other = tuple(d if b.chance(70) else 1 for d in batch)
        return b.add(MatMul(), x, b.fresh(TensorType((*other, inner, columns), x.type.dtype)))
    if kind == 4:
        turned = b.add(Transpose((*range(len(batch)), len(batch) + 1, len(batch))), b.like(x))
        return b.add(MatMul(), x, turned)
    rows = b.pick([2, 4, 3])
    return b.add(MatMul(), b.fresh(TensorType((rows, x.type.shape[-2]), x.type.dtype)), x)


def _matmul(b: Builder) -> None:
    multiply(b, b.float_value(2, 4))


def attend(b: Builder) -> tuple[Value, Value, Value]:
    """Operands of an attention: heads that share keys and values, other lengths, one value in several places."""
    q = b.float_value(4, 4)
    batch, heads, _, features = q.type.shape
    if q.type.size == 0:
        raise Unfit("no rows")
    if b.chance(40):
        return q, b.like(q), b.like(q)
    groups = b.pick([g for g in (heads, heads, 1, 2) if heads % g == 0])
    rows = b.pick([q.type.shape[2], 3, 1, 4, 5])
    k = b.fresh(TensorType((batch, groups, rows, features), q.type.dtype))
    return q, k, b.fresh(TensorType((batch, groups, rows, b.pick([features, features, 3, 8])), q.type.dtype))


def _attention(b: Builder) -> None:
    q, k, v = attend(b)
    scores = (*q.type.shape[:3], k.type.shape[2])
    bias: list[Value] = []
    if b.chance(40):
        shape = b.part(scores)
        hidden = b.graph.constant(np.asarray(-math.inf, q.type.dtype.numpy))
        mask = b.fresh(TensorType(shape, q.type.dtype))
        shut = b.pointwise("where", b.mask(mask), mask, hidden) if b.chance(50) else mask
        bias.append(shut if shut.type.shape == shape else mask)
    scale = b.pick([1.0, 0.5, 0.35355339, 0.125])
    op = Attention(scale, b.chance(40), b.chance(25), b.chance(40), b.chance(20) and not bias)
    b.add(op, q, k, v, *bias)


def _attention_train(b: Builder) -> None:
    q, k, v = attend(b)
    shape = b.part((*q.type.shape[:3], k.type.shape[2]))
    bias = [b.fresh(TensorType(shape, q.type.dtype))] if b.chance(30) else []
    b.insert(AttentionTrain(b.pick([1.0, 0.5, 0.125]), b.chance(40)), q, k, v, *bias)


def _attention_backward(b: Builder) -> None:
    """Of what the forward op gave: other sums would make weights of any size."""
    q, k, v = attend(b)
    scale, causal = b.pick([1.0, 0.5, 0.125]), b.chance(40)
    y, sums = b.insert(AttentionTrain(scale, causal), q, k, v).results
    b.insert(AttentionBackward(scale, causal), b.like(y), q, k, v, y, sums)


def _rotary(b: Builder) -> None:
    x = b.some(lambda t: t.dtype is b.dtype and t.rank > 0 and t.shape[-1] % 2 == 0)
    b.add(Rotary(), x, *(b.fresh(TensorType(b.part(x.type.shape), x.type.dtype)) for _ in range(2)))


def _channel_parameters(b: Builder, x: Value, styles: Sequence[str]) -> list[Value]:
    """Vectors of one number per channel, constant but seldom; a style that is named stays."""
    type = TensorType((x.type.shape[1],), x.type.dtype)
    return [
        b.fresh(type) if not style and b.chance(6) else b.constant(type.shape, type.dtype, style) for style in styles
    ]


def _epsilon(b: Builder) -> float:
    return b.pick([1e-5, 1e-3, 1e-2, 0.5])


def _batch_norm(b: Builder) -> None:
    x = b.float_value(2, 5)
    b.add(BatchNorm(_epsilon(b)), x, *_channel_parameters(b, x, ["", "", "", "positive"]))


def _instance_norm(b: Builder) -> None:
    x = b.float_value(3, 5)
    b.add(InstanceNorm(_epsilon(b)), x, *_channel_parameters(b, x, ["", ""]))


def _group_norm(b: Builder) -> None:
    x = b.float_value(2, 5)
    groups = b.pick([g for g in (1, 2, 4, x.type.shape[1]) if g and x.type.shape[1] % g == 0] or [1])
    b.add(GroupNorm(groups, _epsilon(b)), x, *_channel_parameters(b, x, ["", ""]))


def _trailing(b: Builder) -> tuple[Value, int, tuple[int, ...]]:
    x = b.float_value(1, 5)
    axis = x.type.rank - b.pick([1, 1, 1, min(2, x.type.rank), x.type.rank])
    return x, (axis - x.type.rank if b.chance(30) else axis), x.type.shape[axis:]


def _layer_norm(b: Builder) -> None:
    x, axis, shape = _trailing(b)
    scale = b.constant(b.part(shape) if b.chance(20) else shape, x.type.dtype)
    bias = [b.constant(b.part(shape) if b.chance(20) else shape, x.type.dtype)] if b.chance(60) else []
    b.add(LayerNorm(axis, _epsilon(b)), x, scale, *bias)


def _rms_norm(b: Builder) -> None:
    x, axis, shape = _trailing(b)
    b.add(RmsNorm(axis, _epsilon(b)), x, b.constant(b.part(shape) if b.chance(20) else shape, x.type.dtype))


def _lrn(b: Builder) -> None:
    x = b.float_value(2, 4)
    b.add(LocalResponseNorm(b.pick([3, 1, 2, 5]), b.pick([1e-4, 0.5]), b.pick([0.75, 0.5]), b.pick([1.0, 2.0])), x)


def _reduce(b: Builder) -> None:
    kind = b.pick(["sum", "mean", "max", "min", "prod", "l1", "l2", "sum_square", "log_sum", "log_sum_exp"])
    whole = kind not in ("l2", "log_sum", "log_sum_exp", "mean") and b.chance(10)
    x = _integer_value(b) if whole else b.float_value()
    axes = (
        tuple(sorted({b.below(x.type.rank) for _ in range(b.between(0, 2) if b.chance(20) else 1)}))
        if x.type.rank
        else ()
    )
    if x.type.rank >= 3 and b.chance(30):
        axes = tuple(range(2, x.type.rank))
    elif 1 in x.type.shape and b.chance(25):  # nothing to add up, but |x| and x*x are not x
        axes = tuple(i for i, d in enumerate(x.type.shape) if d == 1)
    if kind == "log_sum":
        x = b.away_from_zero(x)
        axes = tuple(a for a in axes if a < x.type.rank)
    b.add(Reduce(kind, axes, not b.chance(30)), x)


def _softmax(b: Builder) -> None:
    x = b.float_value(1, 5)
    axis = b.below(x.type.rank)
    b.add(Softmax(axis - x.type.rank if b.chance(40) else axis, b.chance(25)), x)


# shapes ------------------------------------------------------------------------------------------


def reshaped(b: Builder, x: Value) -> Value:
    """The value with two dims merged, one split, ones added or dropped, or flattened."""
    shape = x.type.shape
    options: list[tuple[int, ...]] = [(*shape, 1), (1, *shape), (math.prod(shape),)]
    options += [(*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :]) for i in range(len(shape) - 1)]
    options += [(*shape[:i], 2, d // 2, *shape[i + 1 :]) for i, d in enumerate(shape) if d and d % 2 == 0]
    options += [tuple(d for d in shape if d != 1)] if 1 in shape else []
    if len(shape) > 2:
        options.append((shape[0], math.prod(shape[1:])))
    return b.add(Reshape(b.pick(options)), x)


def _reshape(b: Builder) -> None:
    reshaped(b, b.some())


def turned(b: Builder, x: Value) -> Value:
    """The value with its dims permuted: to channels last and back, or in any way."""
    rank = x.type.rank
    common = [(0, *range(2, rank), 1), (0, rank - 1, *range(1, rank - 1)), (*range(rank - 2), rank - 1, rank - 2)]
    return b.add(Transpose(b.pick(common) if rank >= 3 and b.chance(60) else b.permutation(rank)), x)


def _transpose(b: Builder) -> None:
    turned(b, b.some())


def _relayout(b: Builder) -> None:
    x = b.some(lambda t: t.rank >= 2)
    b.add(Relayout(b.permutation(x.type.rank)), x)


def _expand(b: Builder) -> None:
    x = b.some()
    wide = tuple(b.pick([2, 3, 1]) if d == 1 else d for d in x.type.shape)
    b.add(Expand((b.pick([2, 1]), *wide) if b.chance(30) else wide), x)


def _concat(b: Builder) -> None:
    x = b.some(lambda t: t.rank >= 1)
    axis = b.below(x.type.rank)
    others: list[Value] = []
    for _ in range(b.pick([1, 1, 2, 0])):
        size = b.pick([x.type.shape[axis], 1, 2])
        shape = (*x.type.shape[:axis], size, *x.type.shape[axis + 1 :])
        found = [v for v in b.values if v.type.same_value_type(TensorType(shape, x.type.dtype))]
        others.append(b.pick(found) if found and not b.chance(30) else b.fresh(TensorType(shape, x.type.dtype)))
    operands = [x, *others]
    b.insert(Concat(axis - x.type.rank if b.chance(20) else axis), *(operands[::-1] if b.chance(30) else operands))


def _split(b: Builder) -> None:
    x = b.some(lambda t: t.rank >= 1)
    axis = b.below(x.type.rank)
    size = x.type.shape[axis]
    first = b.below(size + 1)
    sizes = [first, size - first]
    if sizes[1] > 1 and b.chance(30):
        sizes = [first, 1, sizes[1] - 1]
    if 0 in sizes and not b.chance(5):
        sizes = [s for s in sizes if s] or [0]
    b.insert(Split(axis, tuple(sizes)), x)


def _slice(b: Builder) -> None:
    x = b.some(lambda t: t.rank >= 1)
    starts, sizes, steps = list[int](), list[int](), list[int]()
    for dim in x.type.shape:
        step = b.pick([1, 2, -1]) if b.chance(25) else 1
        if dim == 0 or b.chance(50):
            start, size, step = 0, dim, 1
        else:
            start = b.below(dim)
            room = (dim - 1 - start) // step if step > 0 else start // -step
            size = 1 + b.below(room + 1)
        starts.append(start)
        sizes.append(size)
        steps.append(step)
    b.add(Slice(tuple(starts), tuple(sizes), tuple(steps)), x)


def _pad(b: Builder) -> None:
    x = b.some()
    mode = b.pick(["constant", "constant", "constant", "edge", "reflect", "wrap"])
    most = [2 if mode != "reflect" else min(2, d - 1) for d in x.type.shape]
    only_space = x.type.rank >= 3 and b.chance(70)
    pads = [
        0 if (only_space and dim % x.type.rank < 2) or not b.chance(70) else b.below(max(m, 0) + 1)
        for dim, m in enumerate(most * 2)
    ]
    value = b.pick([0.0, 1.0, -0.5, -math.inf]) if x.type.dtype.is_float and b.chance(30) else 0.0
    b.add(Pad(tuple(pads), mode, value if mode == "constant" else 0.0), x)


def _gather(b: Builder) -> None:
    x = b.some(lambda t: t.rank >= 1 and t.size > 0)
    axis = b.below(x.type.rank)
    shape = b.pick([(3,), (), (2, 2), (1,), ()])
    dtype = b.pick([DType.I64, DType.I32])
    if b.chance(40):
        indices = b.input(TensorType(shape, dtype)) if len(b.graph.inputs) < 6 else None
        if indices is not None:
            b.values.pop()  # an index is used as nothing else: it must stay in range
            b.add(Gather(axis), x, indices)
            return
    size = x.type.shape[axis]
    numbers = [b.between(-size, size - 1) for _ in range(math.prod(shape))]
    b.add(
        Gather(axis - x.type.rank if b.chance(20) else axis),
        x,
        b.graph.constant(np.array(numbers, dtype.numpy).reshape(shape)),
    )


def _top_k(b: Builder) -> None:
    """Of integers: which of two floats is the larger may hang on a rounding."""
    x = _integer_value(b)
    if x.type.rank == 0:
        raise Unfit("a scalar")
    axis = b.below(x.type.rank)
    k = b.below(x.type.shape[axis] + 1)
    b.insert(TopK(k, axis - x.type.rank if b.chance(20) else axis, b.chance(60)), x)


def _scatter(b: Builder) -> None:
    """Where it only puts, no place is given twice."""
    x = b.some(lambda t: t.rank >= 1 and t.size > 0 and t.dtype is not DType.BOOL)
    reduction = b.pick(["none", "add", "mul", "max", "min"])
    rows, count = x.type.shape[0], b.between(1, 4)
    if reduction == "none":
        places = list(b.permutation(rows))[:count]
    else:
        places = [b.below(rows) for _ in range(count)]
    at = [p - rows if b.chance(20) else p for p in places]
    indices = b.graph.constant(np.array(at, b.pick([DType.I64, DType.I32]).numpy))
    b.add(Scatter(reduction), x, indices, b.fresh(TensorType((len(at), *x.type.shape[1:]), x.type.dtype)))


def _cumulate(b: Builder) -> None:
    x = b.float_value(1, 5) if b.chance(60) else _integer_value(b)
    if x.type.rank == 0:
        raise Unfit("a scalar")
    kind = b.pick(["sum", "prod"])
    if kind == "prod" and x.type.dtype.is_float:
        x = b.bounded(x, -1.5, 1.5)
    b.add(Cumulate(kind, b.below(x.type.rank)), x)


def _resize(b: Builder) -> None:
    x = b.some(lambda t: t.rank >= 1 and t.size > 0)
    mode = "linear" if x.type.dtype.is_float and b.chance(40) else "nearest"
    first = 2 if x.type.rank >= 3 and b.chance(80) else 0
    sizes, scales = list(x.type.shape), [1.0] * x.type.rank
    for dim in range(first, x.type.rank):
        factor = b.pick([2.0, 1.0, 3.0, 0.5, 1.5])
        sizes[dim] = max(1, int(sizes[dim] * factor))
        scales[dim] = (
            factor if b.chance(50) and int(x.type.shape[dim] * factor) >= 1 else sizes[dim] / x.type.shape[dim]
        )
    coordinates = b.pick(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric"])
    rounding = b.pick(["round_prefer_floor", "floor", "ceil", "round_prefer_ceil"])
    b.add(Resize(tuple(sizes), tuple(scales), mode, coordinates, rounding), x)


# training ----------------------------------------------------------------------------------------


def _conv_wgrad(b: Builder) -> None:
    """Of a convolution that is there, or of any that fits."""
    x = b.image()
    channels, spatial = x.type.shape[1], x.type.shape[2:]
    groups = b.pick([1, 1, *(g for g in (2, channels) if channels % g == 0)])
    kernel, strides, pads, dilations = window(b, spatial)
    count = windows_along(spatial, kernel, strides, pads, dilations)
    filters = groups * b.pick([1, 2, 4])
    dy = b.fresh(TensorType((x.type.shape[0], filters, *count), x.type.dtype))
    b.add(ConvWgrad(kernel, strides, pads, dilations, groups), x, dy)


def _max_pool_backward(b: Builder) -> None:
    """Of whole numbers: which of two floats is the larger may hang on a rounding."""
    b.image()
    x = b.add(Cast(b.dtype), b.input(TensorType(b.image_shape(), DType.I8)))
    kernel, strides, pads, dilations = window(b, x.type.shape[2:], pads_below_window=True)
    op = MaxPoolBackward(kernel, strides, pads, dilations, b.chance(30))
    dy = b.fresh(TensorType((*x.type.shape[:2], *op.counts(x.type.shape[2:])), b.dtype))
    b.add(op, dy, x)


def _batch_norm_train(b: Builder) -> None:
    x = b.image()
    b.insert(BatchNormTrain(_epsilon(b)), x, *_channel_parameters(b, x, ["", ""]))


def _batch_norm_backward(b: Builder) -> None:
    x = b.image()
    relu = b.chance(30)
    styles = ["", "", "positive", *([""] if relu else [])]
    b.insert(BatchNormBackward(relu), b.like(x), x, *_channel_parameters(b, x, styles))


def _layer_norm_backward(b: Builder) -> None:
    x, axis, shape = _trailing(b)
    if math.prod(shape) < 3:
        raise Unfit("rows of one or two elements have no gradient, what is left is rounding")
    b.insert(LayerNormBackward(axis, _epsilon(b), b.chance(60)), b.like(x), x, b.constant(shape, x.type.dtype))


def _random_bits(b: Builder) -> None:
    state = b.input(TensorType((2,), DType.U64))
    b.values.pop()  # as an operand of anything else it would overflow
    bits = b.add(RandomBits(b.shape(0, 3), b.pick([0, 1, 7])), state)
    b.values.pop()  # so would this, as a number in 16 bits
    b.pointwise("shift_right", bits, b.graph.constant(np.uint32(24)))


def _all_finite(b: Builder) -> None:
    """Of inputs: what is computed may overflow in one precision and not in another."""
    inputs = [v for v in b.graph.inputs if v.type.dtype.is_float and not v.type.dtype.is_narrow]
    if not inputs:
        inputs = [b.input(TensorType(b.shape(0, 3), b.dtype))]
    b.add(AllFinite(), *(b.pick(inputs) for _ in range(b.pick([1, 2, 3]))))


DRAWS: Mapping[str, Draw] = {
    **{name: _pointwise(name) for name in CLASSES},
    "cast": _cast,
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "matmul": _matmul,
    "attention": _attention,
    "attention_train": _attention_train,
    "attention_backward": _attention_backward,
    "rotary": _rotary,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "lrn": _lrn,
    "max_pool": _pool(MaxPool),
    "avg_pool": _pool(AvgPool),
    "reduce": _reduce,
    "softmax": _softmax,
    "reshape": _reshape,
    "transpose": _transpose,
    "relayout": _relayout,
    "expand": _expand,
    "concat": _concat,
    "split": _split,
    "slice": _slice,
    "pad": _pad,
    "gather": _gather,
    "resize": _resize,
    "top_k": _top_k,
    "scatter": _scatter,
    "cumulate": _cumulate,
    "conv_wgrad": _conv_wgrad,
    "max_pool_backward": _max_pool_backward,
    "batch_norm_train": _batch_norm_train,
    "batch_norm_backward": _batch_norm_backward,
    "layer_norm_backward": _layer_norm_backward,
    "random_bits": _random_bits,
    "all_finite": _all_finite,
}
