"""Test that constants computed some rows at a time are those computed whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fusec.ir import DType, Graph, Literal, Op, TensorType, Value
from fusec.ops import Cast, Reshape, Transpose, pw
from fusec.passes.base import Options
from fusec.passes.cleanup.fold_constants import FoldConstants
from fusec.passes.rewriting import derived_constants, row_by_row
from fusec.passes.rewriting.row_by_row import is_row_by_row
from fusec.reference import evaluate
from fusec.system import threaded_parts

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small constants are computed as large ones; the last part has fewer rows."""
    monkeypatch.setattr(derived_constants, "EAGER_BYTES", 0)
    monkeypatch.setattr(derived_constants, "PARALLEL_BYTES", 1)
    monkeypatch.setattr(threaded_parts, "PARALLEL_BYTES", 1)
    monkeypatch.setattr(row_by_row, "PART_ELEMENTS", 40)


def folded(arrays: Sequence[Array], ops: Sequence[tuple[Op, Sequence[int]]]) -> tuple[Literal, Array]:
    """Return the last result of ops over constants as it is folded, and as it is computed node by node."""
    graph = Graph()
    values: list[Value] = [graph.constant(array, f"w{number}") for number, array in enumerate(arrays)]
    for op, places in ops:
        values.append(graph.add(op, *(values[place] for place in places)))
    graph.set_outputs([values[-1]])
    (want,) = evaluate(graph, {}).values()
    FoldConstants().run(graph, Options())
    literal = graph.outputs[0].literal
    assert literal is not None
    return literal, want


def test_dequantised_weights_take_no_memory_in_between(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = rng.integers(0, 16, (13, 3, 4), dtype=np.uint8).astype(DType.U4.numpy)
    scales = rng.uniform(0.5, 1.5, (13, 3, 1)).astype(np.float32)
    ops: list[tuple[Op, Sequence[int]]] = [
        (Cast(DType.F32), [0]),
        (pw("sub"), [3, 2]),
        (pw("mul"), [4, 1]),
        (Reshape((13, 12)), [5]),
        (Cast(DType.F16), [6]),
        (Transpose((1, 0)), [7]),
    ]
    parts: list[tuple[int, ...]] = []
    reference = Cast.reference

    def noted(op: Cast, xp: Any, *operands: Array) -> tuple[Array, ...]:
        parts.append(operands[0].shape)
        return reference(op, xp, *operands)

    literal, want = folded([codes, scales, np.array(8, np.float32)], ops)
    monkeypatch.setattr(Cast, "reference", noted)
    np.testing.assert_array_equal(literal.array, want)
    assert {shape[0] for shape in parts} == {3, 1}, "three rows at a time, and the last one"


@pytest.mark.parametrize("shape", [(12, 12), (12,), (1, 12), (1,), ()])
def test_operands_are_broadcast_as_a_whole(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """Neither a vector as long as there are rows nor a single row has rows of its own."""
    literal, want = folded(
        [rng.standard_normal((12, 12)).astype(np.float32), rng.standard_normal(shape).astype(np.float32)],
        [(pw("mul"), [0, 1]), (pw("exp"), [2])],
    )
    np.testing.assert_array_equal(literal.array, want)


def test_rows_that_depend_on_others_are_computed_whole(rng: np.random.Generator) -> None:
    literal, want = folded(
        [rng.standard_normal((12, 8)).astype(np.float32)],
        [(Reshape((6, 16)), [0]), (pw("exp"), [1]), (Transpose((1, 0)), [2]), (pw("neg"), [3])],
    )
    np.testing.assert_array_equal(literal.array, want)


def test_positions_are_not_computed_row_by_row() -> None:
    type = TensorType((6, 6), DType.F32)
    assert is_row_by_row(pw("relu"), type, [type])
    assert not is_row_by_row(pw("gen_index", axis=0), type, [type])
    assert not is_row_by_row(Transpose((1, 0)), type, [type])
    assert not is_row_by_row(Reshape((4, 9)), TensorType((4, 9), DType.F32), [type])
