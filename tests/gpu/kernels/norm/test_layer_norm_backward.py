"""Test kernels of the gradients of layer and RMS norm against the reference, through the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, assert_same, build, check, last, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.kernels import find
from fusec.gpu.kernels.norm import layer_norm_backward as family
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Cast, LayerNormBackward, Reduce, Split, pw

# Not of one or two elements a row: there the gradient is zero, or nearly so, and what is left of it is rounding.
SHAPES = (((9, 96), -1), ((2, 7, 40), -1), ((3, 5, 6), 1), ((5, 3), -1), ((3, 1500), 1), ((4, 33), 1))
F32, F16, BF16, F64 = DType.F32, DType.F16, DType.BF16, DType.F64
ONE = replace(FIGURES, processors=1)  # for few blocks


def shifted(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Normal numbers around a mean that is not zero: sums of some are no small differences."""
    return (rng.standard_normal(type.shape) + 0.5).astype(type.dtype.numpy)


def norm_backward_cases() -> list[Case]:
    cases: list[Case] = []
    for dtype, parameter in ((F32, F32), (F16, F32), (F16, F16), (BF16, BF16), (F64, F64)):
        for shape, axis in SHAPES:
            for centred in (True, False):
                op = LayerNormBackward(axis, 1e-3, centred)
                x, p = rows(dtype, *shape), rows(parameter, *shape[axis:])
                name = f"{dtype} {parameter} {shape} {centred}"
                make = lambda g, *v, op=op: g.insert(op, list(v)).results  # noqa: E731  # a line of its own says less
                cases.append(build(name, [x, x, p], make, shifted))
    x = last(F16, 2, 4, 5, 24)  # one of both lies otherwise
    for types in ([rows(F16, 2, 4, 5, 24), x], [x, rows(F16, 2, 4, 5, 24)], [x, x]):
        make = lambda g, *v: g.insert(LayerNormBackward(), list(v)).results  # noqa: E731
        cases.append(build(f"orders {types[0].order} {types[1].order}", [*types, rows(F16, 24)], make, shifted))
    return cases


def surrounded_norm_backward() -> list[Case]:
    """With pointwise ops before and after, and what an optimiser makes of the sums."""

    def residual(g: Any, dy: Value, x: Value, s: Value, z: Value, held: Value) -> Sequence[Value]:
        dx, dscale, dbias = g.insert(LayerNormBackward(), [dy, x, s]).results
        moved = g.add(pw("add"), g.add(pw("mul"), held, g.constant(np.float32(0.9))), g.add(Cast(F32), dscale))
        return g.add(pw("add"), dx, z), moved, g.add(Cast(F32), dbias)

    def masked(g: Any, dy: Value, x: Value, s: Value, b: Value) -> Sequence[Value]:
        loss = g.add(pw("relu_backward"), g.add(pw("add"), dy, b), x)
        return loss, *g.insert(LayerNormBackward(), [loss, x, s]).results

    def two_dims(g: Any, dy: Value, x: Value, s: Value, held: Value) -> Sequence[Value]:
        dx, dscale, _ = g.insert(LayerNormBackward(1), [dy, x, s]).results
        return dx, g.add(pw("sub"), held, dscale)

    def bias_in_front(g: Any, dy: Value, x: Value, s: Value, z: Value) -> Sequence[Value]:
        """Gradients of a linear layer before the norm; the residual's gradient is added."""
        dx, dscale, dbias = g.insert(LayerNormBackward(), [dy, x, s]).results
        total = g.add(pw("add"), dx, z)
        return total, g.add(Cast(F32), g.add(Reduce("sum", (0, 1), False), total)), dscale, dbias

    def unused(g: Any, dy: Value, x: Value, s: Value) -> Sequence[Value]:
        dx, dscale = g.insert(LayerNormBackward(-1, 1e-5, False), [dy, x, s]).results
        return g.add(Reduce("sum", (0, 1), False), g.add(pw("neg"), dx)), dscale

    cases: list[Case] = []
    for dtype in (F32, F16):
        x, p = rows(dtype, 6, 5, 40), rows(dtype, 40)
        cases.append(build(f"residual {dtype}", [x, x, p, x, rows(F32, 40)], residual, shifted))
        cases.append(build(f"bias {dtype}", [x, x, p, x], bias_in_front, shifted))
        cases.append(build(f"sum alone {dtype}", [x, x, p], unused, shifted))
        cases.append(build(f"masked {dtype}", [x, x, p, p], masked, shifted))
        cases.append(build(f"per row {dtype}", [x, x, p, rows(dtype, 6, 1, 1)], masked, shifted))
        two = rows(dtype, 4, 6, 8)
        cases.append(build(f"two dims {dtype}", [two, two, *[rows(dtype, 6, 8)] * 2], two_dims, shifted))
    return cases


@needs_compiler
def test_gradients_of_norms(rng: np.random.Generator) -> None:
    check(norm_backward_cases(), rng)


