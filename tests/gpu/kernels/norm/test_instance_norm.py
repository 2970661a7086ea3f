"""Compare kernels of instance norm, channels innermost, with the reference in the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu.kernels.cases import Case, assert_same, build, last, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.ir import DType, Op, TensorType
from fusec.ops import InstanceNorm, MaxPool, Resize, pw

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16


def normed(dtype: DType, *shape: int, after: str = "") -> Case:
    def make(g: Any, x: Any, s: Any, b: Any, *z: Any) -> Any:
        y = g.add(InstanceNorm(), x, s, b)
        if z:
            y = g.add(pw("add"), y, z[0])
        return g.add(pw("relu"), y) if after else y

    p, x = rows(dtype, shape[1]), last(dtype, *shape)
    residual: list[TensorType] = [x] if after == "residual" else []
    return build(f"{dtype.value} {shape} {after}", [x, p, p, *residual], make)


def followed(dtype: DType, shape: tuple[int, ...], op: Op, after: str = "relu") -> Case:
    """Relu, perhaps a residual before it, and a pool or copies last."""

    def make(g: Any, x: Any, s: Any, b: Any, *z: Any) -> Any:
        y = g.add(InstanceNorm(), x, s, b)
        y = g.add(pw("add"), y, z[0]) if z else y
        return g.add(op, g.add(pw("relu"), y))

    p, x = rows(dtype, shape[1]), last(dtype, *shape)
    residual = [x] if after == "residual" else []
    return build(f"{dtype.value} {shape} {op.name} {after}", [x, p, p, *residual], make)


def pool(*window: int) -> MaxPool:
    return MaxPool(window, window, (0, 0, 0, 0), (1, 1))


def copies(shape: tuple[int, ...], high: int, wide: int, mode: str = "nearest") -> Resize:
    sizes = (*shape[:2], shape[2] * high, shape[3] * wide)
    return Resize(sizes, (1.0, 1.0, float(high), float(wide)), mode, "asymmetric", "floor")


def followed_cases() -> list[Case]:
    small = (1, 64, 35, 22)
    return [
        followed(F16, (2, 32, 40, 44), pool(2, 2)),
        followed(BF16, (1, 16, 33, 40), pool(3, 1), "residual"),
        followed(F32, (2, 8, 36, 40), pool(2, 4)),
        followed(F16, (2, 32, 36, 30), copies((2, 32, 36, 30), 2, 2)),
        followed(BF16, small, copies(small, 1, 3), "residual"),
    ]


def cases() -> list[Case]:
    """Chunks of unequal size, several blocks side by side, few pixels, one and three dims."""
    return [
        normed(F16, 2, 32, 40, 41, after="relu"),
        normed(BF16, 1, 64, 33, 35, after="residual"),
        normed(F32, 2, 24, 37, 30),
        normed(F16, 1, 512, 9, 13, after="relu"),
        normed(F16, 1, 128, 7, 5, after="residual"),
        normed(F16, 2, 16, 1050, after="relu"),
        normed(F32, 1, 8, 9, 11, 12),
        *followed_cases(),
    ]


@needs_compiler
def test_every_way(rng: np.random.Generator) -> None:
    found = [(case, way) for case in cases() if case.kernel is not None for way in variants_of(case.kernel)]
    assert {case.name for case, _ in found} == {case.name for case in cases()}
    emulator = Emulator([way for _, way in found])
    for case, way in found:
        arrays = case.arrays(rng)
        assert_same(case, emulator.run(way, arrays, case.outputs), case.reference(arrays))


@needs_compiler
def test_a_large_mean_and_an_odd_first_pixel_cost_no_digits() -> None:
    case = normed(F32, 1, 8, 40, 40)
    rng = np.random.default_rng(5)
    assert case.kernel is not None
    for mean, corner in ((1000.0, 1000.0), (0.0, 300.0)):
        arrays = case.arrays(rng)
        x = next(v for v in arrays if v.type.rank == 4)
        arrays[x] = (arrays[x] + np.float32(mean)).astype(np.float32)
        arrays[x][:, :, 0, 0] = corner
        got = np.stack([Emulator([way]).run(way, arrays, case.outputs)[0] for way in variants_of(case.kernel)[:5]])
        wide = {v: a.astype(np.float64) for v, a in arrays.items()}
        (want,) = InstanceNorm().reference(np, *(wide[v] for v in case.nodes[0].operands))
        assert (np.linalg.norm((got - want).reshape(5, -1), axis=1) < 3e-4 * np.linalg.norm(want)).all(), mean


@needs_compiler
def test_a_number_that_is_none_spoils_its_own_channel_alone(rng: np.random.Generator) -> None:
    case = normed(F16, 2, 16, 40, 40)
    assert case.kernel is not None
    arrays = case.arrays(rng)
    x = next(v for v in arrays if v.type.rank == 4)
    arrays[x][1, 3, 20, 20], arrays[x][0, 5, 0, 0] = np.nan, np.inf
    (got,) = Emulator([case.kernel]).run(case.kernel, arrays, case.outputs)
    spoilt = np.asarray(np.isnan(got.astype(np.float32)).all(axis=(2, 3)))
    assert spoilt.sum() == 2 and spoilt[1, 3] and spoilt[0, 5] and np.isnan(got.astype(np.float32)).sum() == 2 * 1600


def test_what_is_read_twice_is_summed_in_chunks_first() -> None:
    large, small = normed(F16, 1, 32, 256, 256).kernel, normed(F16, 32, 128, 7, 7).kernel
    assert large is not None and [launch.grid for launch in large.launches] == [128, 128]
    assert small is not None and len(small.launches) == 1


def test_a_pool_or_copies_are_taken_in_where_windows_lie_side_by_side() -> None:
    shape = (1, 32, 64, 64)
    for op in (pool(2, 2), copies(shape, 2, 2)):
        kernel = followed(F16, shape, op).kernel
        assert kernel is not None and kernel.name == f"instance_norm+relu+{op.name}" and len(kernel.launches) == 2
    overlapping = MaxPool((3, 3), (2, 2), (1,) * 4, (1, 1))
    between = Resize((1, 32, 128, 128), (1.0, 1.0, 2.0, 2.0), "nearest", "half_pixel", "ceil")
    for op in (overlapping, pool(3, 3), copies(shape, 2, 2, "linear"), between):
        assert followed(F16, shape, op).kernel is None, op
