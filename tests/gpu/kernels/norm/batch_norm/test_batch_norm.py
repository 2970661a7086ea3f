"""Test kernels of batch norm in training and its backward against the reference, through the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, ROUNDING, Case, assert_same, build, check, each_way, last, on_the_device, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.kernels import GpuFigures
from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.gpu.kernels.norm.batch_norm import batch_norm as family
from fusec.gpu.kernels.norm.batch_norm import batch_norm_streamed as streamed
from fusec.ir import DType, TensorType, Value
from fusec.ops import BatchNormBackward, BatchNormBySums, BatchNormTrain, Cast, ChannelSums, pw
from fusec.targets.target import STATIC_BYTES
from fusec.text import parse

F32, F16, BF16, F64, U2 = DType.F32, DType.F16, DType.BF16, DType.F64, DType.U2
SHAPES = ((3, 16, 9, 5), (2, 6, 3, 4), (5, 40, 12), (33, 24), (4, 1, 3, 3), (1, 3, 1, 1), (2, 264, 2, 3))


def forward(g: Any, *v: Value) -> Sequence[Value]:
    return g.insert(BatchNormTrain(1e-3), list(v)).results


def keeping(nbytes: int) -> GpuFigures:
    """Return figures of a GPU whose blocks have `nbytes` bytes of shared memory."""
    return replace(FIGURES, shared_bytes=nbytes + STATIC_BYTES)


def summed(g: Any, x: Value) -> Sequence[Value]:
    return g.insert(ChannelSums(), [x]).results


def by_sums(g: Any, *v: Value) -> Sequence[Value]:
    return g.insert(BatchNormBySums(1e-3), list(v)).results


def in_two(g: Any, x: Value, s: Value, b: Value) -> Sequence[Value]:
    return by_sums(g, x, s, b, *summed(g, x))


def backward(g: Any, *v: Value) -> Sequence[Value]:
    return g.insert(BatchNormBackward(), list(v)).results


def masked(g: Any, *v: Value) -> Sequence[Value]:
    return g.insert(BatchNormBackward(True), list(v)).results


def positive(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Normal numbers around a mean that is not zero; parameters, which are vectors, as an inverse deviation is."""
    array = rng.standard_normal(type.shape)
    return (array + 0.5 if type.rank > 2 else 0.5 + np.abs(array)).astype(type.dtype.numpy)


