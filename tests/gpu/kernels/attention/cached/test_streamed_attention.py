"""Test attention over a cache by warps that stream it, against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from gpu.kernels.attention.cached.test_cached_attention import apart, hopper_cases, rotated
from gpu.kernels.cases import FIGURES, Case, assert_same, check, each_way
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.kernels import GpuFigures, Kernel
from fusec.ir import DType
from fusec.ops import Attention

F16, BF16 = DType.F16, DType.BF16
FEW = GpuFigures(**{**vars(FIGURES), "processors": 2})


def streamed_cases() -> list[Case]:
    """Cases whose sequences occupy a GPU of two multiprocessors."""
    more = [rotated(F16, (3, 16, 1), 512, 128), rotated(BF16, (1, 8, 2), 400, 128, Attention(0.25, hides=True))]
    return [replace(case, figures=FEW) for case in (*hopper_cases(), *more)]


def streams(case: Case) -> list[Kernel]:
    assert case.kernel is not None
    return [way for way in each_way(case.kernel) if way.launches[0].entry.startswith("streamed_attention")]


@needs_compiler
def test_all_variants_compute_attention_and_the_cache(rng: np.random.Generator) -> None:
    cases = streamed_cases()
    assert all(len(streams(case)) == 2 for case in cases)
    check(cases, rng, every=True)


@needs_compiler
def test_it_writes_new_rows_alone_where_it_writes_over_the_operand(rng: np.random.Generator) -> None:
    case = replace(rotated(F16, (1, 8, 2), 300, 128), figures=FEW)
    arrays = case.arrays(rng)
    over = dict(zip(case.outputs, case.graph.inputs[4:6], strict=False))
    for way in streams(case):
        got = Emulator([way]).run(way, arrays, case.outputs, over)
        assert_same(case, got, case.reference(arrays))


@needs_compiler
def test_of_rows_with_the_same_place_the_last_one_stays(rng: np.random.Generator) -> None:
    case = replace(apart(F16, (1, 6, 3), 64, 32), figures=FEW)
    arrays = case.arrays(rng)
    for at in ([70, 70, 70], [5, -187, 191], [191, -192, 64]):
        arrays[case.graph.inputs[4]] = np.array(at)
        for way in streams(case):
            assert_same(case, Emulator([way]).run(way, arrays, case.outputs), case.reference(arrays))


@needs_compiler
def test_keys_after_the_last_one_that_is_shown_are_not_read(rng: np.random.Generator) -> None:
    """NaN there changes nothing where the cache is written in place."""
    case = replace(rotated(F16, (2, 8, 1), 600, 64), figures=FEW)
    arrays = case.arrays(rng)
    *_, old_keys, old_values, at, _, bias = case.graph.inputs
    shown = np.arange(600) < 70
    arrays[bias] = np.broadcast_to(np.where(shown, 0.0, -np.inf), arrays[bias].shape).astype(np.float16)
    arrays[at] = np.array([69, 669])
    want = case.reference(arrays)[2]
    for cache in (old_keys, old_values):
        arrays[cache].reshape(2, 600, 64)[:, 128:] = np.nan  # eight warps have 128 keys at a time
    over = dict(zip(case.outputs, (old_keys, old_values), strict=False))
    for way in streams(case):
        got = Emulator([way]).run(way, arrays, case.outputs, over)[2].astype(np.float64)
        assert np.linalg.norm(got - want) <= 2e-3 * np.linalg.norm(want)


@needs_compiler
def test_a_new_row_that_is_hidden_is_stored(rng: np.random.Generator) -> None:
    case = replace(rotated(F16, (2, 8, 1), 600, 64), figures=FEW)
    arrays = case.arrays(rng)
    at, bias = case.graph.inputs[6], case.graph.inputs[8]
    arrays[bias][..., 40:] = -np.inf
    arrays[at] = np.array([599, 600])
    over = dict(zip(case.outputs, case.graph.inputs[4:6], strict=False))
    for way in streams(case):
        got = Emulator([way]).run(way, arrays, case.outputs, over)
        assert_same(case, got, case.reference(arrays))


def test_sequences_are_about_as_many_as_multiprocessors() -> None:
    many, few = (rotated(F16, (batch, 32, 8), 2048, 128) for batch in (16, 8))
    assert all(way.launches[0].grid == 128 for way in streams(many))
    assert few.kernel is None or not streams(few), "64 blocks for 132 multiprocessors"
    assert not streams(replace(rotated(F16, (2, 34, 2), 64, 64), figures=FEW)), "17 heads share keys"
