"""Test kernels of products with weights of 4 and 8 bits against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.autotune.fusion.fusion_proposals import is_joint_work, may_begin
from fusec.gpu.kernels.codegen.kernel import Launch
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import PackedMatMul, RmsNorm, pw

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32
I4, U4, I8, U8 = DType.I4, DType.U4, DType.I8, DType.U8


@dataclass(frozen=True)
class Weights:
    """A matrix of codes[columns, depth], with a scale for each block of a row."""

    codes: DType
    columns: int
    depth: int
    block: int
    scales: DType = F16
    zeros: bool = False
    seed: int = 0

    def operands(self, g: Graph) -> list[Value]:
        rng, info = np.random.default_rng(self.columns + self.depth + self.seed), ml_dtypes.iinfo(self.codes.numpy)
        shape = (self.columns, -(-self.depth // self.block))

        def integers(*shape: int) -> Value:
            return g.constant(rng.integers(int(info.min), int(info.max) + 1, shape).astype(self.codes.numpy))

        factors = rng.uniform(0.5, 1.5, shape) / (int(info.max) * self.depth**0.5)
        scales = g.constant(factors.astype(self.scales.numpy))
        return [integers(self.columns, self.depth), scales, *([integers(*shape)] if self.zeros else [])]


def product(dtype: DType, shape: tuple[int, ...], weights: Weights, order: tuple[int, ...] = ()) -> Case:
    """With a bias, a residual and an activation; the sum is stored, too."""

    def make(g: Graph, x: Value, z: Value) -> list[Value]:
        y = g.add(PackedMatMul(weights.block), x, *weights.operands(g))
        y = g.add(pw("add"), y, g.constant(np.linspace(-1, 1, weights.columns).astype(dtype.numpy)))
        y = g.add(pw("add"), y, z)
        return [y, g.add(pw("swish", beta=1.0), y)]

    types = [TensorType(shape, dtype, order), rows(dtype, *shape[:-1], weights.columns)]
    return build(f"{dtype.value} {shape} {weights} {order}", types, make)


def alone(dtype: DType, shape: tuple[int, ...], weights: Weights, order: tuple[int, ...] = ()) -> Case:
    """With a bias."""

    def make(g: Graph, x: Value) -> Value:
        y = g.add(PackedMatMul(weights.block), x, *weights.operands(g))
        return g.add(pw("add"), y, g.constant(np.linspace(-1, 1, weights.columns).astype(dtype.numpy)))

    return build(f"{dtype.value} {shape} {weights} {order}", [TensorType(shape, dtype, order)], make)


def gated(dtype: DType, shape: tuple[int, ...], weights: Weights, **second: Any) -> Case:
    """Two products of the same rows, as in a gated layer."""

    def make(g: Graph, x: Value) -> Value:
        gate = g.add(PackedMatMul(weights.block), x, *weights.operands(g))
        other = replace(weights, seed=1, **second)
        up = g.add(PackedMatMul(other.block), x, *other.operands(g))
        return g.add(pw("mul"), g.add(pw("swish", beta=1.0), gate), up)

    return build(f"gated {dtype.value} {shape} {weights}", [TensorType(shape, dtype)], make)


def normed(dtype: DType, shape: tuple[int, ...], weights: Weights, order: tuple[int, ...] = ()) -> Case:
    """An RMS norm of the rows, and a product of its result."""

    def make(g: Graph, x: Value, scale: Value) -> Value:
        y = g.add(PackedMatMul(weights.block), g.add(RmsNorm(-1, 1e-3), x, scale), *weights.operands(g))
        return g.add(pw("swish", beta=1.0), y)

    types = [TensorType(shape, dtype, order), rows(dtype, shape[-1])]
    return build(f"normed {dtype.value} {shape} {weights} {order}", types, make)


def normed_and_gated(dtype: DType, shape: tuple[int, ...], weights: Weights) -> Case:
    """An RMS norm of the rows, and two products of its result."""

    def make(g: Graph, x: Value, scale: Value) -> Value:
        y = g.add(RmsNorm(-1, 1e-3), x, scale)
        gate, up = (
            g.add(PackedMatMul(weights.block), y, *replace(weights, seed=seed).operands(g)) for seed in range(2)
        )
        return g.add(pw("mul"), g.add(pw("swish", beta=1.0), gate), up)

    types = [rows(dtype, *shape), rows(dtype, shape[-1])]
    return build(f"normed and gated {dtype.value} {shape} {weights}", types, make)


def normed_cases() -> list[Case]:
    cases = [
        normed(F16, (1, 1, 2048), Weights(I4, 96, 2048, 32)),
        normed(BF16, (3, 1024), Weights(U4, 32, 1024, 64, zeros=True)),
        normed(F16, (2, 2, 1024), Weights(I8, 64, 1024, 32, F32), (1, 0, 2)),
        normed_and_gated(F16, (1, 2048), Weights(I4, 96, 2048, 32)),
        normed_and_gated(BF16, (4, 1024), Weights(U8, 32, 1024, 128)),
    ]
    return cases + [replace(case, figures=replace(FIGURES, processors=2)) for case in cases]


def gated_cases() -> list[Case]:
    cases = [
        gated(F16, (1, 2048), Weights(I4, 96, 2048, 32)),
        gated(BF16, (4, 1024), Weights(U4, 64, 1024, 128, zeros=True)),
        gated(F16, (9, 1024), Weights(U8, 32, 1024, 32, F32)),
    ]
    return cases + [replace(case, figures=replace(FIGURES, processors=2)) for case in cases]


def packed_cases() -> list[Case]:
    return [
        product(F16, (1, 256), Weights(I4, 32, 256, 32)),
        product(F16, (1, 1, 512), Weights(U4, 48, 512, 64, zeros=True)),
        product(BF16, (5, 192), Weights(I4, 32, 192, 16, F32, zeros=True)),
        product(BF16, (3, 3, 128), Weights(U4, 16, 128, 128, BF16)),
        product(F16, (16, 128), Weights(I8, 32, 128, 32, F32)),
        product(F16, (2, 96), Weights(U8, 48, 96, 32, zeros=True)),
        product(BF16, (1, 160), Weights(I8, 16, 160, 160, F16, zeros=True)),
        product(BF16, (9, 64), Weights(U8, 32, 64, 16, BF16)),
        product(F16, (3, 128), Weights(I4, 16, 128, 64), (1, 0)),
        product(F16, (1, 4096), Weights(I4, 16, 4096, 1024, zeros=True)),
        product(F16, (2, 2368), Weights(U4, 32, 2368, 64)),  # chunks that no number of warps divides
        *ring_cases(),
        *gated_cases(),
        *normed_cases(),
    ]


def ring_cases() -> list[Case]:
    """Blocks of one tile and of several, and as many chunks as a ring holds or more."""
    cases = [
        product(F16, (1, 2048), Weights(I4, 32, 2048, 32)),
        product(F16, (3, 1024), Weights(U4, 96, 1024, 64)),
        product(BF16, (1, 2, 6144), Weights(I4, 48, 6144, 16)),
        product(BF16, (8, 1024), Weights(I8, 64, 1024, 32, F32)),
        product(F16, (2, 1024), Weights(U8, 80, 1024, 16), (1, 0)),
        product(F16, (1, 2048), Weights(U4, 96, 2048, 128, zeros=True)),  # chunks of several warps share a scale
        product(BF16, (16, 1024), Weights(I4, 32, 1024, 32, F32, zeros=True)),
        product(F16, (12, 3072), Weights(U8, 48, 3072, 3072, zeros=True)),
        product(F16, (8, 1024), Weights(I8, 96, 1024, 16, zeros=True)),
    ]
    return cases + [replace(case, figures=replace(FIGURES, processors=2)) for case in cases]


@needs_compiler
def test_all_variants_compute_the_product(rng: np.random.Generator) -> None:
    check(packed_cases(), rng, every=True)


def rings(case: Case) -> list[Launch]:
    """The launches of a case that read weights through rings in shared memory."""
    assert case.kernel is not None
    launches = (way.launches[0] for way in (case.kernel, *case.kernel.others))
    return [launch for launch in launches if launch.resident_bytes]


def test_two_products_that_differ_are_two_launches() -> None:
    assert gated(F16, (1, 2048), Weights(I4, 32, 2048, 32)).kernel is not None
    for second in ({"block": 64}, {"codes": U4}, {"zeros": True}, {"scales": F32}):
        assert gated(F16, (1, 2048), Weights(I4, 32, 2048, 32), **second).kernel is None


def test_a_product_of_the_result_of_another_is_a_launch_of_its_own() -> None:
    def make(g: Graph, x: Value) -> Value:
        first, second = Weights(I4, 1024, 1024, 32), Weights(I4, 1024, 1024, 32, seed=1)
        y = g.add(PackedMatMul(32), x, *first.operands(g))
        return g.add(PackedMatMul(32), g.add(pw("relu"), y), *second.operands(g))

    assert build("in a row", [TensorType((1, 1024), F16)], make).kernel is None


def test_blocks_have_one_tile_or_several() -> None:
    launches = [rings(case) for case in ring_cases()]
    assert all(launches) and {launch.grid for each in launches for launch in each} > {2, 3, 4}


@pytest.mark.parametrize(
    ("why", "shape", "weights"),
    [
        ("sums of many rows and tiles", (16, 2048), Weights(I4, 16 * 9, 2048, 32)),
        ("warps do not share the depth evenly", (1, 2368), Weights(I4, 32, 2368, 32)),
        ("too many columns for two blocks", (1, 2048), Weights(I4, 16 * 34, 2048, 32)),
    ],
)
def test_others_are_not_read_as_streams(why: str, shape: tuple[int, ...], weights: Weights) -> None:
    small = replace(FIGURES, processors=1)
    assert rings(replace(product(F16, (1, 2048), Weights(I4, 32, 2048, 32)), figures=small))
    assert not rings(replace(product(F16, shape, weights), figures=small)), why


@needs_compiler
@pytest.mark.parametrize("codes", [I4, U4, I8, U8])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_code_and_zero_point_is_exact(codes: DType, dtype: DType) -> None:
    """Each column holds all codes less one zero point, and each row of x selects one depth."""
    info = ml_dtypes.iinfo(codes.numpy)
    numbers = np.arange(int(info.min), int(info.max) + 1)
    graph = Graph("codes")
    depth = max(64, len(numbers))
    table = np.tile(np.resize(numbers, depth), (len(numbers), 1)).astype(codes.numpy)
    zeros = numbers[:, None].astype(codes.numpy)
    x = graph.add_input("x", TensorType((16, depth), dtype))
    y = graph.add(
        PackedMatMul(depth), x, graph.constant(table), graph.constant(np.ones(zeros.shape, "f4")), graph.constant(zeros)
    )
    graph.set_outputs([y])
    case = Case("codes", graph, lambda rng, x: np.zeros(x.shape))
    kernel = case.kernel
    assert kernel is not None
    emulator = Emulator([replace(kernel, others=())])
    for first in range(0, len(numbers), 16):
        selected = np.zeros((16, depth), dtype.numpy)
        selected[np.arange(16), first + np.arange(16)] = 1
        arrays = {v: v.literal.array for v in graph.values() if v.literal is not None} | {x: selected}
        (got,) = emulator.run(kernel, arrays, [y])
        want = numbers[None, :] * 0 + numbers[first : first + 16, None] - numbers[None, :]
        assert np.array_equal(got.astype(np.int64), want)


@needs_compiler
def test_rows_are_independent_and_infinities_stay_in_theirs(rng: np.random.Generator) -> None:
    case = product(F16, (4, 128), Weights(I4, 32, 128, 32))
    kernel = case.kernel
    assert kernel is not None
    arrays = case.arrays(rng)
    plain = Emulator([kernel]).run(kernel, arrays, case.outputs)
    arrays[case.graph.inputs[0]] = arrays[case.graph.inputs[0]].copy()
    arrays[case.graph.inputs[0]][1, 7] = np.inf
    with_infinity = Emulator([kernel]).run(kernel, arrays, case.outputs)
    for before, after in zip(plain, with_infinity, strict=True):
        assert np.array_equal(before[[0, 2, 3]], after[[0, 2, 3]])
        assert not np.isfinite(after[1].astype(np.float32)).all()


@pytest.mark.parametrize(
    ("why", "dtype", "shape", "weights"),
    [
        ("fp32", F32, (1, 128), Weights(I4, 32, 128, 32)),
        ("many rows", F16, (17, 128), Weights(I4, 32, 128, 32)),
        ("columns", F16, (1, 128), Weights(I4, 24, 128, 32)),
        ("depth", F16, (1, 96), Weights(I4, 32, 96, 32)),
        ("blocks", F16, (1, 128), Weights(I4, 32, 128, 48)),
    ],
)
def test_others_are_left_alone(why: str, dtype: DType, shape: tuple[int, ...], weights: Weights) -> None:
    assert product(dtype, shape, weights).kernel is None


def test_codes_that_are_computed_are_left_alone() -> None:
    def make(g: Graph, x: Value, codes: Value) -> Value:
        return g.add(PackedMatMul(32), x, codes, *Weights(I4, 32, 128, 32).operands(g)[1:])

    types = [rows(F16, 1, 128), rows(I4, 32, 128)]
    assert build("computed", types, make).kernel is None


def test_a_narrow_result_of_few_blocks_is_split_along_the_depth() -> None:
    kernel: Any = product(F16, (1, 8192), Weights(I4, 64, 8192, 128)).kernel
    assert kernel.scratch_bytes and kernel.launches[0].grid > 64 // 16
    assert not product(F16, (1, 128), Weights(I4, 32, 128, 32)).kernel.scratch_bytes  # type: ignore[union-attr]
    assert FIGURES.processors > 100


def test_weights_are_requested_before_earlier_launches_end() -> None:
    """Rows and operands of the epilogue are read later, through pointers that are new after the wait."""
    for case in (
        alone(F16, (1, 256), Weights(I4, 32, 256, 32)),
        alone(F16, (3, 256), Weights(I4, 16, 256, 64), (1, 0)),
        product(F16, (1, 256), Weights(I4, 32, 256, 32)),
        product(F16, (1, 1024), Weights(I4, 32, 1024, 32)),
    ):
        assert case.kernel is not None
        for variant in (case.kernel, *case.kernel.others):
            (launch,) = variant.launches
            assert launch.dependent
            first = "copy_ahead<16>(" if launch.resident_bytes else "load_words(codes"
            words = (first, "wait_for_launches", "next_may_begin", "from_here", "x[u][0][j]", "multiply_tile")
            places = [launch.source.index(word) for word in words]
            assert places == sorted(places)
            waits, pairs = (
                launch.source.index("wait_for_launches"),
                zip(launch.parameters, launch.arguments, strict=True),
            )
            for i, (kind, argument) in enumerate(pairs):
                if argument.value is not None and kind.startswith("const ") and argument.value.literal is None:
                    assert launch.source.index(f"a{i} = from_here(a{i})") > waits


def test_a_norm_of_few_rows_and_products_of_its_result_are_a_proposal() -> None:
    case = normed_and_gated(F16, (1, 2048), Weights(I4, 96, 2048, 32))
    assert all(may_begin(case.nodes[:n], FIGURES) for n in range(1, len(case.nodes) + 1))
    assert [is_joint_work(case.nodes[:n]) for n in (1, 2)] == [False, True]
    assert normed(F16, (5, 2048), Weights(I4, 96, 2048, 32)).kernel is None, "five rows"


def test_a_norm_that_is_stored_stays_a_step() -> None:
    def make(g: Graph, x: Value, scale: Value) -> list[Value]:
        y = g.add(RmsNorm(-1, 1e-3), x, scale)
        return [y, g.add(PackedMatMul(32), y, *Weights(I4, 96, 2048, 32).operands(g))]

    assert build("stored", [rows(F16, 1, 2048), rows(F16, 2048)], make).kernel is None


def test_rows_are_normalised_after_the_first_weights_are_requested() -> None:
    for launch in rings(normed(F16, (1, 2048), Weights(I4, 96, 2048, 32))):
        before, _, after = launch.source.partition("wait_for_launches();")
        assert launch.dependent and "copy_ahead" in before and "squares" not in before and "squares" in after
