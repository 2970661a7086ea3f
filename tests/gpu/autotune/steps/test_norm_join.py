"""Test that a kernel runs a norm in training together with the ops before it, if times say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from gpu.kernels.cases import FIGURES
from lowering.lowers_judge import LowersJudge

from fusec.gpu.autotune.step_choices import StepChoice, apply_choices, step_key
from fusec.gpu.autotune.steps.step_split import join_norms
from fusec.ir import Graph
from fusec.passes.partition import partition
from fusec.plans.plan_record import Part
from fusec.schedule.program import Partition, Program
from fusec.targets.target import load
from fusec.text import parse

IMAGE = "f16[4,16,8,8]{0,2,3,1}"
TEXT = f"""graph "g" (%dy: {IMAGE}, %y: {IMAGE}, %x: {IMAGE}, %s: f32[16], %m: f32[16], %i: f32[16]) {{
  %d = relu_backward(%dy, %y)
  %dx, %ds, %db = batch_norm_backward(%d, %x, %s, %m, %i)
  return %d, %dx, %ds, %db
}}"""
ALONE = TEXT.replace("%d = relu_backward(%dy, %y)", "%d = reshape(%dy) {shape=[4,16,8,8]}")
APART = {"relu_backward": 6.0, "batch_norm_backward": 4.0}


def program(text: str = TEXT) -> Program:
    return partition(parse(text), LowersJudge(), load("h200"))


def joined(found: Program, known: Mapping[str, float], chosen: Mapping[str, StepChoice]) -> dict[str, StepChoice]:
    def step_times_us(graph: Graph, steps: Sequence[Partition]) -> Sequence[float]:
        assert sorted(step.signature for step in steps) == sorted(known)
        return [known[step.signature] for step in steps]

    return join_norms(found, chosen, lambda tried: apply_choices(found, tried, FIGURES), step_times_us)


@pytest.mark.parametrize("together_us", [9.0, 11.0])
def test_a_kernel_runs_the_norm_and_the_op_before_it_where_that_is_faster(together_us: float) -> None:
    found, both = program(), "relu_backward+batch_norm_backward"
    assert [step.signature for step in found.steps] == list(APART)
    forms = joined(found, {**APART, both: together_us}, {})
    norm = step_key(found.graph, found.steps[1])
    assert forms == ({norm: (Part(1, "kernel"),)} if together_us < 10.0 else {})
    steps = [step.signature for step in apply_choices(found, forms, FIGURES).steps]
    assert steps == ([both] if forms else list(APART))


@pytest.mark.parametrize("together_us", [13.0, 15.0])
def test_a_kernel_runs_both_norms_of_a_sum_where_that_is_faster(together_us: float) -> None:
    second = f"%z: {IMAGE}, %t: f32[16]) {{"
    text = TEXT.replace("%i: f32[16]) {", f"%i: f32[16], {second}")
    text = text.replace("  return %d, ", "  %e, %f, %g = batch_norm_backward(%d, %z, %t, %m, %i)\n  return %e, %f, ")
    found, both = program(text), "relu_backward+batch_norm_backward+batch_norm_backward"
    assert len(found.steps) == 3
    known = {**APART, both: together_us}

    def step_times_us(graph: Graph, steps: Sequence[Partition]) -> Sequence[float]:
        assert {step.signature for step in steps} == set(known)
        return [known[step.signature] for step in steps]

    forms = join_norms(found, {}, lambda tried: apply_choices(found, tried, FIGURES), step_times_us)
    steps = [step.signature for step in apply_choices(found, forms, FIGURES).steps]
    assert steps == ([both] if together_us < 14.0 else ["relu_backward", *["batch_norm_backward"] * 2])


def test_a_norm_that_a_kernel_runs_already_is_not_timed() -> None:
    found = program()
    norm = step_key(found.graph, found.steps[1])
    assert joined(found, {}, {norm: (Part(1, "kernel"),)}) == {}


def test_a_norm_without_an_op_to_take_is_not_timed() -> None:
    found = program(ALONE)
    assert "batch_norm_backward" in [step.signature for step in found.steps]
    assert joined(found, {}, {}) == {}
