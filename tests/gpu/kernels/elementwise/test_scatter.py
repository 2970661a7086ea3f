"""Test the kernel of scatters against the reference, through the emulator: few updates of an element, and many."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, awkward, build, check, last, normal, rows
from gpu.kernels.emulator import needs_compiler

from fusec.gpu.kernels import find
from fusec.gpu.kernels.elementwise import scatter
from fusec.ir import DType, Graph, TensorType
from fusec.ops import Scatter, pw

F32, F16, BF16, F64 = DType.F32, DType.F16, DType.BF16, DType.F64
INTEGERS = (DType.I64, DType.I32, DType.I16, DType.I8, DType.U8, DType.U64)
KINDS = ("add", "mul", "max", "min")
MANY = scatter.FEW + 1


def near_one(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Draw indices below nine, some from the end; and numbers near one, whose sums and products are well-behaved."""
    if type.dtype is DType.I64 and type.rank == 1:
        return rng.integers(-9, 9, type.shape)
    return normal(rng, type) if type.dtype.is_int else rng.uniform(0.9, 1.1, type.shape).astype(type.dtype.numpy)


def different(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Draw indices that differ, because of equal ones any may win; and numbers of all kinds."""
    if type.dtype is DType.I64 and type.rank == 1:
        return rng.permutation(2 * MANY)[: type.size] - MANY
    return awkward(rng, type)


def of(kind: str, dtype: DType, count: int, *shape: int) -> Case:
    """A scatter of `count` rows into a tensor."""
    types = [rows(dtype, *shape), rows(DType.I64, count), rows(dtype, count, *shape[1:])]
    draw = different if kind == "none" else near_one
    name = f"scatter {kind} {dtype.value} {count} into {shape}"
    return build(name, types, lambda g, *given: g.add(Scatter(kind), *given), draw, exact=kind == "none")


def scatter_cases() -> list[Case]:
    """Every reduction and type; few rows and many; rows of one element and of several; other memory orders."""
    order = TensorType((9, 3, 4, 5), F16, (0, 2, 3, 1))
    ordered = [order, rows(DType.I64, 7), last(F16, 7, 3, 4, 5)]
    return [
        *(of(kind, dtype, 7, 9, 5) for kind in KINDS for dtype in (F32, F16, BF16, F64, *INTEGERS)),
        *(of(kind, dtype, 200, 9) for kind in KINDS for dtype in (F32, F16)),
        *(of(kind, dtype, MANY, 9, 2) for kind in KINDS for dtype in (F32, BF16, F64, *INTEGERS)),
        *(of("none", dtype, 200, 2 * MANY, 2) for dtype in (F32, F16, F64, DType.BOOL, DType.U8)),
        *(of("none", dtype, MANY, 2 * MANY, 3) for dtype in (F32, F16, F64, DType.BOOL, DType.U8)),
        of("none", F16, MANY, 2 * MANY, 1),
        of("add", F32, 0, 9, 5),
        of("add", F32, 7, 9, 1),
        build("channels last", ordered, lambda g, *given: g.add(Scatter("add"), *given), near_one),
    ]


@needs_compiler
def test_scatters(rng: np.random.Generator) -> None:
    check(scatter_cases(), rng)


@needs_compiler
def test_scatters_by_atomic_operations(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setattr(scatter, "FEW", 0)
    order = TensorType((9, 3, 4, 5), F16, (0, 2, 3, 1))
    ordered = [order, rows(DType.I64, 7), last(F16, 7, 3, 4, 5)]
    found = [of(kind, dtype, 7, 9, 5, 2) for kind in KINDS for dtype in (F32, F16, DType.I8)]
    check([*found, build("order", ordered, lambda g, *x: g.add(Scatter("max"), *x), near_one)], rng)
    check([of("add", F16, 0, 9, 5)], rng)


@needs_compiler
@pytest.mark.parametrize("few", [0, scatter.FEW])
def test_an_index_without_a_row_changes_nothing(
    few: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """The reference refuses it on the host; on a GPU nothing may be written outside of the result."""
    monkeypatch.setattr(scatter, "FEW", few)
    from gpu.kernels.emulator import Emulator

    case = of("add", F32, 3, 4)
    x, at, updates = case.graph.inputs
    arrays = {x: np.zeros(4, np.float32), at: np.array([4, -5, 1]), updates: np.ones(3, np.float32)}
    kernel = case.kernel
    assert kernel is not None
    (got,) = Emulator([kernel]).run(kernel, arrays, case.outputs)
    np.testing.assert_array_equal(got, [0, 1, 0, 0])


def test_few_updates_take_one_launch_and_no_atomic_operation() -> None:
    few, many = of("add", F16, scatter.FEW, 9, 5).kernel, of("add", F16, MANY, 9, 5).kernel
    assert few is not None and many is not None
    assert len(few.launches) == 1 and "atomic" not in few.launches[0].source
    assert len(many.launches) == 3 and "atomicAdd" in many.launches[1].source
    small = replace(FIGURES, processors=1, processor_threads=8)
    case = of("add", F32, 7, 100, 5)
    assert len(find(case.nodes, case.outputs, small).launches) == 2  # type: ignore[union-attr]  # found above


def test_other_steps_are_left_to_other_kernels() -> None:
    graph = Graph("g")
    x, at, updates = (
        graph.add_input(n, t) for n, t in zip("xau", (rows(F32, 9), rows(DType.I64, 3), rows(F32, 3)), strict=True)
    )
    y = graph.add(pw("relu"), graph.add(Scatter("add"), x, at, updates))
    assert find(tuple(graph.nodes), (y,), FIGURES) is None
