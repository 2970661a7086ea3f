"""Which plan runs each cuDNN graph on this GPU: one that is kept or was named, else built, and measured."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fusec.errors import ExecutionError
from fusec.gpu.autotune.plan_bench import AnyPlan, GpuPlanBench
from fusec.gpu.autotune.plan_search import RankedPlans, tune
from fusec.gpu.autotune.tuning_cache import SuggestedPlansBench, TuningCache
from fusec.gpu.cublaslt.algorithms import Blas
from fusec.gpu.cudnn.build_pool import BuildPool
from fusec.gpu.launch.stream_calls import out_of_memory
from fusec.gpu.measure.timer import Stopwatch
from fusec.gpu.measure.tolerance import TOLERANCE
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import BLAS, Choice, Entry
from fusec.system.compile_timer import spent_on


class PlanSelector:
    """Of each graph the plans that were built, by `CudnnGraph.key`, the best first: `tuned`.

    handle, stream: of cuDNN; all is built and measured on that stream. level, budget_s: see `plan_search`. progress:
    told the number of graphs whose plan is chosen. kept: what is known beforehand, and remembered. blas: a competitor,
    from the time that something is measured or one of its plans is named. kernels, deterministic, builders: see
    `plan_bench`.
    """

    def __init__(
        self,
        handle: Any,
        stream: Any,
        stopwatch: Stopwatch,
        kept: TuningCache,
        level: str,
        budget_s: float,
        progress: Callable[[str, int, int], None] | None,
        blas: Blas | None,
        named: bool,
        kernels: Any,
        deterministic: bool,
        builders: BuildPool | None,
    ):
        self.cache, self.ranked = kept, dict[str, RankedPlans]()
        self.footprint_bytes = 0  # of the model whose graphs came last
        self._handle, self._stream, self._stopwatch = handle, stream, stopwatch
        self._tune, self._budget_s, self._progress = level, budget_s, progress
        self._blas, self._competes = blas, level != "none" or named
        self._kernels, self._deterministic, self._builders = kernels, deterministic, builders
        self._chosen_again: set[str] = set()

    def without_blob(self, graphs: Mapping[str, CudnnGraph]) -> dict[str, CudnnGraph]:
        """Those of the graphs for which no serialized plan is kept."""
        entries = {key: self.cache.entry(key) for key in graphs}
        return {key: graph for key, graph in graphs.items() if (entry := entries[key]) is None or entry.blob is None}

    def receive(self, arriving: Iterable[tuple[CudnnGraph, Entry]]) -> dict[str, Entry]:
        """Take plans that another process of this machine just built, where no others are known: revived as they come,
        then kept, all at once."""
        received: dict[str, Entry] = {}
        with out_of_memory("reviving plans"), self._stream:
            bench = self._laboratory(0)
            for graph, entry in arriving:
                received[graph.key] = entry
                known = self.cache.entry(graph.key)
                other = known is not None and known.choice.identity != entry.choice.identity
                wrong = self.cache.wrong(graph.key, entry.choice) is not None
                if entry.blob is not None and not other and not wrong and graph.key not in self.ranked:
                    try:
                        plan = bench.revive(graph, entry.blob)
                    except ExecutionError:  # it is tried once more, and then built, when its turn comes
                        continue
                    self.ranked[graph.key] = RankedPlans(graph, [(entry.choice, plan)], revived=True)
        self.cache.take(received)
        return received

    def suggest(self, choices: Mapping[str, Choice]) -> None:
        """Take these plans of graphs, with `tune` none, where they are offered."""
        self.cache.suggest(choices)
        self._competes = self._competes or any(choice.engine == BLAS for choice in choices.values())

    def times_us(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int) -> dict[str, float]:
        """How long graphs take; those without a plan are left out. What is known from before is not built."""
        self.cache.distrust(graphs)
        known: dict[str, float] = {}
        for key in graphs:
            entry = self.cache.entry(key) if self._tune != "none" else None
            if entry is not None and self.cache.enough(entry) and entry.choice.time_us is not None:
                known[key] = entry.choice.time_us
        self.choose({key: graph for key, graph in graphs.items() if key not in known}, footprint_bytes)
        found = {key: self.ranked[key].time_us for key in graphs if key in self.ranked and self.ranked[key].plans}
        return {**known, **found}

    def choose(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int) -> None:
        """Revive or build plans of those graphs that have none yet, and time what has to be."""
        self.footprint_bytes = footprint_bytes
        missing = {key: graph for key, graph in graphs.items() if key not in self.ranked}
        if not missing:
            return
        self.cache.distrust(missing)

        def report(done: int, total: int) -> None:
            if self._progress is not None:
                self._progress("plans", done, total)

        with out_of_memory("choosing plans"), self._stream:
            bench = self._laboratory(footprint_bytes)
            self.ranked.update(self.cache.revived(missing, bench))
            missing = {key: graph for key, graph in missing.items() if key not in self.ranked}
            entries = {key: entry for key in missing if (entry := self.cache.entry(key)) is not None}
            tuned: dict[str, RankedPlans] = {}
            if self._tune == "quick":
                carried = {key: g for key, g in missing.items() if key not in entries and self.cache.carried(key)}
                tuned = tune(carried, SuggestedPlansBench(bench, self.cache), "full", self._budget_s, progress=report)
                tuned = {key: result for key, result in tuned.items() if result.plans}
            enough = {key: self.cache.enough(entry) for key, entry in entries.items()}
            known = {key: replace(e.choice, complete=enough[key]) for key, e in entries.items()}
            untried = {*tuned, *(key for key, e in entries.items() if not e.choice.complete and enough[key])}
            rest = {key: graph for key, graph in missing.items() if key not in tuned}
            tuned |= tune(rest, bench, self._tune, self._budget_s, known, report)
        for key, result in tuned.items():
            if key in untried:  # there are plans that were not timed
                result.plans = [(replace(choice, complete=False), plan) for choice, plan in result.plans]
            if result.plans and self._tune != "none":
                self.cache.choose(key, result.plans[0][0])
        self.ranked.update(tuned)

    def require(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int) -> None:
        """A plan of each graph; ExecutionError if one has none."""
        self.choose(graphs, footprint_bytes)
        for key, graph in graphs.items():
            if not self.ranked[key].plans:
                reasons = "\n".join(self.ranked[key].rejected)
                raise ExecutionError(f"cuDNN built no plan on this GPU for\n{graph}\n{reasons}")

    def of_each_engine(self, graph: CudnnGraph, count: int) -> Iterator[tuple[Choice, AnyPlan]]:
        """Build the first plans of each engine that cuDNN offers for a graph; those that do not build are left out."""
        bench, tried = self._laboratory(0), Counter[int]()
        with self._stream:
            offers = bench.offers(graph)
        for offer in offers:
            tried[offer.choice.engine] += 1
            if tried[offer.choice.engine] > count:
                continue
            try:
                with self._stream:
                    plan = bench.build(graph, offer)
            except ExecutionError:
                continue
            yield offer.choice, plan

    def _laboratory(self, footprint_bytes: int) -> GpuPlanBench:
        kept = self.cache
        shared = (self._kernels, self._blas if self._competes else None, self._deterministic, self._builders)
        return GpuPlanBench(
            self._handle, self._stream, self._stopwatch, footprint_bytes, kept.wrong, kept.note, *shared
        )

    @spent_on("plans are kept")
    def keep(self, graphs: Iterable[CudnnGraph], footprint_bytes: int) -> None:
        """Keep the plans of these graphs that were built, as cuDNN serializes them."""
        built = [graph for graph in graphs if not self.ranked[graph.key].revived]
        if not built:
            return
        with out_of_memory("keeping plans"), self._stream:
            bench = self._laboratory(footprint_bytes)
            for graph in built:
                choice, plan = self.ranked[graph.key].plans[0]
                best = self._tune == "none" and not self.cache.carried(graph.key)  # else somebody named it
                self.cache.keep(graph, choice, plan, bench, best)

    def prefer(self, key: str, option: int) -> bool:
        """Take another plan of a graph from now on, unless it computes something else."""
        tuned = self.ranked[key]
        choice, plan = tuned.plans[option]
        with self._stream:
            error = self._laboratory(self.footprint_bytes).error(tuned.graph, plan, tuned.plans[0][1])
        if error is None or not error <= TOLERANCE:
            return False
        tuned.plans = [(replace(choice, error=error), plan), *(p for p in tuned.plans if p[1] is not plan)]
        self.cache.choose(key, tuned.plans[0][0])
        return True

    def give_up(self, graph: CudnnGraph, reason: str) -> bool:
        """Turn to the next plan of a graph, whose first one failed; False if there is none."""
        result = self.ranked[graph.key]
        choice, _ = result.plans.pop(0)
        what = choice.name
        if result.revived:  # perhaps it is not the engine's fault
            what = f"the serialized plan of {what}"
            self.cache.drop(graph.key, choice, reason)
        else:
            self.cache.note(graph.key, choice, reason)
        if not result.plans and (result.revived or graph.key not in self._chosen_again):
            if not result.revived:
                self._chosen_again.add(graph.key)
            del self.ranked[graph.key]
            self.choose({graph.key: graph}, self.footprint_bytes)
            result = self.ranked[graph.key]
        if result.plans:
            warnings.warn(f"{what} failed and gave way to the next plan: {reason}", stacklevel=2)
        return bool(result.plans)

    def plan(self, key: str) -> Any:
        """What runs a graph."""
        return self.ranked[key].plans[0][1]

    def workspace_bytes(self, graphs: Iterable[str]) -> int:
        """The most that one of their plans needs."""
        return max((self.plan(key).workspace_bytes for key in graphs), default=0)

    def choices(self) -> dict[str, Choice]:
        """What was chosen, by `CudnnGraph.key`."""
        return {key: result.plans[0][0] for key, result in self.ranked.items()}

    def entries(self, graphs: Iterable[str]) -> dict[str, Entry]:
        """The plans of graphs, by `CudnnGraph.key`, serialized where they can be."""
        found: dict[str, Entry] = {}
        for key in graphs:
            choice, plan = self.ranked[key].plans[0]
            known = self.cache.entry(key)
            same = known is not None and known.choice.identity == choice.identity
            found[key] = Entry(choice, plan.blob or (known.blob if same and known is not None else None))
        return found
