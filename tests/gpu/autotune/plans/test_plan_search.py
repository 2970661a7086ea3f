"""Search plans on a bench that is a table of times: the best is found within the budget, and results are checked."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from fusec.errors import DeviceLostError, ExecutionError
from fusec.gpu.autotune.plans.plan_search import (
    QUICK_COMPILED,
    QUICK_PRECOMPILED,
    TuningOptions,
    rank_plans,
)
from fusec.gpu.autotune.ranked_plans import Offer, RankedPlans
from fusec.gpu.measure.tolerance import TOLERANCE
from fusec.ir import DType
from fusec.lowering.cudnn_graph import PORTS, CudnnCall, CudnnGraph, CudnnTensor
from fusec.plans.engine_numbers import GENERIC
from fusec.plans.plan_record import BLAS, Choice


def graph(size: int) -> CudnnGraph:
    tensors = tuple(CudnnTensor(uid, (1, 1, size), (size, size, 1), DType.F32) for uid in (1, 2))
    return CudnnGraph(tensors, (CudnnCall("pointwise", (1,), (2,), "relu"),))


@dataclass
class Table:
    """Plan i of a graph takes times[i] microseconds, give or take; strings are errors of building it."""

    times: Mapping[int, Sequence[float | str]]  # by the size of the graph
    noise: float = 0.02
    wrong: Mapping[int, float] = field(default_factory=dict[int, float])  # plan -> error
    reference: bool = True
    compiled: frozenset[int] = frozenset()
    slow: frozenset[int] = frozenset()  # to compile
    cost_s: float = 0.0
    now: float = 0.0
    built: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    runs: int = 0
    singles: int = 0  # of the runs, those timed alone
    noted: list[str] = field(default_factory=list[str])
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    fails: Mapping[int, int] = field(default_factory=dict[int, int])  # plan -> run from which on it fails
    expected: list[list[tuple[int, int]]] = field(default_factory=list[list[tuple[int, int]]])
    library: Sequence[float] = ()  # times of another library's plans, which follow cuDNN's
    engines: Mapping[int, int] = field(default_factory=dict[int, int])  # plan -> engine, if it is not the plan's number

    def offers(self, graph: CudnnGraph) -> Sequence[Offer]:
        times = self.times[graph.tensors[0].dims[-1]]
        if not times:
            raise ExecutionError("declined")
        choices = [Choice(self.engines.get(i, i), ((2, i),)) for i in range(len(times))]
        offers = [Offer(i, choice, i not in self.compiled, i in self.slow) for i, choice in enumerate(choices)]
        others = [Offer(len(times) + i, Choice(BLAS, ((0, i),)), True) for i in range(len(self.library))]
        return [*offers, *others]

    def expect(self, orders: Sequence[tuple[CudnnGraph, Offer]]) -> None:
        self.expected.append([(graph.tensors[0].dims[-1], offer.place) for graph, offer in orders])

    def build(self, graph: CudnnGraph, offer: Offer) -> Any:
        self.now += self.cost_s
        size = graph.tensors[0].dims[-1]
        time = [*self.times[size], *self.library][offer.place]
        if isinstance(time, str):
            raise ExecutionError(time)
        self.built.append((size, offer.place))
        return (size, offer.place)

    def time_us(self, graph: CudnnGraph, plan: Any) -> float:
        size, place = plan
        assert size == graph.tensors[0].dims[-1]
        self.runs += 1
        if self.fails.get(place, 1 << 30) <= self.runs:
            raise ExecutionError("the GPU reported an error")
        time = [*self.times[size], *self.library][place]
        assert not isinstance(time, str)
        outlier = 20.0 if self.rng.random() < 0.02 else 1.0
        return time * outlier * (1 + self.noise * self.rng.random())

    def once_us(self, graph: CudnnGraph, plan: Any) -> float:
        self.singles += 1
        return self.time_us(graph, plan)

    def error(self, graph: CudnnGraph, plan: Any, other: Any | None) -> float | None:
        mine = self.wrong.get(plan[1], 1e-4)
        if other is None:
            return mine if self.reference else None
        theirs = self.wrong.get(other[1], 1e-4)
        return max(mine, theirs)

    def quarantine(self, graph: CudnnGraph, choice: Choice, reason: str) -> None:
        self.noted.append(f"{choice.engine}: {reason}")


def best(tuned: RankedPlans) -> int:
    return tuned.plans[0][0].engine


def one(table: Table, level: str = "full", **options: Any) -> RankedPlans:
    known, budget_s = options.pop("known", None), options.pop("budget_s", float("inf"))
    assert not options
    given = TuningOptions(level, budget_s)
    return rank_plans({"a": graph(1)}, table, given, known, clock=lambda: table.now)["a"]


def test_the_fastest_plan_wins_despite_noise() -> None:
    for seed in range(10, 30):
        table = Table({1: [50.0, 11.0, 10.0, 700.0, 12.0, 30.0]}, rng=random.Random(seed))
        tuned = one(table)
        assert best(tuned) == 2
        choice = tuned.plans[0][0]
        assert choice.time_us == pytest.approx(10.0, rel=0.05)
        assert choice.complete and choice.error == 1e-4 and choice.knobs == ((2, 2),)
        times = [c.time_us or 0.0 for c, _ in tuned.plans]
        assert times == sorted(times)


def test_hopeless_plans_are_timed_only_a_few_times() -> None:
    table = Table({1: [10.0, *[1000.0] * 20]})
    one(table)
    assert table.singles <= 3 * 21
    assert table.runs - table.singles <= 2 + 7, "only the first plan is measured"


@pytest.mark.parametrize(("slow_us", "singles"), [(6000.0, 1), (1000.0, 2), (90.0, 3), (20.0, 2)])
def test_the_slower_a_plan_is_the_fewer_runs_show_it(slow_us: float, singles: int) -> None:
    table = Table({1: [10.0, slow_us]}, noise=0.0)
    one(table)
    assert table.singles == 2 + singles


class Disturbed(Table):
    """One run of the second plan takes twenty times as long."""

    disturbed, ran = 0, 0

    def time_us(self, graph: CudnnGraph, plan: Any) -> float:
        time_us = super().time_us(graph, plan)
        if plan[1] == 1:
            self.ran += 1
            time_us *= 20.0 if self.ran == 1 + self.disturbed else 1.0
        return time_us


@pytest.mark.parametrize("disturbed", range(5))
def test_one_disturbed_run_makes_no_plan_hopeless(disturbed: int) -> None:
    table = Disturbed({1: [100.0, 80.0]}, noise=0.0)
    table.disturbed = disturbed
    assert best(one(table)) == 1


class Overhead(Table):
    """A single run looks longer, by what an event costs."""

    def once_us(self, graph: CudnnGraph, plan: Any) -> float:
        return super().once_us(graph, plan) + 8.0


def test_the_cost_of_an_event_makes_no_short_plan_hopeless() -> None:
    assert best(one(Overhead({1: [2.0, 1.5]}, noise=0.0))) == 1


def test_level_none_uses_the_first_plan_that_builds() -> None:
    table = Table({1: ["no", 50.0, 10.0]})
    tuned = one(table, "none")
    assert best(tuned) == 1 and table.runs == 0
    assert tuned.rejected == ["engine 0 {2: 0}: no"]


def test_level_quick_tries_only_the_first_plans() -> None:
    table = Table({1: [float(50 - i) for i in range(40)]}, noise=0.0, compiled=frozenset({3, 5, 7, 39}))
    tuned = one(table, "quick")
    tried = {place for _, place in table.built}
    assert len(tried) == 1 + QUICK_PRECOMPILED + QUICK_COMPILED
    assert {3, 5} <= tried and not {7, 39} & tried
    assert tuned.plans[0][0].complete


@pytest.mark.parametrize(
    ("channels", "dtype", "first", "compiles"),
    [
        (64, DType.F16, 7, False),
        (64, DType.BF16, 7, False),
        (64, DType.F32, 7, True),
        (1, DType.F16, 7, True),  # one group for each channel
        (64, DType.F16, GENERIC, True),  # slower than engines compiled at run time
    ],
)
def test_level_quick_compiles_no_plan_of_a_convolution_with_precompiled_ones(
    channels: int, dtype: DType, first: int, compiles: bool
) -> None:
    shapes = {1: (1, 64, 8, 8), 2: (64, channels, 1, 1), 3: (1, 64, 8, 8)}
    tensors = tuple(CudnnTensor(uid, dims, (dims[1], 1, dims[1], dims[1]), dtype) for uid, dims in shapes.items())
    window = tuple((name, (size, size)) for name, size in zip(PORTS["conv_dgrad"][2], (0, 0, 1, 1), strict=True))
    convolution = CudnnGraph(tensors, (CudnnCall("conv_fprop", (1, 2), (3,), attributes=window),))
    for level in ("quick", "full"):
        table = Table({8: [10.0, 9.0, 8.0]}, noise=0.0, compiled=frozenset({1, 2}), engines={0: first})
        rank_plans({"a": convolution}, table, TuningOptions(level))
        assert {place for _, place in table.built} == ({0, 1, 2} if compiles or level == "full" else {0})
        assert (table.expected[0] == [(8, 0)]) == (level == "quick" and not compiles)


def test_level_quick_leaves_out_engines_whose_plans_are_far_slower() -> None:
    slow = {1: 7, 2: 7, 3: 7}
    table = Table({1: [10.0, 300.0, 290.0, 5.0, 12.0]}, engines=slow)
    assert best(one(table, "quick")) == 0
    assert {place for _, place in table.built} == {0, 1, 4}
    assert best(one(Table({1: [10.0, 300.0, 290.0, 5.0, 12.0]}, engines=slow))) == 7, "level full tries all"


def test_level_quick_goes_on_with_an_engine_that_has_one_good_plan() -> None:
    table = Table({1: [10.0, 13.0, 300.0, 5.0]}, engines={1: 7, 2: 7, 3: 7})
    assert best(one(table, "quick")) == 7 and (1, 3) in table.built


def test_level_quick_tries_each_plan_of_another_library() -> None:
    assert best(one(Table({1: [10.0]}, library=(300.0, 290.0, 5.0)), "quick")) == BLAS


def test_plans_to_build_are_announced() -> None:
    """First what each graph begins with, then what that is compared with, the slowest graph first; at last nothing."""
    table = Table({1: [10.0, 5.0, 9.0], 2: [100.0, 50.0]}, noise=0.0, compiled=frozenset({0, 1}))
    rank_plans({str(n): graph(n) for n in (1, 2)}, table, TuningOptions("quick"), clock=lambda: table.now)
    *_, first, rest, last = table.expected
    assert first == [(1, 0), (2, 0), (1, 2), (1, 1), (2, 1)] and rest == [(2, 1), (1, 2), (1, 1)] and last == []
    table.expected.clear()
    known = {"1": Choice(2, ((2, 2),), 0, 9.0, 1e-4)}
    rank_plans({"1": graph(1), "2": graph(2)}, table, TuningOptions("quick"), known=known, clock=lambda: table.now)
    assert table.expected[-3] == [(1, 2), (2, 0), (2, 1)], "what is known is compared with nothing"
    table.expected.clear()
    rank_plans({"1": graph(1)}, table, TuningOptions("none"), clock=lambda: table.now)
    assert table.expected[0] == [(1, 0)]


def test_graphs_whose_first_plan_is_compiled_meanwhile_come_last() -> None:
    table = Table({1: ["no", 5.0], 2: [3.0], 3: []})
    one, two = (Offer(0, Choice(0, ((2, 0),)), precompiled) for precompiled in (False, True))
    table.offers = lambda graph: {1: [one], 2: [two], 3: []}[graph.tensors[0].dims[-1]]
    table.times = {1: [5.0], 2: [3.0], 3: []}
    rank_plans({str(n): graph(n) for n in (1, 2, 3)}, table, TuningOptions("none"), clock=lambda: table.now)
    assert table.built == [(2, 0), (1, 0)]


def test_a_budget_gives_each_graph_a_plan_and_the_rest_to_the_slowest() -> None:
    table = Table({1: [10.0, 5.0], 2: [100.0, 50.0], 3: [30.0, 15.0]}, cost_s=1.0, noise=0.0)
    graphs = {str(n): graph(n) for n in (1, 2, 3)}
    tuned = rank_plans(graphs, table, TuningOptions("full", 3.5), clock=lambda: table.now)
    assert {key: best(t) for key, t in tuned.items()} == {"1": 0, "2": 1, "3": 0}
    assert {key: t.plans[0][0].complete for key, t in tuned.items()} == {"1": False, "2": True, "3": False}


def test_a_known_plan_is_built_and_not_timed() -> None:
    table = Table({1: [50.0, 10.0, 20.0]})
    known = Choice(2, ((2, 2),), 0, 20.0, 1e-4)
    tuned = one(table, known={"a": known})
    assert tuned.plans[0][0] == known and table.runs == 0 and table.built == [(1, 2)]


def test_an_incomplete_search_is_continued() -> None:
    table = Table({1: [50.0, 10.0, 20.0]})
    tuned = one(table, known={"a": Choice(2, ((2, 2),), 0, 20.0, 1e-4, complete=False)})
    assert best(tuned) == 1 and tuned.plans[0][0].complete


def test_a_known_plan_that_is_not_offered_is_replaced_by_timing() -> None:
    assert best(one(Table({1: [50.0, 10.0]}), known={"a": Choice(9, ((2, 9),))})) == 1


def test_a_wrong_plan_is_put_in_quarantine() -> None:
    table = Table({1: [50.0, 10.0, 20.0]}, wrong={1: 0.5})
    tuned = one(table)
    assert best(tuned) == 2
    assert table.noted == ["1: its results are off by 0.5"]
    assert any("off by 0.5" in line for line in tuned.rejected)


def test_nan_is_wrong() -> None:
    assert best(one(Table({1: [50.0, 10.0]}, wrong={1: float("nan")}))) == 0


def test_without_a_reference_plans_vote() -> None:
    table = Table({1: [50.0, 10.0, 20.0, 30.0]}, wrong={1: 0.5}, reference=False)
    assert best(one(table)) == 2
    healthy = Table({1: [50.0, 10.0, 20.0]}, wrong={2: 0.5}, reference=False)
    tuned = one(healthy)  # the second best is the odd one out
    assert best(tuned) == 1 and tuned.plans[0][0].error == 1e-4 <= TOLERANCE


def test_a_plan_that_fails_to_run_is_dropped() -> None:
    table = Table({1: [50.0, 10.0, 20.0]}, fails={1: 15})
    assert best(one(table)) == 2
    assert table.noted == ["1: the GPU reported an error"]


class Lost(Table):
    """Table whose plans cost the process its GPU where `fails` says so."""

    def time_us(self, graph: CudnnGraph, plan: Any) -> float:
        try:
            return super().time_us(graph, plan)
        except ExecutionError as error:
            raise DeviceLostError(str(error)) from error


@pytest.mark.parametrize("run", [2, 15])  # of the first timing, and of the rounds
def test_a_plan_that_costs_the_gpu_is_in_quarantine_for_the_next_process(run: int) -> None:
    table = Lost({1: [50.0, 10.0, 20.0]}, fails={1: run})
    with pytest.raises(DeviceLostError, match=r"engine 1.* in quarantine now: compile again in a new process"):
        one(table)
    assert table.noted == ["1: the GPU reported an error"]


def test_the_only_plan_is_checked_too() -> None:
    tuned = one(Table({1: [50.0]}, wrong={0: 0.9}))
    assert tuned.plans == [] and "off by 0.9" in tuned.rejected[0]


def test_a_graph_without_plans_comes_back_with_none() -> None:
    assert one(Table({1: []})).plans == []
    assert one(Table({1: ["no", "no"]})).rejected == ["engine 0 {2: 0}: no", "engine 1 {2: 1}: no"]


def test_progress_counts_up() -> None:
    seen: list[tuple[int, int]] = []
    table = Table({1: [10.0, 5.0], 2: [10.0]})
    rank_plans(
        {"a": graph(1), "b": graph(2)},
        table,
        TuningOptions("full", progress=lambda stage, done, total: seen.append((done, total))),
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_another_library_competes_and_is_found_again() -> None:
    bench = Table({1: [10.0] * 40}, library=[9.0, 5.0])
    tuned = rank_plans({"a": graph(1)}, bench, TuningOptions("quick"))["a"]
    assert tuned.plans[0][0].identity == (BLAS, ((0, 1),))
    assert len(bench.built) == 1 + QUICK_PRECOMPILED + 2, "it takes no place of cuDNN's"
    again = Table({1: [10.0] * 40}, library=[9.0, 5.0])
    for level in ("quick", "none"):
        known = {"a": tuned.plans[0][0]}
        assert (
            rank_plans({"a": graph(1)}, again, TuningOptions(level), known=known)["a"].plans[0][0] == tuned.plans[0][0]
        )
    assert again.built == [(1, 41), (1, 41)]


def test_a_tie_goes_to_cudnn() -> None:
    for theirs, engine in ((9.9, 1), (9.0, BLAS)):
        bench = Table({1: [12.0, 10.0]}, library=[theirs], noise=0.0)
        assert best(rank_plans({"a": graph(1)}, bench, TuningOptions("quick"))["a"]) == engine


def test_plans_of_one_library_do_not_confirm_each_other() -> None:
    class Lenient(Table):
        """Two plans that share a mistake agree."""

        def error(self, graph: CudnnGraph, plan: Any, other: Any | None) -> float | None:
            if other is None:
                return None
            return 1e-4 if (plan[1] >= 2) == (other[1] >= 2) else 0.5

    bench = Lenient({1: [10.0, 11.0]}, library=[5.0, 6.0, 7.0])
    tuned = rank_plans({"a": graph(1)}, bench, TuningOptions("full"))["a"]
    assert tuned.plans[0][0].engine == 0
    assert bench.noted == ["1048576: its results are off by 0.5"] * 3


def test_one_plan_of_each_engine_that_is_about_as_fast_stays() -> None:
    """Within the model, plans of an engine have the same fate, so several of them are no choice."""
    times = [10.0, 10.1, 10.2, 10.3, 10.4, 10.9, 13.0]
    table = Table({1: times}, noise=0.0, engines={**dict.fromkeys(range(5), 7), 5: 8, 6: 9})
    kept = [(choice.engine, choice.time_us) for choice, _ in one(table).plans]
    assert kept == [(7, 10.0), (7, 10.1), (7, 10.2), (8, 10.9)]


def test_plans_that_workers_compile_are_timed_after_all_others() -> None:
    """So that nothing waits for the workers while other plans could be timed."""
    table = Table({1: [100.0, 90.0, 80.0], 2: [50.0, 40.0, 30.0]}, noise=0.0, compiled=frozenset({1}))
    ranked = rank_plans({str(size): graph(size) for size in (1, 2)}, table, TuningOptions("quick"))
    assert table.built == [(1, 0), (2, 0), (1, 2), (2, 2), (1, 1), (2, 1)]
    assert [ranked[key].plans[0][0].engine for key in ("1", "2")] == [2, 2]
    assert all(choice.complete for result in ranked.values() for choice, _ in result.plans)
