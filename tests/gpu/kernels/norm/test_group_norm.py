"""Test kernels of group norm in one launch against the reference, through the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import Case, assert_same, build, last, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.kernels import Kernel
from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.gpu.kernels.norm import group_norm
from fusec.ir import DType, TensorType
from fusec.ops import Cast, GroupNorm, pw

F32, F16, BF16, F64 = DType.F32, DType.F16, DType.BF16, DType.F64


def normed(dtype: DType, groups: int, *shape: int, around: str = "swish") -> Case:
    """With swish after, and a sum in front, which is stored; the operand, multiplied (added, it could cancel all but
    what two roundings differ by); or factors of each image, and a cast."""

    def make(g: Any, x: Any, s: Any, b: Any, *z: Any) -> Any:
        total = g.add(pw("add"), x, z[0]) if around == "sum" else x
        y = g.add(pw("swish"), g.add(GroupNorm(groups), total, s, b))
        if around == "operand":
            return g.add(pw("mul"), y, x)
        if around == "factor":
            return g.add(Cast(F16 if dtype is F32 else dtype), g.add(pw("mul"), y, z[0]))
        return (y, total) if around == "sum" else y

    p, x = rows(dtype, shape[1]), last(dtype, *shape)
    factor = rows(dtype, shape[0], shape[1], *(1,) * (len(shape) - 2))
    more: dict[str, list[TensorType]] = {"sum": [x], "factor": [factor]}
    return build(f"{groups} groups {dtype.value} {shape} {around}", [x, p, p, *more.get(around, [])], make)


def cases() -> list[Case]:
    """Groups across vectors, inside of them and as long as several; blocks of unequal parts; one to three dims."""
    return [
        normed(F16, 32, 2, 320, 16, 21),
        normed(BF16, 8, 8, 80, 17, 11, around="sum"),
        normed(F32, 16, 2, 160, 9, 8, 7, around="operand"),
        normed(F16, 64, 4, 256, 300, around="factor"),
        normed(F16, 32, 8, 96, 13, 20, around="sum"),
        normed(F32, 4, 16, 96, 10, 29, around="factor"),
        normed(BF16, 8, 16, 640, 9, 8),
        normed(F16, 8, 16, 80, 10, 8, around="operand"),
    ]


def at_once(kernel: Kernel | None) -> list[Kernel]:
    assert kernel is not None
    return [way for way in variants_of(kernel) if way.launches[0].entry.startswith("group_norm_resident")]


@needs_compiler
def test_clusters_and_single_blocks(rng: np.random.Generator) -> None:
    some = cases()
    found = [(case, way) for case in some for way in at_once(case.kernel) if not way.launches[0].cooperative]
    assert {case.name for case, _ in found} == {case.name for case in some}
    emulator = Emulator([way for _, way in found])
    for case, way in found:
        arrays = case.arrays(rng)
        assert_same(case, emulator.run(way, arrays, case.outputs), case.reference(arrays))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few threads, however few there are, and no more than the emulator runs together."""
    monkeypatch.setattr(group_norm, "THREADS", (64, 160))
    monkeypatch.setattr(group_norm, "MEETING", 8)
    monkeypatch.setattr(group_norm, "FEW", 0)


@needs_compiler
@pytest.mark.usefixtures("small")
def test_blocks_leave_barrier_counters_as_they_were(rng: np.random.Generator) -> None:
    some = [
        normed(F16, 8, 2, 80, 9, 21),
        normed(BF16, 12, 2, 24, 31, 9, around="factor"),
        normed(F32, 4, 1, 40, 259, around="sum"),
    ]
    for case in some:
        (way,) = (way for way in at_once(case.kernel) if way.launches[0].cooperative)
        assert way.launches[0].grid > 2 and way.scratch_bytes
        arrays, emulator = case.arrays(rng), Emulator([way])
        assert_same(case, emulator.run(way, arrays, case.outputs), case.reference(arrays))


@needs_compiler
@pytest.mark.usefixtures("small")
def test_a_large_mean_and_an_odd_first_pixel_cost_no_digits() -> None:
    case = normed(F32, 4, 2, 40, 30, 31)
    assert case.kernel is not None
    rng = np.random.default_rng(5)
    for mean, corner in ((1000.0, 1000.0), (0.0, 300.0)):
        arrays = case.arrays(rng)
        x = next(v for v in arrays if v.type.rank == 4)
        arrays[x] = (arrays[x] + np.float32(mean)).astype(np.float32)
        arrays[x][:, :, 0, 0] = corner
        wide = {v: a.astype(np.float64) for v, a in arrays.items()}
        (normal,) = GroupNorm(4).reference(np, *(wide[v] for v in case.nodes[0].operands))
        want = normal / (1.0 + np.exp(-normal))
        for way in variants_of(case.kernel):
            (got,) = Emulator([way]).run(way, arrays, case.outputs)
            assert np.linalg.norm(got - want) < 5e-5 * np.linalg.norm(want), (mean, way.launches[0].entry)


@needs_compiler
@pytest.mark.usefixtures("small")
def test_a_number_that_is_none_spoils_its_own_group_alone(rng: np.random.Generator) -> None:
    case = normed(F16, 8, 2, 80, 20, 20)
    arrays = case.arrays(rng)
    x = next(v for v in arrays if v.type.rank == 4)
    arrays[x][1, 33, 10, 10], arrays[x][0, 5, 0, 0] = np.nan, np.inf
    for way in at_once(case.kernel):
        (got,) = Emulator([way]).run(way, arrays, case.outputs)
        spoilt = np.isnan(got.astype(np.float32))
        assert spoilt[1, 30:40].all() and spoilt[0, :10].all() and spoilt.sum() == 2 * 10 * 400


def test_blocks_of_an_image_are_a_cluster_and_fill_the_gpu() -> None:
    """As in a diffusion model: 64 pixels square down to 8."""
    for shape, blocks in (((2, 320, 64, 64), 8), ((2, 640, 32, 32), 4), ((2, 1280, 16, 16), 2)):
        first, *_ = at_once(normed(F16, 32, *shape).kernel)
        (launch,) = first.launches
        assert f"__cluster_dims__({blocks})" in launch.source and launch.cluster == blocks and launch.grid == 128
        assert launch.architecture == "sm_90" and not launch.cooperative and not first.scratch_bytes
    (small, *_) = at_once(normed(F16, 32, 2, 1280, 8, 8).kernel)
    assert small.launches[0].grid == 64 and not small.launches[0].architecture


def test_what_does_not_fit_is_left_to_others() -> None:
    p = rows(F16, 64)

    def added(x: TensorType, z: TensorType) -> Case:
        return build("added", [x, p, p, z], lambda g, x, s, b, z: g.add(pw("add"), g.add(GroupNorm(8), x, s, b), z))

    x = last(F16, 8, 64, 24, 24)
    assert at_once(added(x, x).kernel)
    others = [
        added(rows(F16, 8, 64, 24, 24), x),
        added(x, rows(F16, 24, 1)),
        normed(F16, 32, 1, 128, 512, 512),
        normed(F64, 8, 8, 64, 24, 24),
        normed(F16, 3, 8, 60, 24, 24),
        normed(F16, 1, 1, 320, 8, 8),
    ]
    for case in others:
        assert not at_once(case.kernel), case.name
    many = at_once(normed(F16, 32, 16, 320, 64, 64).kernel)
    assert many and not any(way.launches[0].cooperative for way in many), "more blocks than run at the same time"
