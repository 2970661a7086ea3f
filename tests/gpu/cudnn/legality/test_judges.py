"""Test in which rounds cuDNN is asked about the bodies of candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fusec.gpu.cudnn.legality.judges import CudnnJudge
from fusec.ir import Graph
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.verdict import UNASKED, Legal, Verdict
from fusec.text import parse

PRODUCT = """graph "product" (%x: f16[1,64,64], %w: f16[1,64,64]) {
  %y = matmul(%x, %w)
  return %y
}"""
FUSED = """graph "fused" (%x: f16[1,64,64], %w: f16[1,64,64]) {
  %p = matmul(%x, %w)
  %y = relu(%p)
  return %y
}"""


class Oracle:
    """An oracle that has no time for graphs with an end."""

    def __init__(self) -> None:
        self.rounds: list[list[str]] = []

    def judge(self, graphs: Sequence[CudnnGraph], end: float) -> list[Verdict]:
        if graphs:
            self.rounds.append(["+".join(call.op for call in graph.calls) for graph in graphs])
        return [Legal(()) if end == float("inf") else UNASKED for _ in graphs]


@pytest.mark.parametrize(
    ("budget_s", "rounds", "last"),
    [
        (float("inf"), [["matmul+pointwise", "matmul"]], Legal(())),
        (0.0, [["matmul+pointwise", "matmul"]], Legal(())),
        (1e-9, [["matmul"], ["matmul+pointwise"]], UNASKED),
    ],
    ids=["no budget", "a budget that does not bound questions", "a budget"],
)
def test_all_are_asked_together_unless_a_budget_lets_products_go_first(
    budget_s: float, rounds: list[list[str]], last: Verdict
) -> None:
    oracle: Any = Oracle()
    bodies: list[Graph] = [parse(FUSED), parse(PRODUCT)]
    assert CudnnJudge(oracle, True).within(budget_s).judge(bodies) == [last, Legal(())]
    assert oracle.rounds == rounds
