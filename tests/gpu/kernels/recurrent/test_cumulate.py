"""Test the kernel of running sums and products against the reference, through the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check, last, rows
from gpu.kernels.emulator import needs_compiler

from fusec.gpu.kernels import find
from fusec.gpu.kernels.recurrent import cumulate
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Cast, Cumulate, pw

F32, F16, BF16, F64, I64, I32, I8 = (
    DType.F32,
    DType.F16,
    DType.BF16,
    DType.F64,
    DType.I64,
    DType.I32,
    DType.I8,
)


def positive(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Draw numbers of one sign, so that no sum cancels, and near one, so that no product overflows."""
    if type.dtype is DType.BOOL:
        return rng.random(type.shape) < 0.5
    if type.dtype.is_int:
        return rng.integers(0, 3, type.shape).astype(type.dtype.numpy)
    return rng.uniform(0.9, 1.1, type.shape).astype(type.dtype.numpy)


def running(kind: str, axis: int, type: TensorType) -> Case:
    name = f"cumulate {kind} along {axis}: {type}"
    return build(name, [type], lambda g, x: g.add(Cumulate(kind, axis), x), positive)


def positions(graph: Graph, mask: Value, past: Value) -> Value:
    """Compute positions of tokens as exported models do: ops before and after the sum, and an operand after it."""
    wide = graph.add(Cast(F32), mask)
    total = graph.add(Cumulate("sum", 1), wide)
    return graph.add(Cast(I64), graph.add(pw("mul"), graph.add(pw("add"), total, past), past))


def cumulate_cases() -> list[Case]:
    """Types, axes and orders; lines of a thread, of some threads, of a block in several turns, and of several parts."""
    order = TensorType((2, 3, 9, 5), F32, (3, 0, 2, 1))
    most = cumulate.PART
    return [
        *(running(kind, 2, rows(dtype, 2, 3, 19, 4)) for kind in ("sum", "prod") for dtype in (F32, F16, BF16, F64)),
        *(running(kind, 1, rows(dtype, 3, 70)) for kind in ("sum", "prod") for dtype in (I64, I32, I8)),
        *(running("sum", axis, rows(F32, 3, 16, 7)) for axis in (0, 1, -1)),
        *(running("sum", axis, order) for axis in (1, 2)),
        *(running("sum", 1, type) for type in (rows(F16, 3, 100), rows(BF16, 3, 100), rows(F64, 3, 100))),
        *(running("sum", 1, rows(F32, 5, 130, width)) for width in (3, 16, 70)),
        running("sum", 2, last(F16, 2, 3, 90, 5)),
        running("sum", -1, rows(F32, 2, 3000)),
        running("sum", 0, rows(F32, 2 * most + 5)),
        running("sum", 1, rows(I32, 2, most + 1)),
        running("prod", 1, rows(F32, 2, 300)),
        running("sum", 1, rows(F32, 3, 0)),
        build("positions", [rows(DType.BOOL, 2, 77), rows(F32, 77)], positions, positive),
        build("positions of few", [rows(DType.BOOL, 2, 7), rows(F32, 7)], positions, positive),
    ]


@needs_compiler
def test_running_sums_and_products(rng: np.random.Generator) -> None:
    check(cumulate_cases(), rng)


@needs_compiler
def test_parts_begin_with_the_sum_of_all_earlier_parts(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(cumulate, "PART", 64)
    monkeypatch.setattr(cumulate, "LEAST_PART", 64)
    case = running("sum", 1, rows(F32, 3, 1 << 9))
    assert case.kernel is not None and len(case.kernel.launches) == 2
    check([case, running("sum", 1, rows(I64, 2, 5 * 64 + 3, 3)), running("sum", 0, rows(F32, 300, 50))], rng)


def test_a_product_is_computed_in_order() -> None:
    """A zero, and large numbers after it: a product of these alone would overflow, and be NaN times zero."""
    graph = Graph("g")
    y = graph.add(Cumulate("prod", 0), graph.add_input("x", rows(F32, 1000)))
    kernel = find(tuple(graph.nodes), (y,), FIGURES)
    assert kernel is not None and "running * next" in kernel.launches[0].source


def test_other_steps_are_left_to_other_kernels() -> None:
    graph = Graph("g")
    x = graph.add_input("x", rows(F32, 2, 3))
    half = graph.add(pw("relu"), x)
    y = graph.add(Cumulate("sum", 1), half)
    z = graph.add(pw("add"), y, half)
    twice = graph.add(Cumulate("sum", 0), y)
    half_node, y_node, z_node, twice_node = graph.nodes
    assert find((half_node, y_node), (y,), FIGURES) is not None
    assert find((half_node, y_node), (half, y), FIGURES) is None  # a result before the sum is stored, too
    assert find((half_node, y_node, z_node), (z,), FIGURES) is None  # it is read after the sum
    assert find((y_node, twice_node), (twice,), FIGURES) is None
