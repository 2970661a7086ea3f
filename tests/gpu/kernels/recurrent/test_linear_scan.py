"""Test the kernel of linear recurrences against the reference, through the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check, last, rows
from gpu.kernels.emulator import needs_compiler

from fusec.gpu.kernels import find
from fusec.gpu.kernels.recurrent import linear_scan
from fusec.ir import DType, Graph, TensorType
from fusec.ops import LinearScan, pw

F32, F16, BF16, F64 = DType.F32, DType.F16, DType.BF16, DType.F64


def stable(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Draw factors that are at most one, so that no step makes an error larger."""
    return rng.uniform(-1, 1, type.shape).astype(type.dtype.numpy)


def scan(axis: int, a: TensorType, b: TensorType) -> Case:
    return build(f"linear_scan along {axis}: {a} {b}", [a, b], lambda g, a, b: g.add(LinearScan(axis), a, b), stable)


def scan_cases() -> list[Case]:
    """Every type and axis; steps that are loaded together and steps left over; memory orders; one row, and no steps."""
    order = TensorType((2, 3, 9, 5), F32, (3, 0, 2, 1))
    return [
        *(scan(2, rows(dtype, 2, 3, 19, 4), rows(dtype, 2, 3, 19, 4)) for dtype in (F32, F16, BF16, F64)),
        *(scan(axis, rows(F32, 3, 16, 7), rows(F32, 3, 16, 7)) for axis in (0, 1, -1)),
        scan(2, order, rows(F32, 2, 3, 9, 5)),
        scan(2, rows(F16, 2, 3, 9, 5), last(F16, 2, 3, 9, 5)),
        scan(0, rows(F32, 300), rows(F32, 300)),
        scan(1, rows(F32, 700, 1), rows(F32, 700, 1)),
        scan(1, rows(F32, 3, 0), rows(F32, 3, 0)),
    ]


@needs_compiler
def test_recurrences(rng: np.random.Generator) -> None:
    check(scan_cases(), rng)


@needs_compiler
@pytest.mark.parametrize("together", [1, 3])
def test_steps_that_are_loaded_together(
    together: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(linear_scan, "_CUDA", linear_scan._CUDA.bind(TOGETHER=together))
    check([scan(1, rows(F32, 4, 11, 3), rows(F32, 4, 11, 3))], rng)


def test_other_steps_are_left_to_other_kernels() -> None:
    graph = Graph("g")
    a, b = (graph.add_input(name, rows(F32, 2, 3)) for name in "ab")
    y = graph.add(pw("relu"), graph.add(LinearScan(1), a, b))
    nodes = tuple(graph.nodes)
    assert find(nodes, (y,), FIGURES) is None
    assert linear_scan.linear_scan(nodes[1:], (y,), FIGURES) is None