@needs_compiler
def test_pointwise_ops_around_them(rng: np.random.Generator) -> None:
    check(surrounded_norm_backward(), rng)


@needs_compiler
def test_each_way_to_share_a_row_out(rng: np.random.Generator) -> None:
    x, p = rows(F16, 7, 3000), rows(F16, 3000)
    case = build("ways", [x, x, p], lambda g, *v: g.insert(LayerNormBackward(), list(v)).results, shifted)
    assert case.kernel is not None and len(case.kernel.others) >= 2
    arrays = case.arrays(rng)
    emulator = Emulator(case.kernel.others)
    for kernel in case.kernel.others:
        assert_same(case, emulator.run(kernel, arrays, case.outputs), case.reference(arrays))


@needs_compiler
def test_many_rows_for_few_blocks(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "VARIANTS", ((16, 2, 0, False),))
    x, p = rows(F16, 77, 48), rows(F16, 48)
    case = build("long", [x, x, p], lambda g, *v: g.insert(LayerNormBackward(), list(v)).results, shifted)
    case = replace(case, figures=ONE)
    assert case.kernel is not None
    assert case.kernel.launches[0].grid == 2
    check([case], rng)


@needs_compiler
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_rows_copied_ahead_of_their_turn(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """Fewer of them than are ahead, and more."""
    monkeypatch.setattr(family, "VARIANTS", ((16, 2, ahead, False),))
    x, p = rows(F16, 77, 48), rows(F16, 48)
    long = build("long", [x, x, p], lambda g, *v: g.insert(LayerNormBackward(), list(v)).results, shifted)
    all_cases = [long, *norm_backward_cases(), *surrounded_norm_backward()]
    cases = [case for each in all_cases if (case := replace(each, figures=ONE)).kernel is not None]
    assert len(cases) > 20 and all(c.kernel and c.kernel.launches[0].resident_bytes > 0 for c in cases)
    check(cases, rng)


@needs_compiler
@pytest.mark.parametrize("ahead", [0, 2])
def test_blocks_that_meet_for_their_columns(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.setattr(family, "VARIANTS", ((16, 12, ahead, True),))
    x, p = rows(F16, 177, 48), rows(F16, 48)

    def added(g: Any, dy: Value, x: Value, s: Value, z: Value) -> Sequence[Value]:
        dx, dscale, dbias = g.insert(LayerNormBackward(), [dy, x, s]).results
        total = g.add(pw("add"), dx, z)
        return total, g.add(Reduce("sum", (0,), False), total), dscale, g.add(pw("sub"), s, dbias)

    long = build("long", [x, x, p], lambda g, *v: g.insert(LayerNormBackward(), list(v)).results, shifted)
    more = build("more", [x, x, p, x], added, shifted)
    long, more, *others = (replace(case, figures=ONE) for case in (long, more, *norm_backward_cases()))
    cases = [case for case in (long, more, *others) if case.kernel is not None]
    met = [case for case in cases if case.kernel and case.kernel.launches[0].cooperative]
    assert len(met) > 3 and all(case.kernel and len(case.kernel.launches) == 1 for case in met)
    assert long in met and more in met
    check(met, rng)


@needs_compiler
def test_what_is_no_number_stays_in_its_row(rng: np.random.Generator) -> None:
    x, p = rows(F32, 6, 40), rows(F32, 40)
    case = build("nan", [x, x, p], lambda g, *v: g.insert(LayerNormBackward(), list(v)).results, shifted)
    arrays, kernel = case.arrays(rng), case.kernel
    assert kernel is not None
    arrays[case.graph.inputs[1]][2, 5] = np.nan
    arrays[case.graph.inputs[0]][4, 0] = np.inf
    dx, dscale, _ = Emulator([kernel]).run(kernel, arrays, case.outputs)
    want, *_ = case.reference(arrays)
    np.testing.assert_array_equal(np.isnan(dx), np.isnan(want))
    assert np.isnan(dx[2]).all() and np.isfinite(dx[[0, 1, 3, 5]]).all() and np.isnan(dscale).all()


def test_a_row_that_is_too_long_has_none() -> None:
    x, p = rows(F32, 2, 1 << 16), rows(F32, 1 << 16)
    assert build("long", [x, x, p], lambda g, *v: g.insert(LayerNormBackward(), list(v)).results).kernel is None


def test_an_op_of_several_results_has_no_place_after_the_gradients() -> None:
    graph = Graph("g")
    dy, x = (graph.add_input(name, rows(DType.F32, 4, 8)) for name in ("dy", "x"))
    scale = graph.constant(np.ones(8, np.float32))
    backward = graph.insert(LayerNormBackward(-1, 1e-5, True), [dy, x, scale])
    parts = graph.insert(Split(1, (4, 4)), [backward.results[0]])
    graph.set_outputs([*parts.results, *backward.results[1:]])
    assert find((backward, parts), (*backward.results[1:], *parts.results), FIGURES) is None
