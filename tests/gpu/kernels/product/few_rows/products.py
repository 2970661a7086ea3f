"""Build products of few rows with constant weights, as the kernels of this folder run them, and those they refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gpu.kernels.cases import FIGURES, Case, build, rows

from fusec.gpu.kernels import GpuFigures
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import MatMul, RmsNorm, Slice, pw

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32
Refused = tuple[str, list[TensorType], Callable[..., Any]]  # why, the inputs, and what makes the graph


def weights(g: Graph, dtype: DType, depth: int, columns: int) -> Value:
    rng = np.random.default_rng(depth + columns + len(list(g.nodes)))
    return g.constant((rng.standard_normal((depth, columns)) / max(1, depth) ** 0.5).astype(dtype.numpy))


def product(
    dtype: DType, shape: tuple[int, ...], columns: int, figures: GpuFigures = FIGURES, order: tuple[int, ...] = ()
) -> Case:
    """With a bias, a residual and an activation; the sum is stored, too."""

    def make(g: Graph, x: Value, z: Value) -> list[Value]:
        y = g.add(MatMul(), x, weights(g, dtype, shape[-1], columns))
        y = g.add(pw("add"), y, g.constant(np.linspace(-1, 1, columns).astype(dtype.numpy)))
        y = g.add(pw("add"), y, z)
        return [y, g.add(pw("swish", beta=1.0), y)]

    types = [TensorType(shape, dtype, order), rows(dtype, *shape[:-1], columns)]
    case = build(f"{dtype.value} {shape} {columns}", types, make)
    case.figures = figures
    return case


def gated(dtype: DType, shape: tuple[int, ...], columns: int, figures: GpuFigures = FIGURES) -> Case:
    """Two products of the same rows, one of which gates the other."""

    def make(g: Graph, x: Value) -> Value:
        gate = g.add(pw("swish", beta=1.0), g.add(MatMul(), x, weights(g, dtype, shape[-1], columns)))
        return g.add(pw("mul"), gate, g.add(MatMul(), x, weights(g, dtype, shape[-1], columns)))

    case = build(f"gated {dtype.value} {shape} {columns}", [rows(dtype, *shape)], make)
    case.figures = figures
    return case


def sliced(
    dtype: DType, shape: tuple[int, ...], columns: Sequence[int], figures: GpuFigures = FIGURES, normed: bool = False
) -> Case:
    """A product whose columns are stored as several values, as queries, keys and values are; perhaps after a norm."""

    def make(g: Graph, x: Value) -> list[Value]:
        if normed:
            scale = np.random.default_rng(shape[-1]).uniform(-1.0, 1.0, shape[-1]).astype(dtype.numpy)
            x = g.add(RmsNorm(-1, 1e-3), x, g.constant(scale))
        y = g.add(MatMul(), x, weights(g, dtype, shape[-1], sum(columns)))
        first, ones, parts = (0,) * (len(shape) - 1), (1,) * len(shape), list[Value]()
        for number, count in enumerate(columns):
            start = sum(columns[:number])
            parts.append(g.add(Slice((*first, start), (*shape[:-1], count), ones), y))
        return parts

    case = build(f"sliced {dtype.value} {shape} {columns}", [rows(dtype, *shape)], make)
    case.figures = figures
    case.within = 8e-3 if dtype is BF16 else 1e-3  # the reference rounds the normalised rows, the kernel does not
    return case


def refused(count: int) -> list[Refused]:
    """Return products of that number of rows that no kernel of 16-bit weights runs."""

    def plain(g: Graph, x: Value) -> Value:
        return g.add(MatMul(), x, weights(g, x.type.dtype, x.type.shape[-1], 32))

    return [
        ("fp32", [rows(F32, count, 64)], plain),
        ("a depth of 0", [rows(F16, count, 0)], plain),
        ("weights computed", [rows(F16, count, 64), rows(F16, 64, 32)], lambda g, x, w: g.add(MatMul(), x, w)),
        ("columns of a matrix", [TensorType((max(4, count), 64), F16, (1, 0))], plain),
        (
            "two inputs",
            [rows(F16, count, 64), rows(F16, count, 64)],
            lambda g, x, z: g.add(pw("mul"), *(plain(g, v) for v in (x, z))),
        ),
        ("computed rows", [rows(F16, count, 64)], lambda g, x: plain(g, g.add(pw("relu"), x))),
    ]
