"""Test kernels of reductions, softmax and norms against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import Case, assert_same, awkward, build, check, last, normal, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.kernels.codegen.row_plan import RowShape
from fusec.gpu.kernels.norm import row_reduction as family
from fusec.ir import DType, TensorType
from fusec.ops import Cast, GroupNorm, InstanceNorm, LayerNorm, Reduce, RmsNorm, Softmax, pw

F32, F16, BF16, F64 = DType.F32, DType.F16, DType.BF16, DType.F64
FLOATS = (F32, F16, BF16)
KINDS = ("sum", "mean", "max", "min", "l1", "l2", "sum_square", "log_sum_exp")


def positive(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    return np.abs(normal(rng, type))


def reductions() -> list[Case]:
    cases: list[Case] = []

    def add(kind: str, axes: tuple[int, ...], type: TensorType, keepdims: bool = True, draw: Any = None) -> None:
        op = Reduce(kind, axes, keepdims)
        name = f"{op} {type}"
        cases.append(build(name, [type], lambda g, x: g.add(op, x), *([draw] if draw else [])))

    for dtype in FLOATS:
        for kind in KINDS:
            add(kind, (2, 3), last(dtype, 2, 24, 7, 5), draw=awkward if kind in ("max", "min") else None)
            add(kind, (1,), rows(dtype, 5, 40), keepdims=False)
        for type in (
            last(dtype, 2, 3, 4, 5),
            rows(dtype, 2, 8, 4, 16),
            rows(dtype, 3, 1, 9, 1),
            last(dtype, 1, 16, 33, 3),
        ):
            for axes in ((0,), (1,), (3,), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3), ()):
                # positive numbers for a single mean, because one near zero has nothing else to be measured by
                draw = positive if len(axes) == 4 else None
                add("mean", axes, type, keepdims=bool(len(axes) % 2), draw=draw)
    add("sum", (1,), rows(F16, 3, 0))
    add("prod", (1,), rows(F32, 3, 0))
    add("prod", (1,), rows(F32, 3, 7))
    add("sum", (0,), rows(F16, 3, 0))
    add("mean", (1,), rows(F64, 3, 1000))
    add("mean", (0, 1), rows(F32, 300, 77), keepdims=False)
    for dtype in (DType.I64, DType.I32, DType.I8, DType.U8):
        for kind in ("sum", "max", "min", "prod", "l1", "sum_square"):
            add(kind, (1,), rows(dtype, 4, 5, 6))
    return cases


def several() -> list[Case]:
    """Several reductions of the same elements, with pointwise ops before and after."""

    def extremes(g: Any, x: Any, axes: tuple[int, ...], keepdims: bool = True) -> list[Any]:
        least, most = (g.add(Reduce(kind, axes, keepdims), x) for kind in ("min", "max"))
        return [g.add(pw("sub"), most, least), least]

    def scaled(g: Any, x: Any, y: Any) -> list[Any]:
        return extremes(g, g.add(pw("mul"), x, y), (0, 1), keepdims=False)

    def sums(g: Any, x: Any) -> list[Any]:
        return [g.add(Reduce(kind, (1,), True), x) for kind in ("l2", "mean", "max")]

    cases: list[Case] = []
    for dtype in (*FLOATS, DType.I32):
        for shape, axes in (((300, 77), (0, 1)), ((6, 64), (1,)), ((2, 9000), (1,)), ((70, 40), (0,)), ((2, 3, 5), ())):
            for type in (rows(dtype, *shape), TensorType(shape, dtype, tuple(reversed(range(len(shape)))))):
                draw = awkward if dtype is F32 else normal
                cases.append(build(f"{type} {axes}", [type], lambda g, x, a=axes: extremes(g, x, a), draw))
    cases.append(build("scaled", [rows(F32, 500, 33), rows(F32, 500, 33)], scaled))
    cases.append(build("three", [rows(F32, 8, 2000)], sums))
    return cases


def normed() -> list[Case]:
    cases: list[Case] = []

    def softmax(axis: int, log: bool, type: TensorType) -> None:
        op = Softmax(axis, log)
        cases.append(build(f"{op} {type}", [type], lambda g, x: g.add(op, x)))

    for dtype in FLOATS:
        for log in (False, True):
            for type in (
                rows(dtype, 6, 10),
                rows(dtype, 3, 1000),
                rows(dtype, 2, 5, 33),
                rows(dtype, 1, 1),
                rows(dtype, 0, 4),
            ):
                softmax(-1, log, type)
            softmax(1, log, last(dtype, 2, 19, 5, 4))
            softmax(2, log, last(dtype, 2, 8, 5, 4))
            softmax(1, log, rows(dtype, 2, 19, 5, 4))
        for shape, axis in (((4, 96), -1), ((2, 7, 40), -1), ((3, 5, 6), 1), ((2, 4100), -1), ((1, 9000), 1)):
            scale, bias = rows(dtype, *shape[axis % len(shape) :]), rows(dtype, shape[-1])
            x = rows(dtype, *shape)
            cases.append(
                build(f"layer {dtype} {shape}", [x, scale, bias], lambda g, *v, a=axis: g.add(LayerNorm(a), *v))
            )
            cases.append(build(f"plain {dtype} {shape}", [x, scale], lambda g, *v, a=axis: g.add(LayerNorm(a), *v)))
            cases.append(build(f"rms {dtype} {shape}", [x, scale], lambda g, *v, a=axis: g.add(RmsNorm(a), *v)))
        for kind in (last, rows):
            for shape in ((2, 16, 9, 5), (1, 6, 3, 4), (2, 12, 40)):
                x, p = kind(dtype, *shape), rows(dtype, shape[1])
                name = f"{kind.__name__} {dtype} {shape}"
                cases.append(build(f"instance {name}", [x, p, p], lambda g, *v: g.add(InstanceNorm(), *v)))
                cases += [
                    build(f"group {n} {name}", [x, p, p], lambda g, *v, n=n: g.add(GroupNorm(n), *v))
                    for n in (1, 2, 6)
                    if shape[1] % n == 0
                ]
    for dtype in (*FLOATS, F64):  # by channels: groups inside of a vector, across two, and larger images than one chunk
        for channels, groups, space in ((20, 2, (40, 8)), (24, 12, (33, 20)), (40, 1, (150,)), (6, 3, (31, 64))):
            x, p = last(dtype, 2, channels, *space), rows(dtype, channels)
            name = f"{groups} groups of {channels} {dtype} {space}"
            cases.append(build(name, [x, p, p], lambda g, *v, n=groups: g.add(GroupNorm(n), *v)))
    cases.append(build("softmax f64", [rows(F64, 3, 7)], lambda g, x: g.add(Softmax(), x)))
    return cases


def surrounded() -> list[Case]:
    """With pointwise ops before and after."""

    def residual_norm(g: Any, x: Any, y: Any, s: Any, b: Any) -> Any:
        total = g.add(pw("add"), x, y)
        return g.add(pw("gelu"), g.add(LayerNorm(-1), total, s, b)), total

    def scores(g: Any, x: Any, mask: Any) -> Any:
        scaled = g.add(pw("mul"), x, g.constant(np.array(0.125, x.type.dtype.numpy)))
        return g.add(Cast(F32), g.add(Softmax(-1), g.add(pw("add"), scaled, mask)))

    def normed_relu(g: Any, x: Any, s: Any, b: Any, z: Any) -> Any:
        return g.add(pw("add"), g.add(pw("relu"), g.add(InstanceNorm(), x, s, b)), z)

    def groups_of_a_sum(g: Any, x: Any, y: Any, s: Any, b: Any) -> Any:
        total = g.add(pw("add"), x, y)
        return g.add(pw("swish"), g.add(GroupNorm(2), total, s, b)), total

    def gate(g: Any, x: Any, b: Any) -> Any:
        return g.add(pw("sigmoid"), g.add(pw("add"), g.add(Reduce("mean", (2, 3)), g.add(pw("relu"), x)), b))

    cases: list[Case] = []
    for dtype in (F32, F16):
        p = rows(dtype, 16)
        x = last(dtype, 2, 16, 5, 3)
        cases.append(build(f"norm {dtype}", [rows(dtype, 5, 16), rows(dtype, 5, 16), p, p], residual_norm))
        cases.append(build(f"long norm {dtype}", [rows(dtype, 2, 9000)] * 2 + [rows(dtype, 9000)] * 2, residual_norm))
        cases.append(build(f"scores {dtype}", [rows(dtype, 2, 3, 5, 20), rows(dtype, 2, 1, 1, 20)], scores))
        cases.append(build(f"instance {dtype}", [x, p, p, x], normed_relu))
        cases.append(build(f"instance to rows {dtype}", [x, p, p, rows(dtype, 2, 16, 5, 3)], normed_relu))
        y, q = last(dtype, 2, 20, 40, 8), rows(dtype, 20)
        cases.append(build(f"groups {dtype}", [y, y, q, q], groups_of_a_sum))
        cases.append(build(f"gate {dtype}", [x, rows(dtype, 16, 1, 1)], gate))
    return cases


@needs_compiler
def test_reductions(rng: np.random.Generator) -> None:
    check(reductions(), rng)


@needs_compiler
def test_softmax_and_norms(rng: np.random.Generator) -> None:
    check(normed(), rng)


@needs_compiler
def test_pointwise_ops_around_them(rng: np.random.Generator) -> None:
    check(surrounded(), rng)


@needs_compiler
def test_several_reductions_visit_their_elements_once(rng: np.random.Generator) -> None:
    cases = several()
    assert all(case.kernel is not None for case in cases)
    check(cases, rng)


def test_reductions_over_other_dims_are_not_one_kernel() -> None:
    def sums(g: Any, x: Any) -> list[Any]:
        return [g.add(Reduce("sum", (axis,)), x) for axis in (0, 1)]

    assert build("square", [rows(F32, 9, 9)], sums).kernel is None


@pytest.mark.slow
@needs_compiler
def test_long_reductions_are_cut_into_chunks(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "chunked_blocks", lambda _: (1 << 30, 40))
    monkeypatch.setattr(family, "MIN_TURNS", 1)
    cases = [
        case
        for case in (*reductions(), *several(), *normed(), *surrounded())
        if case.kernel and case.kernel.scratch_bytes
    ]
    assert len(cases) > 60
    check(cases, rng)


@needs_compiler
def test_the_last_block_puts_chunks_together(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch computes them, and leaves the barrier counters as it found them."""
    monkeypatch.setattr(family, "chunked_blocks", lambda _: (1 << 30, 40))
    monkeypatch.setattr(family, "MIN_TURNS", 1)
    shapes = [(RowShape(256, 4, column), True, depth) for column, depth in ((256, 0), (8, 0), (8, 3), (256, 1))]
    monkeypatch.setattr(family, "VARIANTS", tuple(family.ReductionVariant(*each) for each in shapes))
    cases = [case for case in (*reductions(), *several(), *surrounded()) if case.kernel and case.kernel.scratch_bytes]
    ways = [(case, way) for case in cases if case.kernel for way in (case.kernel, *case.kernel.others)]
    once = [(case, way) for case, way in ways if len(way.launches) == 1]
    assert len(once) > 40 and sum(way.launches[0].resident_bytes > 0 for _, way in once) > 20
    emulator = Emulator([way for _, way in once])
    for case, way in once:
        twice = replace(way, launches=way.launches * 2)
        arrays = case.arrays(rng)
        got = emulator.run(twice, arrays, case.outputs)
        assert_same(case, got, case.reference(arrays), case.magnitudes(arrays))


