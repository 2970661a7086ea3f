"""Test every op against its oracle, in every precision, and that inference and reference agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import assert_close
from ops.cases import CASES, Case
from ops.onnx_oracle import Array

from fusec.ir import DType, TensorType
from fusec.ops import ALL, BY_NAME, pw

NAMED = {f"{name}-{i}": case for name, cases in CASES.items() for i, case in enumerate(cases)}
FLOATS = {
    name: case
    for name, case in NAMED.items()
    if DType.of(case.arrays(np.random.default_rng(0))[0].dtype) is DType.F32 or name.startswith("where-0")
}


def params(cases: dict[str, Case]) -> list[Any]:
    """Return cases for parametrize, with their names."""
    return [pytest.param(case, id=name) for name, case in cases.items()]


def types(arrays: list[Array]) -> list[TensorType]:
    return [TensorType(a.shape, DType.of(a.dtype)) for a in arrays]


def in_dtype(arrays: list[Array], dtype: DType) -> list[Array]:
    """The floating-point arrays rounded to `dtype`."""
    return [a.astype(dtype.numpy) if a.dtype.kind == "f" else a for a in arrays]


def test_every_op_has_a_case() -> None:
    assert set(CASES) == set(BY_NAME)
    assert all(CASES.values())
    assert all(case.op.name == name for name, cases in CASES.items() for case in cases)
    assert len(BY_NAME) == len(ALL), "two ops share a name"


def test_pointwise_ops_are_equal_by_their_name_and_attributes() -> None:
    assert pw("add") == pw("add")
    assert hash(pw("add")) == hash(pw("add"))
    assert pw("add") != pw("mul")
    assert pw("elu") == pw("elu", alpha=1)
    assert pw("elu") != pw("elu", alpha=0.5)
    assert repr(pw("add")) == "add()"
    with pytest.raises(TypeError, match="unexpected keyword argument 'alpha'"):
        pw("add", alpha=1.0)


@pytest.mark.parametrize("case", params(NAMED))
def test_reference_agrees_with_the_oracle(case: Case, rng: np.random.Generator) -> None:
    arrays = case.arrays(rng)
    results, wanted = case.op.reference(np, *arrays), case.oracle(*arrays)
    assert len(results) == len(wanted)
    for got, want in zip(results, wanted, strict=True):
        assert_close(got, want, 2e-6 if case.rounds else 0.0)


@pytest.mark.parametrize("case", params(NAMED))
def test_inference_tells_the_type_of_the_results(case: Case, rng: np.random.Generator) -> None:
    arrays = case.arrays(rng)
    for dtype in (DType.F32, DType.F16, DType.BF16, DType.F64):
        operands = in_dtype(arrays, dtype)
        op = case.op_of(dtype)
        inferred = op.infer(*types(operands))
        assert [t.with_order(()) for t in inferred] == types(list(op.reference(np, *operands)))


@pytest.mark.parametrize("case", params(NAMED))
def test_memory_order_changes_no_meaning(case: Case, rng: np.random.Generator) -> None:
    plain = types(case.arrays(rng))
    ordered = [t.with_order(tuple(reversed(range(t.rank)))) for t in plain]
    for got, want in zip(case.op.infer(*ordered), case.op.infer(*plain), strict=True):
        assert got.same_value_type(want)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
@pytest.mark.parametrize("case", params({name: case for name, case in FLOATS.items() if case.retyped is None}))
def test_half_precision_is_single_rounded_once(case: Case, dtype: DType, rng: np.random.Generator) -> None:
    half = in_dtype(case.arrays(rng), dtype)
    wide = [a.astype(np.float32) if DType.of(a.dtype).is_float else a for a in half]
    for got, want in zip(case.op.reference(np, *half), case.op.reference(np, *wide), strict=True):
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got, want.astype(got.dtype))


@pytest.mark.parametrize("case", params({name: case for name, case in FLOATS.items() if not name.startswith("cast")}))
def test_double_precision_stays_double(case: Case, rng: np.random.Generator) -> None:
    arrays = case.arrays(rng)
    finer = in_dtype(arrays, DType.F64)
    if case.rounds:  # no operand fits f32
        finer = [a * (1 + 1e-10) if a.dtype.kind == "f" else a for a in finer]
    single, double = case.op.reference(np, *arrays), case.op_of(DType.F64).reference(np, *finer)
    for low, high in zip(single, double, strict=True):
        if low.dtype != np.float32:
            assert low.dtype == high.dtype  # a comparison
            continue
        assert high.dtype == np.float64
        assert_close(low, high, 1e-5)
        if case.rounds:
            assert np.any(high.astype(np.float32) != high), "every value fits f32: it was computed in f32"


@pytest.mark.parametrize("case", params(FLOATS))
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16, DType.F64])
def test_extremes_raise_no_warning(case: Case, dtype: DType, rng: np.random.Generator) -> None:
    """Warnings are errors in these tests: NaN, infinities and overflow pass in silence."""
    extremes = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 6e4, -6e4, 1e-7, 1.0, -300.0])
    operands = [
        rng.choice(extremes, a.shape).astype(dtype.numpy) if a.dtype.kind == "f" else a for a in case.arrays(rng)
    ]
    op = case.op_of(dtype)
    assert types(list(op.reference(np, *operands))) == [t.with_order(()) for t in op.infer(*types(operands))]


@pytest.mark.parametrize("case", params(NAMED))
def test_text_form_names_the_op_and_its_attributes(case: Case) -> None:
    twin = type(case.op)(**case.op.attributes)
    assert twin == case.op
    assert hash(twin) == hash(case.op)
