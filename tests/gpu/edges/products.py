"""Rows of products, attention and their gradients: an edge value as one term of each sum, times one of each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gpu.edges.numbers import Array, edges, name, plain, rows
from gpu.edges.row import FLOATS, HALVES, Row, added, row

from fusec.ir import DType, Value, channels_last
from fusec.ops import (
    Attention,
    AttentionBackward,
    AttentionTrain,
    ChannelSums,
    Conv,
    ConvTranspose,
    ConvWgrad,
    FlippedConv,
    MatMul,
    PackedMatMul,
    Recurrent,
    Reduce,
    Rotary,
    pw,
)

F32, F16, BF16 = FLOATS
NHWC = channels_last(4)
ONE_BY_ONE: Any = ((1, 1), (0, 0, 0, 0), (1, 1))
WIDE = ((1, 1), (1, 1, 1, 1), (1, 1))


def factors(dtype: DType, width: int = 16) -> tuple[Array, Array, Array]:
    """Rows, columns and the names of their products: one term multiplies each pair of edge values; in the last
    rows infinities of both signs meet in one sum."""
    values = edges(dtype)
    left = np.tile(plain(width, dtype), (len(values) + 4, 1))
    left[: len(values), 3] = values
    left[16, [2, 5]] = np.inf, -np.inf
    left[17, [2, 5]] = np.inf, np.inf
    left[18, [2, 5]] = values[7], values[7]
    left[19] = 0.0
    right = np.tile(np.ones(width, dtype.numpy), (len(values), 1)).T.copy()
    right[3] = values
    lefts = [*(name(v, dtype) for v in values), "inf and -inf", "inf and inf", "max and max", "zeros"]
    names = np.array([[f"{a} , {name(b, dtype)}" for b in values] for a in lefts], object)
    return left, right, names


def matmuls() -> Iterator[Row]:
    """Of two inputs, of a batch, and by constant weights with a bias."""
    for dtype in FLOATS:
        a, b, names = factors(dtype)
        yield row(f"matmul {dtype.value}", "matmul", [a, b], added(MatMul()), labels=names)
        yield row(f"matmul weights {dtype.value}", "matmul", [a, b], added(MatMul()), labels=names, constants=(1,))
        batch = [np.stack([a, a]), np.stack([b, b[:, ::-1]])]
        labels = np.stack([names, names[:, ::-1]])
        yield row(f"matmul batch {dtype.value}", "matmul", batch, added(MatMul()), labels=labels)
        thin = [a, np.ascontiguousarray(b[:, :4])]
        yield row(f"matmul thin {dtype.value}", "matmul", thin, added(MatMul()), labels=names[:, :4], constants=(1,))


def integer_matmuls() -> Iterator[Row]:
    """Every value times every other, and a sum that wraps around; bytes by constant weights."""
    for dtype in (DType.I32, DType.I64):
        values = edges(dtype)
        left, right = np.ones((16, 3), dtype.numpy), np.ones((3, 16), dtype.numpy)
        left[:, 1], right[1] = values, values
        names = np.array([[f"{a} , {b}" for b in values] for a in values], object)
        yield row(f"matmul {dtype.value}", "matmul", [left, right], added(MatMul()), labels=names)
    values = edges(DType.I8)
    left, right = np.ones((len(values), 32), np.int8), np.ones((32, len(values)), np.int8)
    left[:, 1], right[1] = values, values
    names = np.array([[f"{a} , {b}" for b in values] for a in values], object)
    yield row("matmul weights i8", "matmul", [left, right], added(MatMul()), labels=names, constants=(1,))


def dense_bytes() -> Iterator[Row]:
    """Every byte times every other one, and sums of the largest products, by a product of many rows."""
    yield _every_byte("matmul dense i8", 64, 128, 128)


def resident_weights() -> Iterator[Row]:
    """Every byte times every other one, by a product of many rows and few weights.

    The rows are no whole tiles of 64, because the emulator takes the barrier of a team for one of the block.
    """
    yield _every_byte("matmul of many rows i8", 272, 256, 128)


def _every_byte(name: str, count: int, depth: int, columns: int) -> Row:
    values = edges(DType.I8)
    left, right = np.ones((count, depth), np.int8), np.ones((depth, columns), np.int8)
    left[:, 1], right[1] = np.resize(values, count), np.resize(np.repeat(values, 8), columns)
    left[-1], right[:, -1] = -128, -128
    return row(name, "matmul", [left, right], added(MatMul()), labels=np.array(""), constants=(1,))


def packed_matmuls() -> Iterator[Row]:
    """Every value times a weight of each sign, and times one of zero."""
    for dtype in HALVES:
        x, _, _ = factors(dtype, 64)
        codes = np.ones((16, 64), np.int8)
        codes[:, 3] = np.arange(16) - 8
        labels = np.array([[f"{name(v, dtype)} , {w}" for w in codes[:, 3]] for v in edges(dtype)], object)
        arrays = [x[:16], codes, np.ones((16, 2), np.float32)]
        for kind in (DType.I8, DType.I4):
            arrays[1] = codes.astype(kind.numpy)
            title = f"packed_matmul {kind.value} {dtype.value}"
            yield row(title, "packed_matmul", list(arrays), added(PackedMatMul(32)), labels=labels, constants=(1, 2))


def few_rows() -> Iterator[Row]:
    """Every value times a constant weight of each sign, and times one of zero; four rows at a time."""
    for dtype in HALVES:
        x, _, _ = factors(dtype, 64)
        weights = np.ones((64, 16), dtype.numpy)
        weights[3] = np.arange(16) - 8
        labels = np.array([[f"{name(v, dtype)} , {w}" for w in weights[3]] for v in edges(dtype)], object)
        for start in range(0, 16, 4):
            rows = slice(start, start + 4)
            arrays, title = [x[rows], weights], f"matmul of rows {start} to {start + 3} {dtype.value}"
            yield row(title, "matmul", arrays, added(MatMul()), labels=labels[rows], constants=(1,))


def streamed_weights() -> Iterator[Row]:
    """Every value times a constant weight of each sign, and times one of zero; eight rows at a time."""
    for dtype in HALVES:
        x, _, _ = factors(dtype, 64)
        weights = np.ones((64, 16), dtype.numpy)
        weights[3] = np.arange(16) - 8
        labels = np.array([[f"{name(v, dtype)} , {w}" for w in weights[3]] for v in edges(dtype)], object)
        for start in (0, 8):
            rows = slice(start, start + 8)
            arrays, title = [x[rows], weights], f"matmul of rows {start} to {start + 7} {dtype.value}"
            yield row(title, "matmul", arrays, added(MatMul()), labels=labels[rows], constants=(1,))


def convolutions() -> Iterator[Row]:
    """One by one, by windows with zeros around the image, depthwise, of few channels and filters, transposed."""
    for dtype in FLOATS:
        a, b, names = factors(dtype)
        image = np.ascontiguousarray(a.T).reshape(1, 16, 4, 5)
        filters = np.ascontiguousarray(b.T).reshape(16, 16, 1, 1)
        labels = names.T.reshape(1, 16, 4, 5)
        known: Any = {"constants": (1,), "orders": {0: NHWC}}
        one = Conv(*ONE_BY_ONE)
        yield row(f"conv {dtype.value}", "conv", [image, filters], added(one), labels=labels, **known)
        if dtype is F32:
            title = f"conv tf32 {dtype.value}"
            yield row(title, "conv", [image, filters], added(one), labels=labels, tensor_cores=True, **known)

        def fused(g: Any, x: Value, w: Value, bias: Value, z: Value) -> Value:
            y = g.add(pw("add"), g.add(pw("add"), g.add(Conv(*ONE_BY_ONE), x, w), z), bias)
            return g.add(pw("relu"), y)

        bias = edges(dtype)[::-1].reshape(1, 16, 1, 1).copy()
        arrays = [image, filters, np.where(np.isfinite(bias), bias, 0).astype(bias.dtype), image]
        fits: Any = {"constants": (1, 2), "orders": {0: NHWC, 3: NHWC}}
        yield row(f"conv+add+bias+relu {dtype.value}", "conv", arrays, fused, labels=labels, **fits)

        def gated(g: Any, x: Value, s: Value, w: Value) -> Value:
            return g.add(Conv(*ONE_BY_ONE), g.add(pw("mul"), x, s), w)

        gate = edges(dtype).reshape(1, 16, 1, 1).copy()
        known_gate: Any = {"constants": (2,), "orders": {0: NHWC}}
        plain_image = np.resize(plain(16 * 20, dtype), (1, 16, 4, 5))
        yield row(
            f"gate conv {dtype.value}", "conv", [plain_image, gate, filters], gated, **known_gate, labels=np.array("")
        )
        yield from _windows(dtype)


def _windows(dtype: DType) -> Iterator[Row]:
    values = edges(dtype)
    spots = np.zeros((16, 16, 6, 6), dtype.numpy)  # one edge value amid each image
    spots[:, 3, 2, 3] = values
    labels = np.array([name(v, dtype) for v in values], object).reshape(16, 1, 1, 1)
    weights = np.resize(plain(16 * 9 * 16, dtype), (16, 16, 3, 3))
    known: Any = {"constants": (1,), "orders": {0: NHWC}, "labels": labels}
    yield row(f"conv 3x3 {dtype.value}", "conv", [spots, weights], added(Conv(*WIDE)), **known)
    if dtype is not F32:  # filters in shared memory
        many = [spots, np.resize(plain(64 * 16 * 9, dtype), (64, 16, 3, 3))]
        yield row(f"conv 3x3 of 64 filters {dtype.value}", "conv", many, added(Conv(*WIDE)), **known)
    few = [np.ascontiguousarray(spots[:, 3:6]), np.ascontiguousarray(weights[:, :3])]
    yield row(f"conv few channels {dtype.value}", "conv", few, added(Conv(*WIDE)), **known)
    pair = [spots, np.ascontiguousarray(weights[:2])]
    yield row(f"conv few filters {dtype.value}", "conv", pair, added(Conv(*WIDE)), **known)
    deep = [spots, np.ascontiguousarray(weights[:, :1])]
    yield row(f"conv depthwise {dtype.value}", "conv", deep, added(Conv(*WIDE, 16)), **known)
    filters = weights.copy()
    filters[:, 3, 1, 1] = values
    ends: Any = {**known, "labels": labels.reshape(1, 16, 1, 1)}
    ones = np.ones((2, 16, 6, 6), dtype.numpy)
    yield row(f"conv edge filters {dtype.value}", "conv", [ones, filters], added(Conv(*WIDE)), **ends)
    filters = weights[:, :1].copy()
    filters[:, 0, 1, 1] = values
    yield row(f"conv edge depthwise {dtype.value}", "conv", [ones, filters], added(Conv(*WIDE, 16)), **ends)
    computed: Any = {"orders": {0: NHWC, 1: NHWC}, "labels": labels}
    yield row(f"conv_flipped {dtype.value}", "conv_flipped", [spots, weights], added(FlippedConv(*WIDE)), **computed)
    back = ConvTranspose((1, 1), (1, 1, 1, 1), (1, 1), (0, 0))
    yield row(f"conv_transpose {dtype.value}", "conv_transpose", [spots, weights], added(back), **known)
    stride = ConvTranspose((2, 2), (0, 0, 0, 0), (1, 1), (0, 0))
    small = np.ascontiguousarray(weights[:, :, :2, :2])
    yield row(f"conv_transpose 2x2 {dtype.value}", "conv_transpose", [spots, small], added(stride), **known)
    loss = np.resize(plain(16 * 16 * 36, dtype), (16, 16, 6, 6))
    runs = []  # each image adds to the gradient of all filters: one for each value
    for value in values:
        x = np.resize(plain(2 * 16 * 36, dtype), (2, 16, 6, 6))
        x[1, 3, 2, 3] = value
        runs.append([x, np.ascontiguousarray(loss[:2])])
    gradient = ConvWgrad((3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
    both: Any = {"orders": {0: NHWC, 1: NHWC}, "more": runs[1:], "labels": np.array("")}
    yield row(f"conv_wgrad {dtype.value}", "conv_wgrad", runs[0], added(gradient), **both)

    def summed(g: Any, x: Value, w: Value) -> Sequence[Value]:
        y = g.add(Conv(*ONE_BY_ONE), x, w)
        return (y, *g.insert(ChannelSums(), [y]).results)

    unit = np.zeros((16, 16, 1, 1), dtype.numpy)
    unit[:, 0] = 1.0
    runs = []
    for value in values:
        x = np.zeros((2, 16, 4, 4), dtype.numpy)
        x[:, 0] = np.resize(plain(32, dtype), (2, 4, 4))
        x[1, 0, 2, 3] = value
        runs.append([x, unit])
    common: Any = {"orders": {0: NHWC}, "constants": (1,), "more": runs[1:], "labels": np.array("")}
    yield row(f"conv+channel_sums {dtype.value}", "channel_sums", runs[0], summed, **common)

    def averaged(g: Any, x: Value, w: Value) -> Sequence[Value]:
        y = g.add(pw("relu"), g.add(Conv(*WIDE, 16), x, w))
        return y, g.add(Reduce("mean", (2, 3)), y)

    yield row(f"depthwise and mean {dtype.value}", "conv", deep, averaged, **known)


def attentions() -> Iterator[Row]:
    """Each image of the batch has one kind of row in its bias, its queries, its keys or its values."""
    for dtype in HALVES:
        for op in (
            Attention(0.25),
            Attention(0.25, hides=True),
            Attention(0.25, guarded=True),
            Attention(0.25, hides=True, guarded=True),
        ):
            yield _masked(dtype, op)
        for op in (Attention(0.25), Attention(0.25, causal=True), AttentionTrain(0.25)):
            for place in range(3):
                yield _spoiled(dtype, op, place)
        yield _masked(dtype, AttentionTrain(0.25))
        yield from _gradient(dtype)


def _heads(dtype: DType, batch: int, place: int = 0, length: int = 16) -> Array:
    rng = np.random.default_rng(place)
    return (rng.integers(-4, 5, (batch, 2, length, 16)) / 4).astype(dtype.numpy)


def _masks(dtype: DType) -> tuple[list[str], Array]:
    """Images of a bias: all queries equal."""
    names, masks = rows(dtype, 16)
    wanted = [i for i, n in enumerate(names) if "denormal" not in n and "least" not in n and "smallest" not in n]
    some = masks[wanted]
    lowest = np.full((1, 16), -1e4, dtype.numpy)
    some = np.concatenate([some, lowest])
    return [*(names[i] for i in wanted), "all -1e4"], np.repeat(some[:, None, None, :], 16, axis=2)


def _masked(dtype: DType, op: Any) -> Row:
    names, bias = _masks(dtype)
    heads = [_heads(dtype, len(names), i) for i in range(3)]
    labels = np.array([f"bias {n}" for n in names], object).reshape(-1, 1, 1, 1)
    words = [w for w in ("causal", "hides", "guarded") if getattr(op, w, False)]
    return row(f"{op.name} masked {' '.join(words)} {dtype.value}", op.name, [*heads, bias], added(op), labels=labels)


def _spoiled(dtype: DType, op: Attention | AttentionTrain, place: int) -> Row:
    values = edges(dtype)
    heads = [_heads(dtype, len(values), i) for i in range(3)]
    heads[place][:, 0, 5, 3] = values
    labels = np.array([f"{'qkv'[place]} {name(v, dtype)}" for v in values], object).reshape(-1, 1, 1, 1)
    title = f"{op.name} {'causal ' * op.causal}{'qkv'[place]} {dtype.value}"
    return row(title, op.name, heads, added(op), labels=labels)


def _gradient(dtype: DType) -> Iterator[Row]:
    values = edges(dtype)
    for place, letter in enumerate(["dy", "q", "k", "v"]):
        q, k, v = (_heads(dtype, len(values), i) for i in range(3))
        dy = _heads(dtype, len(values), 7)
        (dy, q, k, v)[place][:, 0, 5, 3] = values
        with np.errstate(all="ignore"):
            y, sums = AttentionTrain(0.25).reference(np, q, k, v)
        labels = np.array([f"{letter} {name(v, dtype)}" for v in values], object).reshape(-1, 1, 1, 1)
        arrays = [dy, q, k, v, y, sums]
        yield row(
            f"attention_backward {letter} {dtype.value}",
            "attention_backward",
            arrays,
            added(AttentionBackward(0.25)),
            labels=labels,
        )


def rotaries() -> Iterator[Row]:
    """Every edge value times every angle's."""
    for dtype in FLOATS:
        values = edges(dtype)
        x = np.zeros((1, 16, 16, 16), dtype.numpy) + values[:, None, None]
        angles = np.tile(values[:, None], (1, 16))
        labels = np.array([[f"{name(a, dtype)} , {name(b, dtype)}" for b in values] for a in values], object)
        ones = np.ones((16, 16), dtype.numpy)
        yield row(
            f"rotary {dtype.value}", "rotary", [x, angles, ones], added(Rotary()), labels=labels.reshape(1, 16, 16, 1)
        )


def recurrents() -> Iterator[Row]:
    """Layers of two steps: each edge value is what one gate of a sequence reads, and one of the first states."""
    for dtype in FLOATS:
        values = edges(dtype)
        names = np.array([name(v, dtype) for v in values], object)
        for cell, gates in (("lstm", 4), ("gru", 3), ("rnn", 1)):
            op, count = Recurrent(cell, linear_before_reset=cell == "gru"), len(values)
            x = np.resize(plain(8, dtype), (2, count, 8 * gates))
            x[0, :, 8 * (gates - 1)] = values
            r = np.full((1, 8 * gates, 8), 0.125, dtype.numpy)
            states = [np.zeros((1, count, 8), dtype.numpy) for _ in range(op.states)]
            states[-1][0, :, 2] = values
            title = f"recurrent {cell} {dtype.value}"
            yield row(title, "recurrent", [x, r, *states], _recurrent(op), labels=names[:, None])


def _recurrent(op: Recurrent) -> Any:
    return lambda graph, *operands: graph.insert(op, operands).results
