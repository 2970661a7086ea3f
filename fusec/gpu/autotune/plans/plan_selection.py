"""Choose the plan that runs each cuDNN graph on this GPU: a stored or named one, or one that is built and timed."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusec.errors import ExecutionError
from fusec.gpu.autotune.cache.tuning_cache import TuningCache
from fusec.gpu.autotune.plans.plan_bench import AnyPlan, CudnnContext, GpuPlanBench, Quarantine
from fusec.gpu.autotune.plans.plan_search import RivalTimes, TuningOptions, no_rivals, rank_plans
from fusec.gpu.autotune.plans.suggested_plans import SuggestedPlansBench
from fusec.gpu.autotune.ranked_plans import RankedPlans
from fusec.gpu.cublaslt.algorithms import Blas
from fusec.gpu.launch.stream_calls import out_of_memory
from fusec.gpu.measure.tolerance import TOLERANCE
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import BLAS, Choice, Entry
from fusec.system.compile_timer import spent_on


class PlanSelector:
    """Plans that were built for each graph, by `CudnnGraph.key`, the best first: `ranked`.

    cache: choices known before, and where new ones are stored
    blas: cuBLASLt; its plans compete when plans are timed, or when the cache names one of them
    """

    def __init__(self, context: CudnnContext, cache: TuningCache, options: TuningOptions, blas: Blas | None):
        self.context, self.cache, self.options = context, cache, options
        self.ranked = dict[str, RankedPlans]()
        self.footprint_bytes = 0  # of the model whose graphs came last
        self._level = options.level
        self._blas = blas
        self._blas_competes = options.level != "none" or cache.names_cublaslt
        self._chosen_again: set[str] = set()

    def without_blob(self, graphs: Mapping[str, CudnnGraph]) -> dict[str, CudnnGraph]:
        """Select the graphs without a serialized plan in the cache."""
        entries = {key: self.cache.entry(key) for key in graphs}
        return {key: graph for key, graph in graphs.items() if (entry := entries[key]) is None or entry.blob is None}

    def receive(self, arriving: Iterable[tuple[CudnnGraph, Entry]]) -> dict[str, Entry]:
        """Use plans that another process of this machine built, where no others are known, and store them."""
        received: dict[str, Entry] = {}
        with out_of_memory("reviving plans"), self.context.stream:
            bench = self._bench(0)
            for graph, entry in arriving:
                received[graph.key] = entry
                known = self.cache.entry(graph.key)
                other = known is not None and known.choice.identity != entry.choice.identity
                wrong = self.cache.quarantine_reason(graph.key, entry.choice) is not None
                if entry.blob is not None and not other and not wrong and graph.key not in self.ranked:
                    try:
                        plan = bench.revive(graph, entry.blob)
                    except ExecutionError:  # when the graph is chosen it is read again, and then built
                        continue
                    self.ranked[graph.key] = RankedPlans(graph, [(entry.choice, plan)], revived=True)
        self.cache.store_received(received)
        return received

    def suggest(self, choices: Mapping[str, Choice]) -> None:
        """Name plans of graphs; with level `none` they are used where cuDNN offers them."""
        self.cache.suggest(choices)
        self._blas_competes = self._blas_competes or any(choice.engine == BLAS for choice in choices.values())

    def times_us(
        self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int, rivals_us: RivalTimes = no_rivals
    ) -> dict[str, float]:
        """Time graphs, in microseconds; without those that have no plan. A graph with a stored time is not built.

        rivals_us: see `rank_plans`; the time of a graph that is far slower than its rival is not exact
        """
        self.cache.quarantine_known_wrong(graphs)
        known: dict[str, float] = {}
        for key in graphs:
            entry = self.cache.entry(key) if self._level != "none" else None
            if entry is not None and self.cache.is_enough(entry) and entry.choice.time_us is not None:
                known[key] = entry.choice.time_us
        self.choose({key: graph for key, graph in graphs.items() if key not in known}, footprint_bytes, rivals_us)
        found = {key: self.ranked[key].time_us for key in graphs if key in self.ranked and self.ranked[key].plans}
        return {**known, **found}

    def known_us(self, graph: CudnnGraph) -> float | None:
        """Return the time of a graph that was timed before, in this process or another; None for others."""
        ranked, entry = self.ranked.get(graph.key), self.cache.entry(graph.key)
        if ranked is not None and ranked.plans:
            return ranked.plans[0][0].time_us
        return None if entry is None else entry.choice.time_us

    def choose(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int, rivals_us: RivalTimes = no_rivals) -> None:
        """Read or build plans of the graphs that have none yet, and time those whose choice is open.

        A graph that was far slower than its rivals before is searched again if these are not.
        """
        self.footprint_bytes = footprint_bytes
        missing = {key: graph for key, graph in graphs.items() if key not in self.ranked}
        beaten = {key: graph for key, graph in graphs.items() if key not in missing and self.ranked[key].is_beaten}
        if beaten:
            rivals = rivals_us({key: self.ranked[key].time_us for key in graphs if key in self.ranked})
            missing |= {k: graph for k, graph in beaten.items() if rivals.get(k, math.inf) > self.ranked[k].rival_us}
        if not missing:
            return
        self.cache.quarantine_known_wrong(missing)

        with out_of_memory("choosing plans"), self.context.stream:
            bench = self._bench(footprint_bytes)
            revived = self.cache.revived(missing, bench)
            self.ranked.update(revived)
            missing = {key: graph for key, graph in missing.items() if key not in revived}
            entries = {key: entry for key in missing if (entry := self.cache.entry(key)) is not None}
            ranked: dict[str, RankedPlans] = {}
            if self._level == "quick":
                suggested = {k: g for k, g in missing.items() if k not in entries and self.cache.suggested(k)}
                ranked = rank_plans(
                    suggested, SuggestedPlansBench(bench, self.cache), replace(self.options, level="full")
                )
                ranked = {key: result for key, result in ranked.items() if result.plans}
            enough = {key: self.cache.is_enough(entry) for key, entry in entries.items()}
            known = {key: replace(e.choice, complete=enough[key]) for key, e in entries.items()}
            untried = {*ranked, *(key for key, e in entries.items() if not e.choice.complete and enough[key])}
            rest = {key: graph for key, graph in missing.items() if key not in ranked}
            ranked |= rank_plans(rest, bench, self.options, known, rivals_us=rivals_us)
        for key, result in ranked.items():
            if key in untried:  # some of its plans were not timed
                result.plans = [(replace(choice, complete=False), plan) for choice, plan in result.plans]
            if result.plans and self._level != "none":
                self.cache.store_choice(key, result.plans[0][0])
        self.ranked.update(ranked)

    def require(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int) -> None:
        """Choose a plan of each graph. Raises ExecutionError when a graph has none."""
        self.choose(graphs, footprint_bytes)
        for key, graph in graphs.items():
            if not self.ranked[key].plans:
                reasons = "\n".join(self.ranked[key].rejected)
                raise ExecutionError(f"cuDNN built no plan on this GPU for\n{graph}\n{reasons}")

    def of_each_engine(self, graph: CudnnGraph, count: int) -> Iterator[tuple[Choice, AnyPlan]]:
        """Build the first `count` plans of each engine that cuDNN offers, except those that do not build."""
        bench, tried = self._bench(0), Counter[int]()
        with self.context.stream:
            offers = bench.offers(graph)
        for offer in offers:
            tried[offer.choice.engine] += 1
            if tried[offer.choice.engine] > count:
                continue
            try:
                with self.context.stream:
                    plan = bench.build(graph, offer)
            except ExecutionError:
                continue
            yield offer.choice, plan

    def _bench(self, footprint_bytes: int) -> GpuPlanBench:
        quarantine = Quarantine(self.cache.quarantine_reason, self.cache.quarantine)
        return GpuPlanBench(self.context, footprint_bytes, quarantine, self._blas if self._blas_competes else None)

    @spent_on("plans are stored")
    def store(self, graphs: Iterable[CudnnGraph], footprint_bytes: int) -> None:
        """Store the plans of these graphs that were built, serialized, and record a plan of each engine."""
        graphs = list(graphs)
        self._store_built([graph for graph in graphs if not self.ranked[graph.key].revived], footprint_bytes)
        self.cache.record_engines({graph.key: self.ranked[graph.key].plans[0][0] for graph in graphs})

    def _store_built(self, built: Sequence[CudnnGraph], footprint_bytes: int) -> None:
        if not built:
            return
        with out_of_memory("storing plans"), self.context.stream:
            bench = self._bench(footprint_bytes)
            for graph in built:
                choice, plan = self.ranked[graph.key].plans[0]
                best = self._level == "none" and not self.cache.suggested(graph.key)  # a suggested one was named
                self.cache.store_plan(graph, choice, plan, bench, best)

    def prefer(self, key: str, option: int) -> bool:
        """Make another plan of a graph its first one; False if its results differ."""
        ranked = self.ranked[key]
        choice, plan = ranked.plans[option]
        with self.context.stream:
            error = self._bench(self.footprint_bytes).error(ranked.graph, plan, ranked.plans[0][1])
        if error is None or not error <= TOLERANCE:
            return False
        ranked.plans = [(replace(choice, error=error), plan), *(p for p in ranked.plans if p[1] is not plan)]
        self.cache.store_choice(key, ranked.plans[0][0])
        return True

    def give_up(self, graph: CudnnGraph, reason: str) -> bool:
        """Drop the first plan of a graph, which failed, and use the next; False if there is none."""
        result = self.ranked[graph.key]
        choice, _ = result.plans.pop(0)
        what = choice.name
        if result.revived:  # the serialized plan may be at fault, not the engine
            what = f"the serialized plan of {what}"
            self.cache.drop(graph.key, choice, reason)
        else:
            self.cache.quarantine(graph.key, choice, reason)
        if not result.plans and (result.revived or graph.key not in self._chosen_again):
            if not result.revived:
                self._chosen_again.add(graph.key)
            del self.ranked[graph.key]
            self.choose({graph.key: graph}, self.footprint_bytes)
            result = self.ranked[graph.key]
        if result.plans:
            warnings.warn(f"{what} failed, so the next plan is used: {reason}", stacklevel=2)
        return bool(result.plans)

    def plan(self, key: str) -> Any:
        """Return the plan that runs a graph."""
        return self.ranked[key].plans[0][1]

    def workspace_bytes(self, graphs: Iterable[str]) -> int:
        """Return the largest workspace that a plan of these graphs needs."""
        return max((self.plan(key).workspace_bytes for key in graphs), default=0)

    def choices(self) -> dict[str, Choice]:
        """Return the plan chosen for each graph, by `CudnnGraph.key`."""
        return {key: result.plans[0][0] for key, result in self.ranked.items()}

    def entries(self, graphs: Iterable[str]) -> dict[str, Entry]:
        """Return the plans of graphs, by `CudnnGraph.key`, serialized where cuDNN can."""
        found: dict[str, Entry] = {}
        for key in graphs:
            choice, plan = self.ranked[key].plans[0]
            known = self.cache.entry(key)
            same = known is not None and known.choice.identity == choice.identity
            found[key] = Entry(choice, plan.blob or (known.blob if same and known is not None else None))
        return found
