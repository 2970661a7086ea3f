"""Test the place of the largest element of long rows against the reference, through the emulator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, awkward, build, check, normal
from gpu.kernels.emulator import needs_compiler

from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Cast, Reduce, pw
from fusec.schedule.program import Program, single_step


def arg_max(shape: Sequence[int], dtype: DType = DType.F16, to: DType | None = DType.I64, last: int = -1) -> Case:
    def make(g: Graph, x: Value) -> Value:
        axis, size = len(shape) - 1, shape[-1]
        most = g.add(Reduce("max", (axis,), True), x)
        places = g.constant(np.arange(size, dtype=np.int32).reshape(*(1,) * axis, size))
        fill = g.constant(np.int32(size - 1 if last < 0 else last))
        chosen = g.add(pw("where"), g.add(pw("cmp_ge"), x, most), places, fill)
        place = g.add(Reduce("min", (axis,), False), chosen)
        return place if to is None else g.add(Cast(to), place)

    name = f"place of the largest of {dtype.value} {list(shape)} {to}"
    return build(name, [TensorType(tuple(shape), dtype)], make, rounded, exact=True)


def rounded(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Small numbers, the largest of which are equal in many places; in every third row also odd ones."""
    x = np.round(normal(rng, type) * 4) / 4
    return np.where(rng.random((*type.shape[:-1], 1)) < 0.3, awkward(rng, type), x).astype(type.dtype.numpy)


def arg_max_cases() -> list[Case]:
    return [
        arg_max((1, 32000)),
        arg_max((7, 2051), DType.F32),
        arg_max((3, 2, 4100), DType.BF16, None),
        arg_max((5, 1024)),
        arg_max((2050,), DType.F32, DType.I32),
    ]


@needs_compiler
def test_places(rng: np.random.Generator) -> None:
    cases = arg_max_cases()
    check(cases, rng)
    assert all(case.kernel is not None and case.kernel.launches[0].entry.startswith("arg_max") for case in cases)


@needs_compiler
@pytest.mark.parametrize("number", [-np.inf, 0.0, np.nan])
def test_rows_of_one_number(number: float, rng: np.random.Generator) -> None:
    case = arg_max((3, 2500))
    case.draw = lambda rng, x: np.full(x.shape, number, x.dtype.numpy)
    check([case], rng)


def test_it_reads_nothing_before_it_waits() -> None:
    kernel = arg_max((1, 32000)).kernel
    assert kernel is not None
    (launch,) = kernel.launches
    assert launch.dependent and launch.grid == 16
    assert "a0 = from_here(a0);" in launch.source.partition("wait_for_launches();")[2]


@pytest.mark.parametrize("case", [arg_max((3, 1023)), arg_max((1025, 1024)), arg_max((1, 2048), last=7)])
def test_other_steps_have_other_kernels(case: Case) -> None:
    kernel = case.kernel
    assert kernel is None or not kernel.launches[0].entry.startswith("arg_max")


def test_its_ops_become_one_step() -> None:
    """Each time steps are fused, they join the step after them. A program is fused twice."""
    graph = arg_max((1, 32000)).graph
    steps = [single_step(graph, node) for node in graph.nodes if node.op.name != "constant"]
    once = fuse_steps(Program(graph, tuple(steps)), FIGURES)
    assert [step.signature for step in fuse_steps(once, FIGURES).steps] == ["reduce+cmp_ge+where+reduce+cast"]
