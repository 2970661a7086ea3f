"""Test the kernel of two norms that have one gradient: the last norm of a block and the norm of its shortcut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, assert_same, build, check, last, on_the_device, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.gpu.kernels.norm.batch_norm import batch_norm as family
from fusec.gpu.kernels.norm.batch_norm import batch_norm_streamed as streamed
from fusec.ir import DType, TensorType, Value
from fusec.ops import BatchNormBackward, Cast, Dilate, pw
from fusec.targets.target import STATIC_BYTES

F32, F16, BF16, F64, U2 = DType.F32, DType.F16, DType.BF16, DType.F64, DType.U2
SHAPES = ((3, 16, 9, 5), (2, 6, 3, 4), (5, 40, 12), (2, 264, 2, 3))


def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Masks of 0 and 1, and numbers around a mean that is not zero; parameters as an inverse deviation is."""
    if type.dtype is U2:
        return rng.integers(0, 2, type.shape).astype(np.int8).astype(U2.numpy)
    array = rng.standard_normal(type.shape)
    return (array + 0.5 if type.rank > 1 else 0.5 + np.abs(array)).astype(type.dtype.numpy)


def gradients(g: Any, dy: Value, x: Value, z: Value, *p: Value) -> Sequence[Value]:
    """Make the gradients of two norms, of `x` and of `z`."""
    first = g.insert(BatchNormBackward(), [dy, x, *p[:3]]).results
    return *first, *g.insert(BatchNormBackward(), [dy, z, *p[3:]]).results


def single(g: Any, *v: Value) -> Sequence[Value]:
    return g.insert(BatchNormBackward(), list(v)).results


def masked_sum(g: Any, dy: Value, other: Value, mask: Value) -> Value:
    zero = g.constant(np.zeros((), dy.type.dtype.numpy))
    return g.add(pw("where"), g.add(Cast(DType.BOOL), mask), g.add(pw("add"), dy, other), zero)


def of_sum(g: Any, dy: Value, other: Value, mask: Value, *v: Value) -> Sequence[Value]:
    """Make their gradient from two parts and a mask; no other step reads it."""
    return gradients(g, masked_sum(g, dy, other, mask), *v)


def of_stored_sum(g: Any, dy: Value, other: Value, mask: Value, *v: Value) -> Sequence[Value]:
    loss = masked_sum(g, dy, other, mask)
    return loss, *gradients(g, loss, *v)


def of_dilated(g: Any, dy: Value, small: Value, mask: Value, *v: Value) -> Sequence[Value]:
    other = g.add(Dilate((1, 1, *(2,) * (dy.type.rank - 2)), dy.type.shape), small)
    return of_sum(g, dy, other, mask, *v)


def of_made_images(g: Any, dy: Value, other: Value, mask: Value, x: Value, z: Value, *v: Value) -> Sequence[Value]:
    """Make the operands of the norms, too."""
    loss = masked_sum(g, dy, other, mask)
    return gradients(g, loss, g.add(pw("sub"), x, other), g.add(pw("add"), z, dy), *v)


def surrounded(g: Any, dy: Value, x: Value, z: Value, held: Value, *p: Value) -> Sequence[Value]:
    """Make what an optimiser makes of both scales, and a sum of both images' gradients."""
    first, scale, _, second, other, _ = gradients(g, dy, x, z, *p)
    moved = [g.add(pw("sub"), p[place], g.add(pw("mul"), held, by)) for place, by in ((0, scale), (3, other))]
    return g.add(pw("add"), first, second), second, *moved


