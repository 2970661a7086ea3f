"""Test that the kernel before a product runs its prologue, if times say so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES
from lowering.lowers_judge import LowersJudge

from fusec.gpu.autotune.step_choices import apply_choices, step_key
from fusec.gpu.autotune.steps.step_split import split_prologues
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Cast, MatMul, Slice, pw
from fusec.passes.partition import partition
from fusec.plans.plan_record import Part
from fusec.schedule.program import Kind, Partition, Program
from fusec.targets.target import load


def program() -> Program:
    """A GEGLU, the product of whose halves is multiplied by a matrix."""
    rng, graph = np.random.default_rng(0), Graph("g")

    def weights(*shape: int) -> Value:
        return graph.constant((rng.standard_normal(shape) * 0.1).astype(np.float16))

    x = graph.add_input("x", TensorType((1024, 64), DType.F16))
    y = graph.add(pw("add"), graph.add(MatMul(), x, weights(64, 1024)), weights(1024))
    a, b = (graph.add(Slice((0, i * 512), (1024, 512), (1, 1)), y) for i in (0, 1))
    z = graph.add(pw("mul"), a, graph.add(pw("gelu"), b))
    graph.set_outputs([graph.add(MatMul(), z, weights(512, 512))])
    return partition(graph, LowersJudge(), load("h200"))


def forms_of(found: Program) -> dict[str, tuple[Part, ...]]:
    """Return the choice in which a kernel multiplies before the second product."""
    step = next(s for s in found.steps if s.kind is Kind.CUDNN and s.nodes[0].op.name == "mul")
    return {step_key(found.graph, step): (Part(1, "kernel"), Part(1))}


@pytest.mark.parametrize("apart_us", [9.0, 11.0])
def test_the_kernel_of_a_squeeze_excite_multiplies_where_that_is_faster(apart_us: float) -> None:
    found, asked = program(), list[str]()
    known = {"slice": 2.0, "slice+gelu": 2.0, "mul+matmul": 6.0, "slice+slice+gelu+mul": apart_us - 5.0, "matmul": 5.0}

    def step_times_us(graph: Graph, steps: Sequence[Partition]) -> Sequence[float]:
        asked.extend(step.signature for step in steps)
        return [known[step.signature] for step in steps]

    forms = split_prologues(found, {}, lambda tried: apply_choices(found, tried, FIGURES), step_times_us)
    assert sorted(asked) == sorted(known)
    assert forms == (forms_of(found) if apart_us < 10.0 else {})


def _nothing_to_try(tried: object) -> Program:
    raise AssertionError("nothing is to be tried")


def _nothing_to_time(graph: Graph, steps: Sequence[Partition]) -> Sequence[float]:
    raise AssertionError("nothing is to be timed")


def test_steps_that_are_already_split_are_left_alone() -> None:
    found = program()
    assert split_prologues(found, forms_of(found), _nothing_to_try, _nothing_to_time) == {}


def test_a_residual_that_is_scaled_first_is_no_prologue() -> None:
    """The kernel that computes its bytes would write four times as many."""
    graph = Graph("g")
    x, z = (graph.add_input(name, TensorType((1024, 512), DType.I8)) for name in ("x", "z"))
    factor = graph.constant(np.float32(0.5))
    residual = graph.add(pw("mul"), graph.add(Cast(DType.F32), z), factor)
    sums = graph.add(MatMul(), x, graph.constant(np.ones((512, 512), np.int8)))
    graph.set_outputs([graph.add(pw("add"), graph.add(pw("mul"), graph.add(Cast(DType.F32), sums), factor), residual)])
    found = partition(graph, LowersJudge(), load("h200"))
    assert [step.signature for step in found.steps] == ["cast+mul+matmul+cast+mul+add"]
    assert split_prologues(found, {}, _nothing_to_try, _nothing_to_time) == {}
