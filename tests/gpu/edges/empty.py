"""Rows without elements: a dim of size zero, among the dims that stay and among those that are summed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gpu.edges.row import Row, added, row

from fusec.ir import Body, DType, Op
from fusec.ops import (
    CLASSES,
    AllFinite,
    Attention,
    AvgPool,
    BatchNorm,
    Cast,
    Concat,
    Conv,
    ConvTranspose,
    Cumulate,
    Dilate,
    Expand,
    Gather,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LinearScan,
    MatMul,
    MaxPool,
    Pad,
    Reduce,
    Reshape,
    RmsNorm,
    Rotary,
    Scan,
    Scatter,
    Slice,
    Softmax,
    Split,
    TopK,
    Transpose,
)
from fusec.text import parse

WINDOW: Any = ((3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
ALONG = ((1, 1), (1, 1, 1, 1), (1, 1))

STEP = Body(parse('graph "body" (%h: f32[0,4], %x: f32[0,4]) { %y = add(%h, %x) return %y, %y as "row" }'))

OTHERS: tuple[tuple[Op, tuple[tuple[int, ...], ...]], ...] = (
    (Cast(DType.F16), ((0, 16),)),
    (MatMul(), ((0, 8), (8, 16))),
    (MatMul(), ((16, 0), (0, 8))),
    (MatMul(), ((2, 8, 16), (2, 16, 0))),
    (Conv(*ALONG), ((0, 8, 4, 4), (16, 8, 3, 3))),
    (ConvTranspose(*ALONG, (0, 0)), ((0, 8, 4, 4), (8, 16, 3, 3))),
    (Attention(0.5), ((0, 2, 4, 8), (0, 2, 4, 8), (0, 2, 4, 8))),
    (Attention(0.5), ((1, 2, 0, 8), (1, 2, 4, 8), (1, 2, 4, 8))),
    (Attention(0.5), ((1, 2, 4, 8), (1, 2, 0, 8), (1, 2, 0, 8))),
    (Rotary(), ((0, 4, 8), (4, 8), (4, 8))),
    (BatchNorm(), ((0, 4, 3, 3), (4,), (4,), (4,), (4,))),
    (InstanceNorm(), ((0, 4, 3, 3), (4,), (4,))),
    (GroupNorm(2), ((0, 4, 3, 3), (4,), (4,))),
    (LayerNorm(), ((0, 8), (8,), (8,))),
    (RmsNorm(), ((0, 8), (8,))),
    (MaxPool(*WINDOW), ((0, 8, 4, 4),)),
    (AvgPool(*WINDOW), ((0, 8, 4, 4),)),
    (Reduce("sum", (1,)), ((4, 0),)),
    (Reduce("prod", (1,)), ((4, 0),)),
    (Reduce("l2", (0,)), ((0, 4),)),
    (Reduce("log_sum", (1,)), ((4, 0),)),
    (Reduce("sum", (1,)), ((0, 4),)),
    (Reduce("max", (1,)), ((0, 4),)),
    (Softmax(), ((0, 8),)),
    (Softmax(), ((8, 0),)),
    (Reshape((0, 12)), ((0, 3, 4),)),
    (Transpose((1, 0)), ((0, 4),)),
    (Expand((3, 0, 4)), ((0, 1),)),
    (Concat(0), ((0, 4), (3, 4))),
    (Concat(1), ((0, 4), (0, 3))),
    (Split(0, (0, 3)), ((3, 4),)),
    (Slice((1, 0), (0, 4), (1, 1)), ((3, 4),)),
    (Pad((1, 0, 2, 0)), ((0, 4),)),
    (Dilate((2, 2), (3, 7)), ((0, 4),)),
    (Cumulate("sum", 0), ((0, 4),)),
    (LinearScan(0), ((0, 4), (0, 4))),
    (LinearScan(1), ((0, 4), (0, 4))),
    (Scan(STEP, 3, 1, 1), ((0, 4), (3, 0, 4))),
    (TopK(0), ((3, 4),)),
    (AllFinite(), ((0, 4),)),
)


def empties() -> Iterator[Row]:
    """Each op over nothing, compiled as a model is."""
    for name, made in CLASSES.items():
        rule = made.row.rule
        dtype = DType.I32 if rule == "integer" else DType.BOOL if rule == "bool" else DType.F32
        x = np.zeros((0, 16), dtype.numpy)
        arrays = [np.zeros((0, 16), np.bool_), x, x] if rule == "select" else [x] * made.row.arity
        yield row(f"empty {name}", name, arrays, added(made()), whole=True)
    for number, (op, shapes) in enumerate(OTHERS):
        arrays = [np.ones(shape, np.float32) for shape in shapes]
        yield row(f"empty {op.name} {number} {shapes}", op.name, arrays, added(op), whole=True)
    x, nothing = np.ones((3, 4), np.float32), np.zeros((0,), np.int64)
    yield row("empty gather", "gather", [x, nothing], added(Gather(0)), whole=True)
    yield row("empty scatter", "scatter", [x, nothing, x[:0]], added(Scatter()), whole=True)
