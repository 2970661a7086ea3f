"""Test that choices are transferred to another input shape whose program has the same steps, and to no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from gpu.autotune.candidates.test_step_candidates import CONV, TEXT
from gpu.kernels.cases import FIGURES
from lowering.lowers_judge import LowersJudge

from fusec.gpu.autotune.step_choices import TunedChoices, apply_choices, has_candidates, step_key
from fusec.gpu.autotune.steps.concat_choice import concat_choices, concats_in_place, copy_concats
from fusec.gpu.kernels import find
from fusec.gpu.shape_transfer.transfer_choices import TransferredChoices, transfer
from fusec.passes.base import Options
from fusec.passes.partition import partition
from fusec.passes.partition.concat_in_place import concat_in_place
from fusec.plans.plan_record import Part
from fusec.schedule.program import Kind, Program
from fusec.targets.target import load
from fusec.text import parse

CONCAT = """graph "g" (%x: f32[2,32,4,4]{0,2,3,1}) {
  %a = relu(%x) : f32[2,32,4,4]{0,2,3,1}
  %b = tanh(%a) : f32[2,32,4,4]{0,2,3,1}
  %c = concat(%a, %b) {axis=1} : f32[2,64,4,4]{0,2,3,1}
  %s = softmax(%c) {axis=1} : f32[2,64,4,4]{0,2,3,1}
  return %s
}"""


def program(batch: int, text: str = TEXT, **replaced: str) -> Program:
    text = text.replace("ATTRIBUTES", CONV.replace("GROUPS", "1")).replace("PER", "4").replace("[2,", f"[{batch},")
    for old, new in replaced.items():
        text = text.replace(old, new)
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((4, 4, 3, 3)), "b": rng.standard_normal((1, 4, 1, 1))}
    graph = parse(text, {name: array.astype(np.float32) for name, array in weights.items()})
    judge = LowersJudge()
    return concat_in_place(partition(graph, judge, load("h200")), judge, Options(), 16)


def tuned(before: Program, form: tuple[Part, ...], **more: Any) -> tuple[TunedChoices, Program]:
    """Return the choices of a program whose first step is fastest in that form."""
    step = next(step for step in before.steps if has_candidates(step))
    found = TunedChoices(
        before, {step_key(before.graph, step): form}, {}, concat_choices(concats_in_place(before), before), **more
    )
    return found, apply_choices(before, found.steps, FIGURES)


def shape(program: Program) -> list[tuple[Kind, int, tuple[str, ...]]]:
    return [(step.kind, len(step.nodes), step.spelling) for step in program.steps]


def test_choices_for_steps_are_transferred() -> None:
    found, ran = tuned(program(2), (Part(2, "cudnn"), Part(0, "kernel")), side_by_side=True)
    other = program(6)
    assert shape(ran) != shape(other)
    transferred = transfer(found, ran, other, FIGURES, False)
    assert transferred is not None
    assert shape(transferred.program) == shape(ran)
    assert transferred.program.graph.inputs[0].type.shape[0] == 6
    assert transferred.tuned.side_by_side
    assert list(transferred.tuned.steps.values()) == list(found.steps.values())
    assert transferred.tuned.steps.keys() != found.steps.keys(), "they are of another size"
    again = transfer(transferred.tuned, transferred.program, program(8), FIGURES, False)
    assert again is not None and shape(again.program) == shape(ran)


def test_variants_of_kernels_are_transferred() -> None:
    before, other = program(2), program(6)
    (kernel,) = (
        k for s in before.steps if s.kind is Kind.KERNEL and (k := find(s.nodes, s.outputs, FIGURES)) is not None
    )
    assert kernel.others
    found, ran = tuned(before, (Part(0, "cudnn"),))
    for way in (kernel, kernel.others[0]):
        transferred = transfer(replace(found, variants={kernel.key: way.key}), ran, other, FIGURES, False)
        assert isinstance(transferred, TransferredChoices)
        ((key, taken),) = transferred.variants.items()
        (same,) = (
            k for s in other.steps if s.kind is Kind.KERNEL and (k := find(s.nodes, s.outputs, FIGURES)) is not None
        )
        keys = [same.key, *(each.key for each in same.others)]
        assert (key, taken) == (same.key, keys[[kernel.key, *(o.key for o in kernel.others)].index(way.key)])


def test_choices_for_concats_are_transferred() -> None:
    before = program(2, CONCAT)
    in_place = concat_choices(concats_in_place(before), before)
    assert [each.in_place for each in in_place.values()] == [True]
    whole = transfer(
        TunedChoices(before, {}, {}, in_place), apply_choices(before, {}, FIGURES), program(6, CONCAT), FIGURES, False
    )
    assert whole is not None and any(step.kind is Kind.VIEW for step in whole.program.steps)
    works = concats_in_place(before)
    apart = copy_concats(before, set(works))
    found = TunedChoices(apart, {}, {}, concat_choices(works, apart))
    transferred = transfer(found, apply_choices(apart, {}, FIGURES), program(6, CONCAT), FIGURES, False)
    assert transferred is not None
    assert not any(step.kind is Kind.VIEW for step in transferred.program.steps)
    assert [each.in_place for each in transferred.tuned.concats.values()] == [False]


def test_a_program_with_other_steps_gets_no_transfer_and_stays_as_it_was() -> None:
    found, ran = tuned(program(2), (Part(2, "cudnn"), Part(0, "kernel")))
    for other in (program(6, relu="tanh"), program(6, CONCAT)):
        before = [value.type for value in other.graph.values()]
        assert transfer(found, ran, other, FIGURES, False) is None
        assert [value.type for value in other.graph.values()] == before
        other.verify()
    no_fit = replace(found, steps={key: (Part(9, "cudnn"), Part(0, "kernel")) for key in found.steps})
    other = program(6)
    assert transfer(no_fit, ran, other, FIGURES, False) is None
    other.verify()


POINTWISE = """graph "g" (%x: f32[2,64]) {
  %a = exp(%x) : f32[2,64]
  %b = softmax(%a) {axis=1} : f32[2,64]
  %c = exp(%b) : f32[2,64]
  return %c
}"""


def test_pointwise_steps_are_kernels_for_all_sizes() -> None:
    """Also where cuDNN was faster, because it would compile for each size."""
    before = program(2, POINTWISE)
    assert [step.kind for step in before.steps] == [Kind.CUDNN, Kind.KERNEL, Kind.CUDNN]
    found = TunedChoices(before, {}, {}, {})
    transferred = transfer(found, apply_choices(before, {}, FIGURES), program(6, POINTWISE), FIGURES, False)
    assert transferred is not None
    assert {step.kind for step in transferred.program.steps} == {Kind.KERNEL}
