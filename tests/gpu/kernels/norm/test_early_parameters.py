"""Norms of rows that load their constants before they wait for the launch before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.cases import Case, build, check, rows
from gpu.kernels.emulator import needs_compiler

from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Cast, LayerNorm, pw

F16, F32 = DType.F16, DType.F32


def rounded_norm(size: int, dtype: DType = F16, constant: bool = True) -> Case:
    """A layer norm that also rounds its result to bytes. Its parameters are constants, or inputs."""
    rng = np.random.default_rng(size)

    def make(g: Graph, x: Value, *given: Value) -> list[Value]:
        drawn = [g.constant(rng.standard_normal(size).astype(dtype.numpy)) for _ in range(2)] if constant else given
        y = g.add(LayerNorm(-1, 1e-5), x, *drawn)
        z = g.add(pw("mul"), g.add(Cast(F32), y), g.constant(np.float32(33.3)))
        z = g.add(pw("clip", min=-128.0, max=127.0), g.add(pw("round"), z))
        return [y, g.add(Cast(DType.I8), z)]

    parameters = [] if constant else [TensorType((size,), dtype)] * 2
    return replace(build(f"{size} {dtype} {constant}", [rows(dtype, 5, size), *parameters], make), near=True)


@needs_compiler
def test_results_are_those_of_the_reference(rng: np.random.Generator) -> None:
    check(
        [rounded_norm(768), rounded_norm(520), rounded_norm(768, constant=False), rounded_norm(256, F32)],
        rng,
        every=True,
    )


@pytest.mark.parametrize(
    ("case", "early"),
    [
        (rounded_norm(768), 3),  # scale, bias, and the scale of the bytes
        (rounded_norm(768, constant=False), 0),  # another launch may write these
        (rounded_norm(768, F32), 0),  # would take too many registers
    ],
)
def test_constants_are_loaded_before_the_wait(case: Case, early: int) -> None:
    assert case.kernel is not None
    for variant in variants_of(case.kernel):
        before, wait, _ = variant.launches[0].source.partition("wait_for_launches();")
        assert wait
        assert before.count("load_pack_here") + before.count("wide(a") == early


def test_a_row_that_registers_do_not_hold_has_its_parameters_in_memory() -> None:
    kernel = rounded_norm(16384).kernel
    assert kernel is not None
    assert not any("parameter_s" in launch.source for variant in variants_of(kernel) for launch in variant.launches)
