"""Test that no time goes to plans of graphs whose steps run far faster in another way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from gpu.autotune.candidates.test_step_candidates import compiled
from gpu.autotune.plans.test_plan_search import Table, best, graph
from gpu.kernels.cases import FIGURES
from gpu.stand_in_gpu import Machine
from gpu.test_backend import compiled as on_stand_in

from fusec.gpu.autotune.candidates.candidate_times import StepTuning, Timers, _rivals_us, choose_steps
from fusec.gpu.autotune.plans.plan_search import BEATEN, RivalTimes, TuningOptions, rank_plans
from fusec.gpu.autotune.plans.plan_timing import LOSING
from fusec.gpu.autotune.ranked_plans import RankedPlans
from fusec.gpu.kernels import Kernel
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_cache import PlanStore


def against(rival_us: float, table: Table) -> RankedPlans:
    """Rank the plans of one graph, whose step another way runs in `rival_us`."""
    options = TuningOptions("full")
    return rank_plans({"a": graph(1)}, table, options, rivals_us=lambda first_us: {"a": rival_us})["a"]


def test_no_other_plan_is_tried_if_the_first_is_far_slower_than_the_rival() -> None:
    table = Table({1: [10.0, 1.0]}, noise=0.0)
    found = against(10.0 / BEATEN - 0.1, table)
    assert table.built == [(1, 0)] and best(found) == 0
    assert found.is_beaten and not found.plans[0][0].complete, "so that another model tries the others"
    assert found.plans[0][0].error is None, "what does not run is not checked"
    assert table.expected[-2:] == [[], []], "no worker builds the others"
    assert best(against(10.0 / BEATEN + 0.1, Table({1: [10.0, 1.0]}, noise=0.0))) == 1


def test_plans_that_lose_are_not_timed_in_rounds() -> None:
    loses, wins = (Table({1: [10.0, 9.0, 9.5]}, noise=0.0) for _ in range(2))
    found = against(9.0 / LOSING - 0.1, loses)
    assert best(found) == 1 and found.is_beaten
    assert not found.plans[0][0].complete and found.plans[0][0].error is None
    other = against(9.0 / LOSING + 0.1, wins)
    assert best(other) == 1 and not other.is_beaten and other.plans[0][0].complete
    assert wins.runs >= loses.runs + 9


def test_a_plan_far_slower_than_the_rival_is_timed_by_single_runs_alone() -> None:
    table = Table({1: [100.0, 190.0]}, noise=0.0)
    against(51.0, table)
    assert table.singles == 5 and table.runs == 5 + 2, "the first plan is measured before its rival is"


def test_plans_that_are_clearly_slower_are_not_timed_in_rounds() -> None:
    table = Table({1: [10.0, 16.0]}, noise=0.0)
    rank_plans({"a": graph(1)}, table, TuningOptions("full"))
    assert table.runs - table.singles == 2 * 2 + 7


def test_rivals_are_timed_before_plans_that_workers_still_compile() -> None:
    table = Table({1: [10.0], 2: [10.0]}, noise=0.0, compiled=frozenset({0}))
    seen: list[tuple[int, int]] = []

    def rivals_us(first_us: Mapping[str, float]) -> Mapping[str, float]:
        seen.append((len(first_us), len(table.built)))
        return {}

    rank_plans({"a": graph(1), "b": graph(2)}, table, TuningOptions("full"), rivals_us=rivals_us)
    assert seen == [(0, 0), (2, 2)]
    rank_plans({"a": graph(1)}, table, TuningOptions("none"), rivals_us=rivals_us)
    assert len(seen) == 2, "nothing is timed"


def test_plans_that_compile_slowly_are_built_last_and_not_before_rivals_are_known() -> None:
    def table() -> Table:
        return Table({1: [1.0, 10.0, 9.0, 8.0]}, noise=0.0, compiled=frozenset(range(4)), slow=frozenset({0, 2}))

    free = table()
    assert best(against(100.0, free)) == 0
    assert [place for _, place in free.built] == [1, 3, 0, 2]
    assert free.expected[0] == [(1, 1), (1, 3)] and free.expected[1] == [(1, 3), (1, 0), (1, 2)]
    lost = table()
    against(1.0, lost)
    assert lost.built == [(1, 1)], "none that is slow to compile"
    untimed = table()
    rank_plans({"a": graph(1)}, untimed, TuningOptions("none"))
    assert untimed.built == [(1, 0)], "without timing, cuDNN's first plan runs"


def test_the_rival_of_a_graph_is_the_fastest_candidate_without_it() -> None:
    of = compiled(groups=4)
    rivals: dict[str, float] = {}
    timed: list[int] = []

    def graphs_us(graphs: Mapping[str, CudnnGraph], rivals_us: RivalTimes) -> dict[str, float]:
        rivals.update(rivals_us(dict.fromkeys(graphs, 50.0)))
        return dict.fromkeys(graphs, 50.0)

    def kernels_us(asked: Mapping[str, Kernel]) -> dict[str, float]:
        timed.append(len(asked))
        return {key: 3.0 if kernel.name.startswith("depthwise+") else 7.0 for key, kernel in asked.items()}

    choose_steps(of.program, StepTuning(True, 1.0, "quick", FIGURES), Timers(graphs_us, kernels_us))
    assert timed[0] > 1 and len(timed) == 1, "kernels are timed once"
    assert rivals and set(rivals.values()) == {3.0}, "the kernel of the whole step, without its launch"


@pytest.mark.parametrize("turn", [1, -1])
def test_a_graph_of_two_steps_has_the_slower_rival(turn: int) -> None:
    own, kernel = graph(1), Kernel("k", ())
    steps: list[list[list[CudnnGraph | Kernel]]] = [[[own], [kernel]], [[own], [kernel, kernel]]]
    assert _rivals_us(steps[::turn], {own.key: 50.0, kernel.key: 5.0}, 1.0) == {own.key: 11.0}


def test_a_graph_alone_has_no_rival() -> None:
    of = compiled()
    rivals: dict[str, float] = {}

    def graphs_us(graphs: Mapping[str, CudnnGraph], rivals_us: RivalTimes) -> dict[str, float]:
        rivals.update(rivals_us(dict.fromkeys(graphs, 50.0)))
        return dict.fromkeys(graphs, 50.0)

    choose_steps(of.program, StepTuning(True, 1.0, "none", FIGURES), Timers(graphs_us))
    assert rivals and set(rivals.values()) == {float("inf")}


@pytest.mark.parametrize(("later_us", "again"), [(0.001, False), (1e9, True)])
def test_a_graph_that_lost_is_searched_again_where_its_rival_is_slower(
    machine: Machine, tmp_path: Path, later_us: float, again: bool
) -> None:
    from fusec.gpu.backend import CudnnBackend

    plans = CudnnBackend("quick", store=PlanStore(tmp_path)).plans
    asked = {each.graph.key: each.graph for each in on_stand_in().lowered if each is not None}
    plans.times_us(asked, 0, lambda first_us: dict.fromkeys(asked, 0.001))
    (key,) = asked
    first = plans.ranked[key]
    assert first.is_beaten
    entry = plans.cache.entry(key)
    assert entry is not None and not entry.choice.complete
    plans.times_us(asked, 0, lambda first_us: dict.fromkeys(asked, later_us))
    assert (plans.ranked[key] is not first) == again
    plans.require(asked, 0)
    assert plans.ranked[key] is not first and not plans.ranked[key].is_beaten, "what runs is chosen among all plans"
    assert plans.choices()[key].complete
