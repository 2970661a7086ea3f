"""Test which answers of cuDNN a program may be stored by: those that hold the next time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import pytest

from fusec.gpu.cudnn.legality.judges import CudnnJudge, NoJudge, answers_last
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.ir import DType, Graph, TensorType
from fusec.ops import MatMul, pw
from fusec.passes.partition.strict_rounding import StrictRounding
from fusec.plans.verdict import UNASKED, Legal, Plan, Refused, Verdict


class Answers:
    """An oracle that gives one answer to all questions."""

    def __init__(self, verdict: Verdict):
        self.verdict = verdict

    def judge(self, graphs: Sequence[Any], end: float = math.inf) -> list[Verdict]:
        return [self.verdict for _ in graphs]


def judge(verdict: Verdict) -> CudnnJudge:
    return CudnnJudge(cast("Oracle", Answers(verdict)), True)


def body(op: Any = None) -> Graph:
    graph = Graph()
    x = graph.add_input("x", TensorType((16, 16), DType.F16))
    graph.set_outputs([graph.add(pw("relu"), graph.add(MatMul(), x, x)) if op is None else graph.add(op, x)])
    return graph


@pytest.mark.parametrize(
    ("verdict", "lasts"),
    [
        (Legal((Plan(1, (), True, 0, True),)), True),
        (Refused("plan", "CUDNN_STATUS_NOT_SUPPORTED", "no engine"), True),
        (Refused("validate", "FUSEC_HAZARD", "would crash"), True),
        (Refused("plan", "CUDNN_STATUS_ALLOC_FAILED", "no memory"), False),
        (Refused("crash", "FUSEC_WORKER_ENDED", "killed"), False),
        (UNASKED, False),
    ],
)
def test_answers_that_depend_on_the_state_of_the_machine_do_not_last(verdict: Verdict, lasts: bool) -> None:
    whole = judge(verdict)
    assert whole.within(math.inf).judge([body()]) == [verdict]
    assert answers_last(whole) is lasts, "also those that a judge with a budget got"
    assert answers_last(StrictRounding(whole)) is lasts


def test_what_fusec_refuses_by_itself_lasts() -> None:
    refused = judge(UNASKED)
    (verdict,) = refused.judge([body(pw("sin"))])
    assert isinstance(verdict, Refused) and verdict.stage == "lower"
    assert answers_last(refused)
    assert answers_last(NoJudge()) and answers_last(None)