def test_a_large_image_fills_the_gpu() -> None:
    p = rows(F16, 32)
    case = build("large", [last(F16, 1, 32, 256, 256), p, p], lambda g, *v: g.add(InstanceNorm(), *v))
    assert case.kernel is not None
    assert [launch.grid >= 128 for launch in case.kernel.launches] == [True, True]


@needs_compiler
def test_group_norms_by_channels_are_as_those_by_groups(rng: np.random.Generator) -> None:
    types = [last(F16, 2, 20, 40, 8), rows(F16, 20), rows(F16, 20)]
    case = build("both ways", types, lambda g, *v: g.add(GroupNorm(2), *v))
    assert case.kernel is not None and len(case.kernel.others) >= 2
    arrays = case.arrays(rng)
    emulator = Emulator(case.kernel.others)
    for kernel in case.kernel.others:
        assert_same(case, emulator.run(kernel, arrays, case.outputs), case.reference(arrays))


@needs_compiler
def test_rows_that_stay_as_they_were_read_are_as_others(rng: np.random.Generator) -> None:
    found: list[Case] = []
    for dtype in (F16, BF16):
        x, p = rows(dtype, 40, 96), rows(dtype, 96)
        found.append(build(f"layer {dtype}", [x, p, p], lambda g, *v: g.add(LayerNorm(), *v)))
        found.append(build(f"softmax {dtype}", [x], lambda g, x: g.add(Softmax(), x)))
        found.append(build(f"after {dtype}", [x, p, x], lambda g, x, s, z: g.add(pw("add"), g.add(RmsNorm(), x, s), z)))
    packed = [case.kernel.others[-1] for case in found if case.kernel is not None and case.kernel.others]
    assert len(packed) == len(found) and all("cache[turn].v" in each.launches[0].source for each in packed)
    emulator = Emulator(packed)
    for case, kernel in zip(found, packed, strict=True):
        arrays = case.arrays(rng)
        assert_same(case, emulator.run(kernel, arrays, case.outputs), case.reference(arrays))
    before = build("before", [x, p, p], lambda g, x, *v: g.add(LayerNorm(), g.add(pw("relu"), x), *v)).kernel
    assert before is not None
    assert not any("cache[turn].v" in way.launches[0].source for way in before.others), "computed, not read"
