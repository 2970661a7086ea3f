"""Test that a first run, a plan that failed, and the vote of a plan's own engine do not count."""

from __future__ import annotations

from typing import Any

import pytest
from gpu.autotune.plans.test_plan_search import Table, best, graph, one

from fusec.errors import ExecutionError
from fusec.gpu.autotune.plans.plan_search import TuningOptions, rank_plans
from fusec.gpu.autotune.ranked_plans import Offer
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import Choice


class Cold(Table):
    """The first run of each plan takes a hundred times as long."""

    def time_us(self, graph: CudnnGraph, plan: Any) -> float:
        warm = plan in self.__dict__.setdefault("warm", set())
        self.__dict__["warm"].add(plan)
        return super().time_us(graph, plan) * (1.0 if warm else 100.0)


def test_a_first_run_warms_a_plan_up() -> None:
    """With what it took, a plan would be hopeless before it is seen as it is."""
    table = Cold({1: [10.0] * 6}, noise=0.0)
    found = one(table)
    assert found.plans[0][0].time_us == pytest.approx(10.0)
    table = Cold({1: [10.0]}, noise=0.0)
    assert one(table, "quick").plans[0][0].time_us == pytest.approx(10.0)
    assert table.runs >= 3


def test_a_plan_that_fails_when_it_is_first_run_is_never_used_again() -> None:
    table = Table({1: [10.0, 20.0]}, fails={0: 1})
    found = one(table)
    assert best(found) == 1
    assert table.noted == ["0: the GPU reported an error"]
    assert found.rejected == ["engine 0 {2: 0}: the GPU reported an error"]


class Kin(Table):
    """Plans 0 and 1 are variants of one engine and share their mistake: they agree with each other alone."""

    def offers(self, graph: CudnnGraph) -> list[Offer]:
        return [Offer(i, Choice(min(i // 2, 2), ((2, i),)), True) for i in range(4)]

    def error(self, graph: CudnnGraph, plan: Any, other: Any | None) -> float | None:
        if other is None:
            return None
        return 1e-4 if (plan[1] < 2) == (other[1] < 2) else 0.5


def test_engines_vote_on_each_others_plans() -> None:
    table = Kin({1: [10.0, 12.0, 30.0, 40.0]}, noise=0.0)
    found = rank_plans({"a": graph(1)}, table, TuningOptions("full"), clock=lambda: 0.0)["a"]
    assert best(found) == 1, "of the two engines that which others agree with, though it is slower"
    assert len(table.noted) == 2


def test_a_table_says_what_fails() -> None:
    with pytest.raises(ExecutionError, match="the GPU reported an error"):
        Table({1: [10.0]}, fails={0: 1}).time_us(graph(1), (1, 0))
