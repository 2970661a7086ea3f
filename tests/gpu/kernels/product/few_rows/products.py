"""Build products of few rows with constant weights, as the kernels of this folder run them, and those they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gpu.kernels.cases import FIGURES, Case, build, rows

from fusec.gpu.kernels import GpuFigures
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import MatMul, pw

F16, F32 = DType.F16, DType.F32
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
