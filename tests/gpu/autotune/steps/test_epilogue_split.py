"""Test that the kernel of a norm runs the epilogue of the product before it, if times say so."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from gpu.kernels.cases import FIGURES
from lowering.lowers_judge import LowersJudge

from fusec.gpu.autotune.step_choices import apply_choices, step_key
from fusec.gpu.autotune.steps.step_split import split_epilogues
from fusec.ir import Graph
from fusec.passes.partition import partition
from fusec.plans.plan_record import Part
from fusec.schedule.program import Partition, Program
from fusec.targets.target import load
from fusec.text import parse

IMAGE = "f16[4,16,8,8]{0,2,3,1}"
TEXT = f"""graph "g" (%dy: f16[4,8,8,8]{{0,2,3,1}}, %w: f16[8,16,1,1], %z: {IMAGE}, %y: {IMAGE}, %x: {IMAGE},
    %s: f32[16], %m: f32[16], %i: f32[16]) {{
  %c = conv_transpose(%dy, %w) {{strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1], output_padding=[0, 0], groups=1}}
  %a = add(%c, %z)
  %d = relu_backward(%a, %y)
  %dx, %ds, %db = batch_norm_backward(%d, %x, %s, %m, %i)
  return %dx, %ds, %db
}}"""


def program() -> Program:
    found = partition(parse(TEXT), LowersJudge(), load("h200"))
    assert [s.signature for s in found.steps] == ["conv_transpose+add+relu_backward", "batch_norm_backward"]
    return found


@pytest.mark.parametrize("apart_us", [9.0, 11.0])
def test_the_kernel_of_a_norm_runs_the_gradient_of_relu_where_that_is_faster(apart_us: float) -> None:
    found, asked = program(), list[str]()
    known = {
        "conv_transpose+add+relu_backward": 6.0,
        "batch_norm_backward": 4.0,
        "conv_transpose+add": apart_us - 5.0,
        "relu_backward+batch_norm_backward": 5.0,
    }

    def step_times_us(graph: Graph, steps: Sequence[Partition]) -> Sequence[float]:
        asked.extend(step.signature for step in steps)
        return [known[step.signature] for step in steps]

    forms = split_epilogues(found, {}, lambda tried: apply_choices(found, tried, FIGURES), step_times_us)
    assert sorted(asked) == sorted(known)
    work, norm = (step_key(found.graph, step) for step in found.steps)
    kernels = {work: (Part(2), Part(1, "kernel")), norm: (Part(1, "kernel"),)}
    assert forms == (kernels if apart_us < 10.0 else {})
    steps = [step.signature for step in apply_choices(found, forms, FIGURES).steps]
    assert steps == sorted(known, key=list(known).index)[2:] if forms else steps == list(known)[:2]


def test_steps_that_already_run_otherwise_are_left_alone() -> None:
    found = program()
    work = step_key(found.graph, found.steps[0])

    def replace_steps(tried: object) -> Program:
        raise AssertionError("nothing is to be tried")

    def step_times_us(graph: Graph, steps: Sequence[Partition]) -> Sequence[float]:
        raise AssertionError("nothing is to be timed")

    assert split_epilogues(found, {work: (Part(1), Part(0, "kernel"))}, replace_steps, step_times_us) == {}