def mostly_negative(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Of the norm's results some are positive, and some are not."""
    array = positive(rng, type)
    return array - array.dtype.type(1.5) if type.rank > 1 else array


def channel_cases() -> list[Case]:
    """Both ops alone, over memory orders, shapes and types."""
    cases: list[Case] = []
    for dtype, parameter in ((F32, F32), (F16, F32), (F16, F16), (BF16, F32), (F64, F64)):
        for kind in (last, rows):
            for shape in SHAPES if parameter is not F16 else SHAPES[:2]:
                if kind is last and len(shape) < 3:
                    continue
                x, p = kind(dtype, *shape), rows(parameter, shape[1])
                name = f"{kind.__name__} {dtype} {parameter} {shape}"
                cases.append(build(f"train {name}", [x, p, p], forward, positive))
                cases.append(build(f"sums {name}", [x], summed, positive))
                if parameter is not F64:
                    sums = rows(F32, shape[1])
                    cases.append(build(f"by sums {name}", [x, p, p, sums, sums], by_sums, positive))
                cases.append(build(f"backward {name}", [x, x, p, p, p], backward, positive))
                cases.append(build(f"masked {name}", [x, x, p, p, p, p], masked, mostly_negative))
    return cases


def masks_or_positive(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Masks of 0 and 1 in 2 bits, and other numbers as `positive` does."""
    return rng.integers(0, 2, type.shape).astype(np.int8).astype(U2.numpy) if type.dtype is U2 else positive(rng, type)


def masked_by_bits(g: Any, dy: Value, mask: Value, *v: Value) -> Sequence[Value]:
    """Make the gradient of a norm whose dy counts where a mask is 1; the masked dy is stored, too."""
    loss = g.add(pw("where"), g.add(Cast(DType.BOOL), mask), dy, g.constant(np.zeros((), dy.type.dtype.numpy)))
    return loss, *backward(g, loss, *v)


def with_bits(g: Any, x: Value, s: Value, b: Value, z: Value) -> Sequence[Value]:
    """Make a norm, a residual and a relu, and in 2 bits where the relu is positive."""
    y, mean, inverse = forward(g, x, s, b)
    relu = g.add(pw("relu"), g.add(pw("add"), y, z))
    zero = g.constant(np.zeros((), x.type.dtype.numpy))
    return relu, g.add(Cast(U2), g.add(pw("cmp_gt"), relu, zero)), mean, inverse


def bit_masks() -> list[Case]:
    """Masks of 2 bits, whose words belong to two threads if channels are last."""
    cases: list[Case] = []
    for channels in (16, 24, 48):
        for kind in (last, rows):
            x, p, mask = kind(F16, 4, channels, 20, 33), rows(F32, channels), kind(U2, 4, channels, 20, 33)
            name = f"{kind.__name__} {channels}"
            cases.append(build(f"masked by bits {name}", [x, mask, x, p, p, p], masked_by_bits, masks_or_positive))
            cases.append(build(f"with bits {name}", [x, p, p, x], with_bits, positive))
    return cases


def turned_channels() -> list[Case]:
    """Results, and losses, in another memory order than the image."""
    shape, turned = "f16[3,24,5,4]", "f16[3,24,5,4]{0,2,3,1}"
    texts = {
        "train": f"""graph "g" (%x: {turned}, %s: f32[24], %b: f32[24]) {{
  %y, %m, %i = batch_norm_train(%x, %s, %b) : {shape}, f32[24], f32[24]
  return %y, %m, %i
}}""",
        "backward": f"""graph "g" (%dy: {shape}, %x: {turned}, %s: f32[24], %m: f32[24], %i: f32[24]) {{
  %dx, %ds, %db = batch_norm_backward(%dy, %x, %s, %m, %i) : {turned}, f32[24], f32[24]
  return %dx, %ds, %db
}}""",
        "written turned": f"""graph "g" (%dy: {turned}, %x: {turned}, %s: f32[24], %m: f32[24], %i: f32[24]) {{
  %dx, %ds, %db = batch_norm_backward(%dy, %x, %s, %m, %i) : {shape}, f32[24], f32[24]
  return %dx, %ds, %db
}}""",
    }
    return [Case(f"turned {name}", parse(text), positive) for name, text in texts.items()]


def surrounded_channels() -> list[Case]:
    """With pointwise ops before and after, and what an optimiser makes of the statistics."""

    def block_end(g: Any, x: Value, s: Value, b: Value, z: Value, held: Value) -> Sequence[Value]:
        y, mean, inverse = forward(g, x, s, b)
        running = g.add(pw("add"), g.add(pw("mul"), held, g.constant(np.float32(0.9))), mean)
        return g.add(pw("relu"), g.add(pw("add"), y, z)), running, mean, inverse

    def from_relu(g: Any, dy: Value, y: Value, x: Value, s: Value, m: Value, i: Value, held: Value) -> Sequence[Value]:
        masked = g.add(pw("relu_backward"), dy, y)
        dx, dscale, dbias = backward(g, masked, x, s, m, i)
        move = g.add(pw("add"), g.add(pw("mul"), held, g.constant(np.float32(0.9))), dscale)
        return dx, move, g.add(pw("sub"), s, move), dbias

    def into_both(g: Any, dy: Value, y: Value, x: Value, s: Value, m: Value, i: Value, held: Value) -> Sequence[Value]:
        masked = g.add(pw("relu_backward"), g.add(pw("add"), dy, dy), y)
        return masked, *backward(g, masked, x, s, m, i)

    def from_mean(g: Any, dy: Value, y: Value, x: Value, s: Value, m: Value, i: Value) -> Sequence[Value]:
        return backward(g, g.add(pw("relu_backward"), dy, y), x, s, m, i)

    def casts(g: Any, x: Value, s: Value, b: Value) -> Sequence[Value]:
        y, mean, _ = forward(g, g.add(Cast(F32), x), s, b)
        return g.add(Cast(F16), y), mean

    def by_given(g: Any, x: Value, s: Value, b: Value, z: Value, held: Value, *sums: Value) -> Sequence[Value]:
        y, mean, inverse = by_sums(g, x, s, b, *sums)
        running = g.add(pw("add"), g.add(pw("mul"), held, g.constant(np.float32(0.9))), mean)
        return g.add(pw("relu"), g.add(pw("add"), y, z)), running, inverse

    def both_ends(g: Any, x: Value, s: Value, b: Value, z: Value) -> Sequence[Value]:
        y, mean, inverse = in_two(g, x, s, b)
        return g.add(pw("relu"), g.add(pw("add"), y, z)), mean, inverse

    cases: list[Case] = []
    for dtype in (F32, F16):
        for kind in (last, rows):
            x, p = kind(dtype, 3, 16, 5, 3), rows(F32, 16)
            name = f"{kind.__name__} {dtype}"
            cases.append(build(f"block end {name}", [x, p, p, x, p], block_end, positive))
            cases.append(build(f"by given sums {name}", [x, p, p, x, p, p, p], by_given, positive))
            cases.append(build(f"in two {name}", [x, p, p, x], both_ends, positive))
            cases.append(build(f"from relu {name}", [x, x, x, p, p, p, p], from_relu, positive))
            cases.append(build(f"into both {name}", [x, x, x, p, p, p, p], into_both, positive))
            one = rows(dtype, 3, 16, 1, 1)
            cases.append(build(f"from mean {name}", [one, x, x, p, p, p], from_mean, positive))
    cases.append(build("casts", [last(F16, 3, 16, 5, 3), rows(F32, 16), rows(F32, 16)], casts, positive))
    return cases


@needs_compiler
def test_batch_norm(rng: np.random.Generator) -> None:
    check(channel_cases(), rng)
    check(turned_channels(), rng)


@needs_compiler
def test_pointwise_ops_around_batch_norm(rng: np.random.Generator) -> None:
    check(surrounded_channels(), rng)


@pytest.mark.slow
@needs_compiler
def test_many_chunks(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "SUM_TURNS", 1)
    monkeypatch.setattr(family, "WRITE_TURNS", 1)
    cases = [case for case in (*channel_cases(), *surrounded_channels()) if "F16" in case.name]
    assert len(cases) > 20
    cases.append(build("long", [last(F16, 4, 8, 40, 33), rows(F32, 8), rows(F32, 8)], forward, positive))
    check(cases, rng)


def long_channels() -> list[Case]:
    """Several turns of each thread, the last of which some threads have not."""
    x, p = last(F16, 4, 24, 20, 33), rows(F32, 24)
    return [
        build("long train", [last(F16, 4, 8, 40, 33), rows(F32, 8), rows(F32, 8)], forward, positive),
        build("long backward", [x, x, p, p, p], backward, positive),
        build("long masked", [x, x, p, p, p, p], masked, mostly_negative),
    ]


@needs_compiler
@pytest.mark.parametrize(
    ("blocks", "threads", "lanes", "kept", "cached"),
    [(3, 64, 8, 1 << 20, 1 << 20), (4, 64, 8, 8000, 1 << 20), (4, 64, 16, 8000, 0), (2, 128, 32, 0, 0)],
)
def test_one_launch_whose_blocks_meet(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    blocks: int,
    threads: int,
    lanes: int,
    kept: int,
    cached: int,
) -> None:
    """All turns are kept, some, or none; and the rest is read up or down."""
    monkeypatch.setattr(family, "VARIANTS", ((threads, 4, lanes),))
    figures = replace(keeping(kept), processors=blocks, cache_bytes=cached * 5 // 2, sm=75)  # without copies ahead
    cases = [*channel_cases(), *turned_channels(), *surrounded_channels(), *long_channels()]
    cases = [replace(case, figures=figures) for case in cases]
    cases = [case for case in cases if case.kernel is not None and case.kernel.others]
    found = [case.kernel.others[0] for case in cases if case.kernel is not None]
    assert len(found) > 60 and sum(way.launches[0].cooperative for way in found) > 20
    assert all((way.launches[0].resident_bytes > 0) == (kept > 0) for way in found)
    assert not any("copy_ahead" in way.launches[0].source for way in found)
    emulator = Emulator(found)
    for case, way in zip(cases, found, strict=True):
        arrays = case.arrays(rng)
        assert_same(case, emulator.run(way, arrays, case.outputs), case.reference(arrays))


@needs_compiler
@pytest.mark.parametrize(
    ("kept", "ahead", "stays"), [(1 << 20, 1 << 16, True), (16000, 1, False), (16000, 4000, False)]
)
def test_elements_that_are_copied_ahead(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kept: int, ahead: int, stays: bool
) -> None:
    """All turns stay in shared memory, or some of them are copied again for the second pass."""
    monkeypatch.setattr(family, "VARIANTS", ((64, 4, 8),))
    monkeypatch.setattr(streamed, "BYTES_AHEAD", ahead)
    figures = replace(keeping(kept), processors=4)
    cases = [*channel_cases(), *turned_channels(), *surrounded_channels(), *long_channels()]
    cases = [replace(case, figures=figures) for case in cases]
    ways = [(case, way) for case in cases if case.kernel for way in case.kernel.others if "streamed" in way.key]
    assert len(ways) > 40
    again = ["if (ahead >=" in way.launches[0].source for _, way in ways]
    assert any(again) is not stays
    emulator = Emulator([way for _, way in ways])
    for case, way in ways:
        arrays = case.arrays(rng)
        assert_same(case, emulator.run(way, arrays, case.outputs), case.reference(arrays))


@needs_compiler
@pytest.mark.parametrize("kept", [1 << 20, 16000])
def test_masks_of_two_bits(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    monkeypatch.setattr(family, "VARIANTS", ((64, 4, 8),))
    monkeypatch.setattr(streamed, "BYTES_AHEAD", 4000)
    cases = [replace(case, figures=replace(keeping(kept), processors=4)) for case in bit_masks()]
    ways = [(case, way) for case in cases if case.kernel for way in variants_of(case.kernel)]
    assert len(ways) == 2 * len(cases) - 6  # row-major ones have no launch whose blocks meet
    assert [case.name for case, way in ways if "copy_ahead<4>" in way.launches[0].source] == [
        "masked by bits last 16",
        "masked by bits last 48",  # 24 channels are no whole number of words
    ]
    emulator = Emulator([way for _, way in ways])
    for case, way in ways:
        arrays = case.arrays(rng)
        assert_same(case, emulator.run(way, arrays, case.outputs), case.reference(arrays))


@needs_compiler
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_scale_is_written_over_once_all_blocks_have_it(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(family, "VARIANTS", ((64, 2, 8),))

    def moved(g: Any, *v: Value) -> Sequence[Value]:
        y, statistic, _ = forward(g, *v) if where == "forward" else backward(g, *v)
        return y, g.add(pw("sub"), v[-3 if where == "backward" else -2], statistic)

    x, p = last(F16, 4, 8, 12, 20), rows(F32, 8)
    case = build("moved", [x, p, p] if where == "forward" else [x, x, p, p, p], moved, positive)
    case = replace(case, figures=replace(FIGURES, processors=3))
    assert case.kernel is not None and case.kernel.others[0].launches[0].grid == 3
    arrays, kernel = case.arrays(rng), case.kernel.others[0]
    scale = case.graph.inputs[1 if where == "forward" else 2]
    got = Emulator([kernel]).run(kernel, arrays, case.outputs, {case.outputs[1]: scale})
    assert_same(case, got, case.reference(arrays))


@needs_compiler
def test_a_large_mean_costs_no_digits(rng: np.random.Generator) -> None:
    """Nor does one element that is far from all others, in any place.

    The bound is what float32 allows. Kernels sum around one element of the channel, so the errors of sums scale with
    the range of its elements. The roundings of n terms are independent, so they grow as sqrt(n). Only the mean itself,
    which is rounded for a chunk and for the channel, has an error that scales with the mean.
    """
    x, p = last(F32, 8, 8, 16, 16), rows(F32, 8)
    case = build("large mean", [x, p, p], forward, positive)
    assert case.kernel is not None
    arrays = case.arrays(rng)
    array = arrays[case.graph.inputs[0]]
    array += 1000.0
    array[0, 3, 0, 0] = 3e4
    wide = {v: a.astype(np.float64) for v, a in arrays.items()}
    y, mean, inverse = case.reference(wide)
    image, scale, bias = (wide[v] for v in case.graph.inputs)
    count = image.size // image.shape[1]
    unit = float(np.finfo(np.float32).eps) / 2
    growth, spread = np.sqrt(count) * unit, np.ptp(image, (0, 2, 3))
    centre = 2 * unit * np.abs(mean) + growth * spread
    relative = growth * (1.0 + (spread * inverse) ** 2)  # the variance is what the mean's square leaves of the sum
    each = (slice(None), None, None)
    of_y = np.abs(scale * inverse * centre)[each] + np.abs(y - bias[each]) * relative[each] + growth * np.abs(y)
    emulator = Emulator(each_way(case.kernel))
    for way in each_way(case.kernel):
        got = emulator.run(way, arrays, case.outputs)
        for a, b, bound in zip(got, (y, mean, inverse), (of_y, centre, inverse * relative), strict=True):
            assert (np.abs(a - b) <= bound).all()


@needs_compiler
def test_what_is_no_number_stays_in_its_channel(rng: np.random.Generator) -> None:
    x, p = last(F16, 4, 8, 6, 5), rows(F32, 8)
    cases = [build("train", [x, p, p], forward, positive), build("backward", [x, x, p, p, p], backward, positive)]
    for case in cases:
        arrays = case.arrays(rng)
        assert case.kernel is not None and len(each_way(case.kernel)) > 1
        first = arrays[case.graph.inputs[0]]
        first[0, 1, 0, 0] = np.nan
        first[2, 3, 4, 4] = np.inf
        first[0, 5, 0, 0] = -np.inf
        emulator, want = Emulator(each_way(case.kernel)), case.reference(arrays)
        for way in each_way(case.kernel):
            got = emulator.run(way, arrays, case.outputs)
            for a, b in zip(got, want, strict=True):
                a, b = (v[:, [1, 3, 5]] if v.ndim > 1 else v[[1, 3, 5]] for v in (a, b))
                assert not np.isfinite(a.astype(np.float64)).all() or np.isfinite(b.astype(np.float64)).all()
                np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
            rest = [0, 2, 4, 6, 7]
            assert all(np.isfinite((v[:, rest] if v.ndim > 1 else v[rest]).astype(np.float64)).all() for v in got)


@needs_compiler
@pytest.mark.parametrize("deviations", [0.0, 3.0, 30.0, 300.0])
def test_by_sums_a_mean_of_many_deviations_costs_less_than_16_bits_do(
    rng: np.random.Generator, deviations: float
) -> None:
    """Of an image that was rounded to 16 bits: against the norm of what it was before."""
    x, p = last(F16, 8, 16, 24, 24), rows(F32, 16)
    train, by = build("train", [x, p, p], forward), build("by sums", [x, p, p, p, p], by_sums)
    exact = rng.standard_normal(x.shape) * 0.1 + 0.1 * deviations
    image, scale, bias = exact.astype(np.float16), np.ones(16, np.float32), np.zeros(16, np.float32)
    assert by.kernel is not None and train.kernel is not None
    wide = image.astype(np.float32)
    given = [v.sum(axis=(0, 2, 3), dtype=np.float32) for v in (wide, wide * wide)]
    emulator = Emulator([replace(k, others=()) for k in (by.kernel, train.kernel)])
    arrays = dict(zip(by.graph.inputs, [image, scale, bias, *given], strict=True))
    got = emulator.run(replace(by.kernel, others=()), arrays, by.outputs)
    arrays = dict(zip(train.graph.inputs, [image, scale, bias], strict=True))
    best = emulator.run(replace(train.kernel, others=()), arrays, train.outputs)
    centred = exact - exact.mean(axis=(0, 2, 3), keepdims=True)
    want = centred / np.sqrt(np.square(centred).mean(axis=(0, 2, 3), keepdims=True) + 1e-3)

    def error(y: np.ndarray) -> float:
        return float(np.linalg.norm(y.astype(np.float64) - want) / np.linalg.norm(want))

    assert error(got[0]) < 1.01 * error(best[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [224 << 10, 64 << 10, 0])
def test_images_of_a_network_on_the_device(rng: np.random.Generator, kept: int) -> None:
    """All of their blocks meet, several times; and the bits are the same each time."""
    pytest.importorskip("cupy")
    from fusec.gpu.launch.kernel_launcher import Launcher

    launcher, met = Launcher(), 0
    for dtype, channels, side in ((F16, 64, 56), (F16, 512, 28), (F16, 2048, 7), (BF16, 40, 33), (F32, 64, 28)):
        x, p = last(dtype, 16, channels, side, side), rows(F32, channels)
        for make, types in ((forward, [x, p, p]), (backward, [x, x, p, p, p]), (masked, [x, x, p, p, p, p])):
            case = build(f"{make.__name__} {channels}", types, make, mostly_negative if make is masked else positive)
            case = replace(case, figures=keeping(kept))
            assert case.kernel is not None
            arrays = case.arrays(rng)
            want = case.reference({v: a.astype(np.float64) if dtype is F32 else a for v, a in arrays.items()})
            want = [a.astype(v.type.dtype.numpy) for v, a in zip(case.outputs, want, strict=True)]
            for way in each_way(case.kernel):
                if not launcher.runs(way):
                    continue
                met += way.launches[0].cooperative
                got = on_the_device(launcher, way, arrays, case.outputs)
                for v, a, b in zip(case.outputs, got, want, strict=True):
                    a, b = a.astype(np.float64), b.astype(np.float64)
                    assert np.linalg.norm(a - b) < 3 * ROUNDING[v.type.dtype] * np.linalg.norm(b), (case.name, v)
                again = on_the_device(launcher, way, arrays, case.outputs)
                assert all(a.tobytes() == b.tobytes() for a, b in zip(got, again, strict=True))
    assert met > 0


@pytest.mark.gpu
def test_a_thread_without_a_context_finds_room() -> None:
    """A function that another thread loaded is there; the driver is asked for room all the same."""
    pytest.importorskip("cupy")
    from concurrent.futures import ThreadPoolExecutor

    from fusec.gpu.launch.kernel_launcher import Launcher

    x, p = last(F16, 16, 64, 28, 28), rows(F32, 64)
    kernel = build("norm", [x, p, p], forward, positive).kernel
    assert kernel is not None
    for _ in range(2):
        with ThreadPoolExecutor(1) as fresh:
            fresh.submit(Launcher().compile, list(each_way(kernel))).result()
