"""Test that each cuDNN step has one of NVIDIA's four classes of engines, or `unknown`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from passes.partition.judges import AcceptAll

from fusec import driver
from fusec.diagnostics.explain import explain, with_chosen_plans
from fusec.diagnostics.explain.data import GENERIC, SINGLE, SPECIALISED, SPECIALISED_RUNTIME, UNKNOWN
from fusec.diagnostics.explain.engine_classes import class_of_step
from fusec.gpu.cudnn.legality.judges import RulesJudge
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.ir import Graph
from fusec.passes.partition import partition
from fusec.plans.plan_record import BLAS, Choice
from fusec.plans.verdict import PROPOSED, Legal, Plan, Verdict
from fusec.schedule.program import Program
from fusec.targets.target import load
from fusec.text import parse

CONV = "{strides=[1,1], pads=[1,1,1,1], dilations=[1,1]}"
WEIGHTS = f"""
  %w = constant [{", ".join(["0.5", "-1.0", "0.25"] * 192)}] : f16[8,8,3,3]
  %b = constant [{", ".join(["1.0", "2.0"] * 4)}] : f16[1,8,1,1]"""
TEXTS = {
    SINGLE: f"(%x: f16[1,8,6,6]) {{{WEIGHTS}\n  %y = conv(%x, %w) {CONV}",
    SPECIALISED: f"(%x: f16[1,8,6,6]) {{{WEIGHTS}\n  %c = conv(%x, %w) {CONV}\n  %d = add(%c, %b)\n  %y = relu(%d)",
    GENERIC: "(%x: f16[64,64], %z: f16[64,64]) {\n  %c = matmul(%x, %z)\n  %y = relu(%c)",
    SPECIALISED_RUNTIME: "(%q: f16[1,4,64,64], %k: f16[1,4,64,64], %v: f16[1,4,64,64]) {\n"
    "  %y = attention(%q, %k, %v) {scale=0.125, causal=false}",
}


def graph(engines: str) -> Graph:
    return parse(f'graph "g" {TEXTS[engines]}\n  return %y\n}}')


@pytest.mark.cudnn
@pytest.mark.parametrize("engines", TEXTS)
def test_cudnn_offers_engines_of_each_class(engines: str, asked_once: Oracle) -> None:
    compiled = driver.build(graph(engines), target="h200", precision="fp16", oracle=asked_once)
    found = explain(compiled.program, compiled.target, compiled.judge, cores=False)
    assert engines in {step.engine_class for step in found.steps if step.kind == "cudnn"}
    assert engines in str(found) and found.to_json()["engine_classes"][engines] >= 1


class Offers(AcceptAll):
    """Accepts everything, with these plans."""

    def __init__(self, *plans: Plan):
        super().__init__()
        self.answer = Legal(plans)

    def verdict(self, body: Graph) -> Verdict:
        return self.answer


COMPILED, SHIPPED = Plan(7, ((1, 2),), False, built=True), Plan(3, (), True)


def program(*plans: Plan) -> Program:
    return partition(graph(SPECIALISED), Offers(*plans), load("h200"))


def test_the_plan_that_runs_decides() -> None:
    """Untuned the first that cuDNN built, else the one that was chosen; a plan with other knobs tells of its engine."""
    offered = program(SHIPPED, COMPILED)
    (step,) = offered.steps
    assert class_of_step(step, step.verdict) == GENERIC, "the shipped plan was offered, and not built"
    assert class_of_step(step, step.verdict, Choice(3, ())) == SPECIALISED
    assert class_of_step(step, step.verdict, Choice(7, ((1, 9),))) == GENERIC
    assert class_of_step(step, step.verdict, Choice(4, ())) == UNKNOWN
    assert class_of_step(step, step.verdict, Choice(BLAS, ())) == ""
    found = explain(offered, load("h200"))
    assert found.engine_classes == {GENERIC: 1}
    assert with_chosen_plans(found, offered, None, {step: Choice(3, ())}).engine_classes == {SPECIALISED: 1}
    assert with_chosen_plans(found, offered, None, {}) == found


def test_nothing_is_reported_that_was_not_asked() -> None:
    (step,) = program().steps
    assert class_of_step(step, PROPOSED) == UNKNOWN
    assert class_of_step(step, None) == UNKNOWN
    without = replace(program(), steps=(replace(step, verdict=None),))
    assert explain(without, load("h200"), RulesJudge(True)).engine_classes == {UNKNOWN: 1}


def test_cudnn_is_asked_about_a_step_that_tuning_made() -> None:
    """Such a step has no verdict of its own."""
    (step,) = program(COMPILED).steps
    made = replace(program(COMPILED), steps=(replace(step, verdict=None),))
    judge = Offers(SHIPPED, COMPILED)
    found = explain(made, load("h200"), judge)
    assert found.engine_classes == {GENERIC: 1} and found.steps[0].plans == 2
    chosen = with_chosen_plans(found, made, judge, {made.steps[0]: Choice(3, ())})
    assert chosen.engine_classes == {SPECIALISED: 1}
