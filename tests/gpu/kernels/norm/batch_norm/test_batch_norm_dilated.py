"""Test batch norms that read a gradient of half the size, whose pixels are apart in the sum before the norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, assert_same, build, check, last, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.gpu.kernels.norm.batch_norm import batch_norm as family
from fusec.gpu.kernels.norm.batch_norm import batch_norm_streamed as streamed
from fusec.ir import DType, TensorType, Value
from fusec.ops import BatchNormBackward, BatchNormTrain, Cast, Dilate, pw
from fusec.targets.target import STATIC_BYTES

F32, F16, U2 = DType.F32, DType.F16, DType.U2
# of the image, and the steps
SIZES = (
    ((3, 16, 6, 10), 2),
    ((3, 16, 5, 9), 2),
    ((2, 16, 7, 4), 3),
    ((4, 24, 9), 2),
    ((2, 8, 3, 4, 5), 2),
    ((2, 16, 1, 2), 2),
)


def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Masks of 0 and 1, and normal numbers; parameters as an inverse deviation is."""
    if type.dtype is U2:
        return rng.integers(0, 2, type.shape).astype(np.int8).astype(U2.numpy)
    array = rng.standard_normal(type.shape)
    return (array + 0.5 if type.rank > 1 else 0.5 + np.abs(array)).astype(type.dtype.numpy)


def smaller(shape: Sequence[int], step: int) -> tuple[int, ...]:
    return (*shape[:2], *(-(-n // step) for n in shape[2:]))


def dilated(g: Any, small: Value, x: Value, step: int) -> Value:
    return g.add(Dilate((1, 1, *(step,) * (x.type.rank - 2)), x.type.shape), small)


def summed(step: int) -> Any:
    """Return the function that makes a norm's gradient, masked by bits, of the sum of a gradient and a smaller one."""

    def make(g: Any, dy: Value, small: Value, mask: Value, x: Value, *p: Value) -> Sequence[Value]:
        both = g.add(pw("add"), dy, dilated(g, small, x, step))
        zero = g.constant(np.zeros((), dy.type.dtype.numpy))
        loss = g.add(pw("where"), g.add(Cast(DType.BOOL), mask), both, zero)
        return loss, *g.insert(BatchNormBackward(), [loss, x, *p]).results

    return make


def after_norm(step: int) -> Any:
    """Return the function that adds a smaller image after a norm."""

    def make(g: Any, x: Value, s: Value, b: Value, small: Value) -> Sequence[Value]:
        y, mean, inverse = g.insert(BatchNormTrain(1e-3), [x, s, b]).results
        return g.add(pw("add"), y, dilated(g, small, x, step)), mean, inverse

    return make


def dilated_cases() -> list[Case]:
    cases: list[Case] = []
    for shape, step in SIZES:
        for kind in (last, rows):
            for dtype in (F16, F32):
                x, p, small = kind(dtype, *shape), rows(F32, shape[1]), kind(dtype, *smaller(shape, step))
                name = f"{kind.__name__} {dtype} {shape} {step}"
                inputs = [x, small, kind(U2, *shape), x, p, p, p]
                cases.append(build(f"before {name}", inputs, summed(step), draw))
                cases.append(build(f"after {name}", [x, p, p, small], after_norm(step), draw))
    return cases


@needs_compiler
def test_norms_around_a_dilate(rng: np.random.Generator) -> None:
    cases = dilated_cases()
    check(cases, rng, every=True)


@needs_compiler
@pytest.mark.parametrize("kept", [1 << 20, 30000])
def test_copies_ahead_bring_zeros(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """A thread without a pixel of the smaller gradient copies zeros instead."""
    monkeypatch.setattr(family, "VARIANTS", ((64, 4, 8),))
    monkeypatch.setattr(streamed, "BYTES_AHEAD", 4000)
    figures = replace(FIGURES, shared_bytes=kept + STATIC_BYTES, processors=4)
    cases = [
        build(f"{shape}", [x, small, last(U2, *shape), x, p, p, p], summed(2), draw)
        for shape in ((4, 16, 20, 33), (4, 48, 14, 14))
        for x, small, p in [(last(F16, *shape), last(F16, *smaller(shape, 2)), rows(F32, shape[1]))]
    ]
    cases = [replace(case, figures=figures) for case in cases]
    ways = [(case, way) for case in cases if case.kernel for way in variants_of(case.kernel)]
    assert sum("copy_or_zeros_ahead(&" in way.launches[0].source for _, way in ways) == len(cases)
    emulator = Emulator([way for _, way in ways])
    for case, way in ways:
        arrays = case.arrays(rng)
        assert_same(case, emulator.run(way, arrays, case.outputs), case.reference(arrays))


def test_channels_are_never_apart() -> None:
    x, p = last(F16, 2, 16, 3, 3), rows(F32, 16)

    def make(g: Any, x: Value, s: Value, b: Value, small: Value) -> Sequence[Value]:
        y, mean, inverse = g.insert(BatchNormTrain(1e-3), [x, s, b]).results
        return g.add(pw("add"), y, g.add(Dilate((1, 2, 1, 1), x.type.shape), small)), mean, inverse

    assert build("channels", [x, p, p, last(F16, 2, 8, 3, 3)], make).kernel is None
