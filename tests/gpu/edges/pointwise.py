"""Rows of pointwise ops: every pair of edge values; alone, and after a product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gpu.edges.numbers import Array, edges, more
from gpu.edges.row import FLOATS, Row, added, row

from fusec.ir import DType, Op, channels_last
from fusec.lower_cudnn import LOWER
from fusec.ops import CLASSES, Cast, Conv, MatMul, Pointwise, pw

F32, F16, BF16 = FLOATS
INTEGERS = (DType.I32, DType.I8, DType.I64, DType.U8)
TYPES: Mapping[str, tuple[DType, ...]] = {
    "float": FLOATS,
    "test": FLOATS,
    "number": (*FLOATS, *INTEGERS),
    "any": (*FLOATS, DType.I32, DType.BOOL),
    "select": (*FLOATS, DType.I32),
    "compare": (*FLOATS, DType.I32, DType.I8, DType.U8),
    "bool": (DType.BOOL,),
    "integer": INTEGERS,
}
# attributes that make another lowering, or another side of a comparison, than the defaults do
VARIANTS: Mapping[str, tuple[Mapping[str, float], ...]] = {
    "clip": ({}, {"min": 0.0}, {"min": 0.0, "max": 6.0}, {"min": -1.0}, {"max": 1.0}, {"min": -1.5, "max": 2.5}),
    "leaky_relu": ({}, {"alpha": 2.0}, {"alpha": -0.5}),
    "elu": ({}, {"alpha": 0.7}),
    "swish": ({}, {"beta": 1.7}),
    "swish_backward": ({}, {"beta": 1.7}),
    "celu": ({}, {"alpha": 1.7}),
    "thresholded_relu": ({}, {"alpha": 0.0}),
}
MOVES = ("identity", "where")


def pointwise() -> Iterator[Row]:
    """Each op by itself, in each kind of type it takes."""
    for name, made in CLASSES.items():
        for attributes in VARIANTS.get(name, ({},)):
            for dtype in TYPES[made.row.rule]:
                yield _alone(pw(name, **attributes), dtype)


def casts() -> Iterator[Row]:
    """Between floats, from integers and bools, and of finite numbers that they hold to integers."""
    floats = (*FLOATS, DType.F64)
    pairs = [(a, b) for a in FLOATS for b in floats if a is not b]
    pairs += [(a, b) for a in (DType.I32, DType.I8, DType.I64, DType.BOOL) for b in (F32, F16)]
    pairs += [(a, DType.BOOL) for a in (*FLOATS, DType.I32)]
    pairs += [(DType.I32, DType.I8), (DType.I32, DType.I64), (DType.I64, DType.I32)]
    for source, target in pairs:
        x = more(source).reshape(4, 12)
        yield row(f"cast {source.value} to {target.value}", "cast", [x], added(Cast(target)))
    for source in FLOATS:  # what an integer does not hold has no meaning
        x = np.array([-0.0, 0.0, 0.9, -0.9, 1.0, -1.0, 2.5, 100.0], source.numpy).reshape(2, 4)
        yield row(f"cast {source.value} to i32", "cast", [x], added(Cast(DType.I32)))
    x = np.array([*more(DType.F32), *(i / 4 for i in range(-520, 520, 7)), 0.5, 1.5, -2.5, 126.5, -128.5], np.float32)
    yield row("round to i8", "round", [x[~np.isnan(x)]], _to_bytes)


def _to_bytes(g: Any, x: Any) -> Any:
    """Round as a quantised model does; a NaN has no integer."""
    return g.add(Cast(DType.I8), g.add(pw("clip", min=-128.0, max=127.0), g.add(pw("round"), x)))


def chosen() -> Iterator[Row]:
    """Comparisons and what is made of them, as cuDNN takes them: their bools choose between numbers."""
    for dtype in FLOATS:
        x, y = _pairs(dtype)
        z = np.resize(np.array([2.0, -0.0], dtype.numpy), x.shape)
        for name, made in CLASSES.items():
            if made.row.rule == "compare":
                yield _choice(name, dtype, [x, y, z], lambda g, x, y, name=name: g.add(pw(name), x, y))
        for name in ("logical_and", "logical_or"):

            def joined(g: Any, x: Any, y: Any, name: str = name) -> Any:
                return g.add(pw(name), g.add(pw("cmp_gt"), x, y), g.add(pw("cmp_neq"), x, x))

            yield _choice(name, dtype, [x, y, z], joined)
        inverse = lambda g, x, y: g.add(pw("logical_not"), g.add(pw("cmp_lt"), x, y))  # noqa: E731
        yield _choice("logical_not", dtype, [x, y, z], inverse)
        yield _choice("where", dtype, [x, y, z], lambda g, x, y: g.add(pw("cmp_eq"), x, x))


def _choice(name: str, dtype: DType, arrays: list[Array], mask: Any) -> Row:
    def make(g: Any, x: Any, y: Any, z: Any) -> Any:
        return g.add(pw("where"), mask(g, x, y), x, z)

    return row(f"where {name} {dtype.value}", name, arrays, make)


def operands(op: Pointwise, dtype: DType) -> list[Array]:
    """Each edge value against each."""
    if op.row.rule == "select":
        mask = np.repeat(np.array([True, False]), 256).reshape(2, 16, 16)
        return [mask, *(np.stack([x, x]) for x in _pairs(dtype))]
    return [more(dtype).reshape(4, 12)] if op.row.arity == 1 else _pairs(dtype)


def _pairs(dtype: DType) -> list[Array]:
    one = edges(dtype)
    return [np.repeat(one, 16).reshape(16, 16), np.tile(one, 16).reshape(16, 16)]


def _alone(op: Pointwise, dtype: DType) -> Row:
    title = " ".join([op.name, dtype.value, *(f"{k}={v}" for k, v in op.attributes.items() if k != "axis")])
    return row(title, op.name, operands(op, dtype), added(op), exact=op.name in MOVES)


def epilogues() -> Iterator[Row]:
    """After a product that gives each edge value as it is: one term of its sum is the value, the rest are zeros."""
    for name, made in CLASSES.items():
        if name not in LOWER or made.row.rule not in ("float", "number"):
            continue
        for attributes in VARIANTS.get(name, ({},)):
            yield from _behind(pw(name, **attributes))


def _behind(op: Pointwise) -> Iterator[Row]:
    values = [more(F16).reshape(48, 1)] if op.row.arity == 1 else [a.reshape(256, 1) for a in _pairs(F16)]
    count = len(values[0])
    x, w = np.zeros((count, 16), np.float16), np.zeros((16, 16), np.float16)
    x[:, :1], w[0] = values[0], 1.0
    rest = [np.repeat(v, 16, axis=1) for v in values[1:]]
    text = " ".join(f"{k}={v}" for k, v in op.attributes.items())
    named = _names([v.reshape(-1) for v in values])

    def by_matmul(g: Any, x: Any, w: Any, *rest: Any) -> Any:
        return g.add(op, g.add(MatMul(), x, w), *rest)

    yield row(
        f"matmul+{op.name} {text}",
        op.name,
        [x, w, *rest],
        by_matmul,
        constants=(1,),
        labels=named[:, None],
        single=True,
    )
    image, filters = _image(x), np.ascontiguousarray(w.T).reshape(16, 16, 1, 1)
    more_images = [_image(r) for r in rest]
    nhwc = channels_last(4)

    def by_conv(g: Any, x: Any, w: Any, *rest: Any) -> Any:
        return g.add(op, g.add(Conv((1, 1), (0,) * 4, (1, 1)), x, w), *rest)

    orders = {0: nhwc, **{i + 2: nhwc for i in range(len(rest))}}
    labels = named.reshape(1, 1, 16, -1)
    arrays = [image, filters, *more_images]
    known: Any = {"constants": (1,), "orders": orders, "labels": labels, "single": True}
    yield row(f"conv+{op.name} {text}", op.name, arrays, by_conv, **known)


def _image(rows: Array) -> Array:
    """Rows as the pixels of one image."""
    return np.ascontiguousarray(rows.T).reshape(1, rows.shape[1], 16, -1)


def _names(values: list[Array]) -> Array:
    from gpu.edges.numbers import name

    return np.array([" , ".join(name(v, F16) for v in some) for some in zip(*values, strict=True)], object)


def is_pointwise(op: Op) -> bool:
    """Tell if an op is in the pointwise table."""
    return isinstance(op, Pointwise)