def cases(dtypes: Sequence[DType] = (F32, F16, BF16, F64)) -> list[Case]:
    found: list[Case] = []
    for dtype in dtypes:
        for kind in (last, rows):
            for shape in SHAPES:
                x, p = kind(dtype, *shape), rows(F64 if dtype is F64 else F32, shape[1])
                mask = kind(U2, *shape)
                small = kind(dtype, *shape[:2], *(-(-n // 2) for n in shape[2:]))
                name = f"{kind.__name__} {dtype} {shape}"
                found.append(build(f"alone {name}", [x, x, x, *[p] * 6], gradients, draw))
                found.append(build(f"of sum {name}", [x, x, mask, x, x, *[p] * 6], of_sum, draw))
                found.append(build(f"of stored sum {name}", [x, x, mask, x, x, *[p] * 6], of_stored_sum, draw))
                found.append(build(f"of dilated {name}", [x, small, mask, x, x, *[p] * 6], of_dilated, draw))
                found.append(build(f"surrounded {name}", [x, x, x, p, *[p] * 6], surrounded, draw))
    return found


@needs_compiler
def test_two_norms_of_one_gradient(rng: np.random.Generator) -> None:
    check(cases(), rng)


def long_cases() -> list[Case]:
    """Several turns of each thread, the last of which some threads have not."""
    found: list[Case] = []
    for channels in (16, 24, 48):
        x, p, mask = last(F16, 4, channels, 20, 33), rows(F32, channels), last(U2, 4, channels, 20, 33)
        small = last(F16, 4, channels, 10, 17)
        found.append(build(f"alone {channels}", [x, x, x, *[p] * 6], gradients, draw))
        types = [x, x, mask, x, x, *[p] * 6]
        found += [
            build(f"{make.__name__} {channels}", types, make, draw) for make in (of_sum, of_stored_sum, of_made_images)
        ]
        found.append(build(f"of dilated {channels}", [x, small, mask, x, x, *[p] * 6], of_dilated, draw))
    return found


@needs_compiler
@pytest.mark.parametrize(("kept", "sm"), [(1 << 20, 90), (30000, 90), (12000, 75), (0, 75)])
def test_one_launch_whose_blocks_meet(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kept: int, sm: int
) -> None:
    """All turns are kept, some, or none; with asynchronous copies and without."""
    monkeypatch.setattr(family, "VARIANTS", ((64, 4, 8),))
    monkeypatch.setattr(streamed, "BYTES_AHEAD", 4000)
    figures = replace(FIGURES, shared_bytes=kept + STATIC_BYTES, processors=4, sm=sm)
    some = [replace(case, figures=figures) for case in (*long_cases(), *cases((F16, F32)))]
    ways = [(case, way) for case in some if case.kernel for way in case.kernel.others]
    assert len(ways) > 20 and sum(way.launches[0].cooperative for _, way in ways) > 10
    ahead = ["copy_ahead" in way.launches[0].source for _, way in ways]
    assert any(ahead) is (sm == 90)
    emulator = Emulator([way for _, way in ways])
    for case, way in ways:
        arrays = case.arrays(rng)
        got = emulator.run(way, arrays, case.outputs)
        assert_same(case, got, case.reference(arrays), case.magnitudes(arrays))


def test_a_gradient_that_no_step_reads_later_is_not_stored_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of it that do not stay on the chip take the memory of the first result."""
    monkeypatch.setattr(family, "VARIANTS", ((64, 4, 8),))
    monkeypatch.setattr(streamed, "BYTES_AHEAD", 4000)
    for kept in (1 << 20, 30000):
        figures = replace(FIGURES, shared_bytes=kept + STATIC_BYTES, processors=4)
        (case,) = (replace(case, figures=figures) for case in long_cases() if case.name == "of_sum 48")
        assert case.kernel is not None
        (way,) = case.kernel.others
        assert "streamed" in way.key and set(way.written) == set(case.outputs)
        assert ("if (turn >= " in way.launches[0].source) is (kept == 30000)


def test_blocks_have_room_for_the_sums_of_both_norms() -> None:
    """Neither blocks of 1024 threads do, which leave each 64 registers, nor sums of 256 channels, in shared memory."""
    x, p = last(F16, 64, 256, 56, 56), rows(F32, 256)
    both, one = build("both", [x, x, x, *[p] * 6], gradients), build("one", [x, x, p, p, p], single)
    blocks = [[way.launches[0].block for way in case.kernel.others] for case in (both, one) if case.kernel is not None]
    assert blocks == [[512, 512], [512, 1024, 512, 512]]


def test_norms_of_other_gradients_or_sizes_are_apart() -> None:
    x, p = last(F16, 2, 16, 4, 4), rows(F32, 16)

    def two(g: Any, dy: Value, other: Value, x: Value, z: Value, *v: Value) -> Sequence[Value]:
        first = g.insert(BatchNormBackward(), [dy, x, *v]).results
        return *first, *g.insert(BatchNormBackward(), [other, z, *v]).results

    def after(g: Any, dy: Value, x: Value, *v: Value) -> Sequence[Value]:
        first = g.insert(BatchNormBackward(), [dy, x, *v]).results
        return *first, *g.insert(BatchNormBackward(), [dy, first[0], *v]).results

    def masked(g: Any, dy: Value, x: Value, z: Value, *v: Value) -> Sequence[Value]:
        first = g.insert(BatchNormBackward(True), [dy, x, *v]).results
        return *first, *g.insert(BatchNormBackward(True), [dy, z, *v]).results

    assert build("one", [x, x, x, *[p] * 6], gradients).kernel is not None
    assert build("two", [x, x, x, x, p, p, p], two).kernel is None
    assert build("after", [x, x, p, p, p], after).kernel is None
    assert build("masked", [x, x, x, p, p, p, p], masked).kernel is None


@needs_compiler
def test_gradients_are_near_those_of_64_bits(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of many deviations cost no digits, in either norm."""
    monkeypatch.setattr(family, "VARIANTS", ((64, 4, 8),))
    x, p = last(F16, 4, 16, 20, 33), rows(F32, 16)
    case = replace(build("pair", [x, x, x, *[p] * 6], gradients), figures=replace(FIGURES, processors=4))
    assert case.kernel is not None
    arrays = case.arrays(rng)
    for image, mean, inverse in ((1, 4, 5), (2, 7, 8)):
        dims, given = (0, 2, 3), case.graph.inputs
        array = (rng.standard_normal(x.shape) * 0.1 + 3.0).astype(np.float16)
        wide = array.astype(np.float64)
        arrays[given[image]] = array
        arrays[given[mean]] = wide.mean(dims).astype(np.float32)
        arrays[given[inverse]] = (1 / np.sqrt(wide.var(dims) + 1e-5)).astype(np.float32)
    want = case.reference({v: a.astype(np.float64) for v, a in arrays.items()})
    emulator = Emulator(list(variants_of(case.kernel)))
    for way in variants_of(case.kernel):
        got = emulator.run(way, arrays, case.outputs)
        for value, a, b in zip(case.outputs, got, want, strict=True):
            error = np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64))
            assert error < (5e-4 if value.type.dtype is F16 else 1e-5)


@pytest.mark.gpu
def test_images_of_a_network_on_the_device(rng: np.random.Generator) -> None:
    """The bits are the same each time."""
    pytest.importorskip("cupy")
    from fusec.gpu.launch.kernel_launcher import Launcher

    launcher, met = Launcher(), 0
    for channels, side, make in ((256, 56, of_sum), (512, 28, of_dilated), (2048, 7, of_stored_sum)):
        x, p, mask = last(F16, 16, channels, side, side), rows(F32, channels), last(U2, 16, channels, side, side)
        other = last(F16, 16, channels, side // 2, side // 2) if make is of_dilated else x
        case = build(make.__name__, [x, other, mask, x, x, *[p] * 6], make, draw)
        assert case.kernel is not None
        arrays = case.arrays(rng)
        want, sizes = case.reference(arrays), case.magnitudes(arrays)
        for way in variants_of(case.kernel):
            if not launcher.runs(way):
                continue
            met += way.launches[0].cooperative
            got = on_the_device(launcher, way, arrays, case.outputs)
            assert_same(case, got, want, sizes)
            again = on_the_device(launcher, way, arrays, case.outputs)
            assert all(a.tobytes() == b.tobytes() for a, b in zip(got, again, strict=True))
    assert met > 0
