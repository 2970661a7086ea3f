"""Test that every op reads operands of any strides, writes to none, and gives a reason for those it refuses."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ops.cases import CASES, Case
from ops.test_refusals import REFUSALS, types

import fusec.ops
from fusec.errors import VerifyError
from fusec.ir import DType, Op, TensorType
from fusec.ops import ACTIVATION_GRADIENTS, CLASSES

FLAT = [pytest.param(case, id=f"{name}-{i}") for name, cases in CASES.items() for i, case in enumerate(cases)]
Array = np.ndarray[Any, Any]


@pytest.mark.parametrize("case", FLAT)
def test_operands_are_read_in_any_memory_and_not_written_to(case: Case, rng: np.random.Generator) -> None:
    plain = case.arrays(rng)
    for array in plain:
        array.flags.writeable = False
    strided = [_strided(a) for a in plain]
    for got, want in zip(case.op.reference(np, *strided), case.op.reference(np, *plain), strict=True):
        assert got.dtype == want.dtype
        wide = want.astype(np.float64)
        scale = np.abs(wide[np.isfinite(wide)]).max(initial=1.0)  # sums in another order differ by their largest terms
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * scale)


def test_gradients_of_activations_are_proportional_to_the_gradient_of_the_result(rng: np.random.Generator) -> None:
    dy, x = rng.standard_normal((2, 1000))
    for kind in ACTIVATION_GRADIENTS:
        (once,), (twice,) = (kind().reference(np, factor * dy, x) for factor in (1.0, 2.0))
        assert np.linalg.norm(twice - 2 * once) <= 1e-14 * np.linalg.norm(once), kind.name
    assert len(ACTIVATION_GRADIENTS) == sum(name.endswith("_backward") for name in CLASSES)


def _strided(array: Array) -> Array:
    """Return the same numbers with dims reversed in memory, and unrelated elements between them."""
    wide = np.repeat(array[..., None], 2, axis=-1)
    wide[..., 1] = 0
    view = np.asfortranarray(wide)[..., 0]
    view.flags.writeable = False
    return view


@pytest.mark.parametrize("case", FLAT)
@pytest.mark.parametrize("dtype", [DType.F64, DType.I8, DType.U8, DType.I64, DType.U64], ids=lambda d: d.value)
def test_the_largest_numbers_raise_no_warning(case: Case, dtype: DType, rng: np.random.Generator) -> None:
    """Zero divisors and overflow among them, wherever inference takes the type."""
    arrays = case.arrays(rng)
    kinds = "f" if dtype.is_float else "iu"
    if case.op.name in ("gather", "scatter") or arrays[0].dtype.kind not in kinds:
        return
    info = np.finfo(np.float64) if dtype.is_float else np.iinfo(dtype.numpy)
    values = np.array([info.min, info.max, info.max // 3, 0, 1, -1 if info.min else 2], dtype.numpy)
    operands = [rng.choice(values, a.shape) if a.dtype.kind in kinds else a for a in arrays]
    try:
        op = case.op_of(dtype)
        inferred = op.infer(*(TensorType(a.shape, DType.of(a.dtype)) for a in operands))
    except VerifyError:
        return
    results = op.reference(np, *operands)
    assert [(r.shape, DType.of(r.dtype)) for r in results] == [(t.shape, t.dtype) for t in inferred]


# which checks were tripped -----------------------------------------------------------------------------

CHECKS = {"require", "require_arity", "require_float", "product_dtype", "normalize_axis", "broadcast"}


def _sites() -> set[tuple[str, int]]:
    """File and first line of every call of a check inside an op's own code."""
    sites: set[tuple[str, int]] = set()
    for module in pkgutil.iter_modules(fusec.ops.__path__):
        if module.name in ("spec", "__main__"):
            continue
        file = inspect.getsourcefile(importlib.import_module(f"fusec.ops.{module.name}"))
        assert file is not None
        for node in ast.walk(ast.parse(Path(file).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CHECKS:
                sites.update({(Path(file).name, node.lineno)})
    return sites


def _refusing(op: Op, operands: list[TensorType]) -> set[tuple[str, int]]:
    """Return the lines of code that raise the refusal, by its traceback."""
    with pytest.raises(VerifyError) as error:
        op.infer(*operands)
    return {(Path(str(entry.path)).name, entry.lineno + 1) for entry in error.traceback}


def test_every_check_of_every_op_has_tripped() -> None:
    """A refusal without a test case may never be raised, or may have a wrong message."""
    seen: set[tuple[str, int]] = set()
    for op, operands, _ in REFUSALS:
        seen |= _refusing(op, types(operands))
    silent = {site for site in _sites() if site not in seen}
    assert sorted(silent) == []
