"""Every op, from the table of cases: types as inferred, float64 kept, 16 bits rounded once, no warnings."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from ops.cases import CASES, Case, operands

from fusec.ir import DType, Graph
from fusec.ops import ALL, BY_NAME, Cast
from fusec.reference import evaluate

FLOATS = [DType.F64, DType.F32, DType.F16, DType.BF16]
FLOAT_CASES = [case for case in CASES if case.floats]


def test_every_op_has_a_case() -> None:
    assert {case.op.name for case in CASES} == {op.name for op in ALL}


def test_names_are_unique() -> None:
    assert [name for name, times in Counter(op.name for op in ALL).items() if times > 1] == []
    assert len(BY_NAME) == len(ALL)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("hostile", [False, True], ids=["usual", "hostile"])
def test_results_are_as_inferred_and_nothing_warns(case: Case, hostile: bool, rng: np.random.Generator) -> None:
    for dtype in FLOATS if case.floats else FLOATS[:1]:
        swapped = case.of(dtype)
        types = swapped.op.infer(*swapped.operands)
        arrays = operands(rng, swapped, hostile)
        before = [a.copy() for a in arrays]
        results = swapped.op.reference(np, *arrays)
        assert [(r.shape, DType.of(r.dtype)) for r in results] == [(t.shape, t.dtype) for t in types]
        for array, old in zip(arrays, before, strict=True):
            assert array.tobytes() == old.tobytes(), "an operand was written to"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_op_as_a_graph(case: Case, rng: np.random.Generator) -> None:
    graph = Graph()
    inputs = [graph.add_input(f"x{i}", type) for i, type in enumerate(case.operands)]
    graph.set_outputs(graph.insert(case.op, inputs).results)
    graph.verify()
    arrays = operands(rng, case)
    got = evaluate(graph, {v.name: a for v, a in zip(inputs, arrays, strict=True)})
    for result, want in zip(got.values(), case.op.reference(np, *arrays), strict=True):
        np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize("case", FLOAT_CASES, ids=str)
def test_float64_in_float64_out(case: Case, rng: np.random.Generator) -> None:
    """And computed as such: the f32 result differs from it, if at all, by f32's rounding."""
    if isinstance(case.op, Cast):
        return
    arrays = operands(rng, case)
    wide = [a.astype(np.float64) if a.dtype == np.float32 else a for a in arrays]
    narrow = case.op.reference(np, *arrays)
    for got, want in zip(narrow, case.op.reference(np, *wide), strict=True):
        assert want.dtype == (np.float64 if got.dtype == np.float32 else got.dtype)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", FLOAT_CASES, ids=str)
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=str)
def test_sixteen_bits_are_the_f32_result_rounded_once(case: Case, dtype: DType, rng: np.random.Generator) -> None:
    if isinstance(case.op, Cast):
        return
    half = operands(rng, case.of(dtype))
    wide = [a.astype(np.float32) if a.dtype == dtype.numpy else a for a in half]
    for got, want in zip(case.op.reference(np, *half), case.op.reference(np, *wide), strict=True):
        with np.errstate(over="ignore"):
            once = want.astype(dtype.numpy) if want.dtype == np.float32 else want
        np.testing.assert_array_equal(got.astype(np.float32), once.astype(np.float32))
