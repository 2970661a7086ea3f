"""Which plan runs each cuDNN graph on this GPU: one that is kept or was named, else built, and measured."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fusec.errors import ExecutionError
from fusec.gpu.autotune.plan_bench import AnyPlan, GpuLaboratory
from fusec.gpu.autotune.plan_search import Tuned, tune
from fusec.gpu.autotune.tuning_cache import Carried, Kept
from fusec.gpu.cublaslt.algorithms import Blas
from fusec.gpu.cudnn.build_pool import Builders
from fusec.gpu.launch.stream_calls import out_of_memory
from fusec.gpu.measure.timer import Stopwatch
from fusec.gpu.measure.tolerance import TOLERANCE
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import BLAS, Choice, Entry
from fusec.system.compile_timer import spent_on


class Plans:
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
        kept: Kept,
        level: str,
        budget_s: float,
        progress: Callable[[str, int, int], None] | None,
        blas: Blas | None,
        named: bool,
        kernels: Any,
        deterministic: bool,
        builders: Builders | None,
    ):
        self.kept, self.tuned = kept, dict[str, Tuned]()
        self.footprint_bytes = 0  # of the model whose graphs came last
        self._handle, self._stream, self._stopwatch = handle, stream, stopwatch
        self._tune, self._budget_s, self._progress = level, budget_s, progress
        self._blas, self._competes = blas, level != "none" or named
        self._kernels, self._deterministic, self._builders = kernels, deterministic, builders
        self._chosen_again: set[str] = set()

    def unkept(self, graphs: Mapping[str, CudnnGraph]) -> dict[str, CudnnGraph]:
        """Those of the graphs for which no serialized plan is kept."""
        entries = {key: self.kept.entry(key) for key in graphs}
        return {key: graph for key, graph in graphs.items() if (entry := entries[key]) is None or entry.blob is None}

    def receive(self, arriving: Iterable[tuple[CudnnGraph, Entry]]) -> dict[str, Entry]:
        """Take plans that another process of this machine just built, where no others are known: revived as they come,
        then kept, all at once."""
        received: dict[str, Entry] = {}
        with out_of_memory("reviving plans"), self._stream:
            lab = self._laboratory(0)
            for graph, entry in arriving:
                received[graph.key] = entry
                known = self.kept.entry(graph.key)
                other = known is not None and known.choice.identity != entry.choice.identity
                wrong = self.kept.wrong(graph.key, entry.choice) is not None
                if entry.blob is not None and not other and not wrong and graph.key not in self.tuned:
                    try:
                        plan = lab.revive(graph, entry.blob)
                    except ExecutionError:  # it is tried once more, and then built, when its turn comes
                        continue
                    self.tuned[graph.key] = Tuned(graph, [(entry.choice, plan)], revived=True)
        self.kept.take(received)
        return received

    def suggest(self, choices: Mapping[str, Choice]) -> None:
        """Take these plans of graphs, with `tune` none, where they are offered."""
        self.kept.suggest(choices)
        self._competes = self._competes or any(choice.engine == BLAS for choice in choices.values())

    def times_us(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int) -> dict[str, float]:
        """How long graphs take; those without a plan are left out. What is known from before is not built."""
        self.kept.distrust(graphs)
        known: dict[str, float] = {}
        for key in graphs:
            entry = self.kept.entry(key) if self._tune != "none" else None
            if entry is not None and self.kept.enough(entry) and entry.choice.time_us is not None:
                known[key] = entry.choice.time_us
        self.choose({key: graph for key, graph in graphs.items() if key not in known}, footprint_bytes)
        found = {key: self.tuned[key].time_us for key in graphs if key in self.tuned and self.tuned[key].plans}
        return {**known, **found}

    def choose(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int) -> None:
        """Revive or build plans of those graphs that have none yet, and time what has to be."""
        self.footprint_bytes = footprint_bytes
        missing = {key: graph for key, graph in graphs.items() if key not in self.tuned}
        if not missing:
            return
        self.kept.distrust(missing)

        def report(done: int, total: int) -> None:
            if self._progress is not None:
                self._progress("plans", done, total)

        with out_of_memory("choosing plans"), self._stream:
            lab = self._laboratory(footprint_bytes)
            self.tuned.update(self.kept.revived(missing, lab))
            missing = {key: graph for key, graph in missing.items() if key not in self.tuned}
            entries = {key: entry for key in missing if (entry := self.kept.entry(key)) is not None}
            tuned: dict[str, Tuned] = {}
            if self._tune == "quick":
                carried = {key: g for key, g in missing.items() if key not in entries and self.kept.carried(key)}
                tuned = tune(carried, Carried(lab, self.kept), "full", self._budget_s, progress=report)
                tuned = {key: result for key, result in tuned.items() if result.plans}
            enough = {key: self.kept.enough(entry) for key, entry in entries.items()}
            known = {key: replace(e.choice, complete=enough[key]) for key, e in entries.items()}
            untried = {*tuned, *(key for key, e in entries.items() if not e.choice.complete and enough[key])}
            rest = {key: graph for key, graph in missing.items() if key not in tuned}
            tuned |= tune(rest, lab, self._tune, self._budget_s, known, report)
        for key, result in tuned.items():
            if key in untried:  # there are plans that were not timed
                result.plans = [(replace(choice, complete=False), plan) for choice, plan in result.plans]
            if result.plans and self._tune != "none":
                self.kept.choose(key, result.plans[0][0])
        self.tuned.update(tuned)

    def require(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int) -> None:
        """A plan of each graph; ExecutionError if one has none."""
        self.choose(graphs, footprint_bytes)
        for key, graph in graphs.items():
            if not self.tuned[key].plans:
                reasons = "\n".join(self.tuned[key].rejected)
                raise ExecutionError(f"cuDNN built no plan on this GPU for\n{graph}\n{reasons}")

    def of_each_engine(self, graph: CudnnGraph, count: int) -> Iterator[tuple[Choice, AnyPlan]]:
        """Build the first plans of each engine that cuDNN offers for a graph; those that do not build are left out."""
        lab, tried = self._laboratory(0), Counter[int]()
        with self._stream:
            offers = lab.offers(graph)
        for offer in offers:
            tried[offer.choice.engine] += 1
            if tried[offer.choice.engine] > count:
                continue
            try:
                with self._stream:
                    plan = lab.build(graph, offer)
            except ExecutionError:
                continue
            yield offer.choice, plan

    def _laboratory(self, footprint_bytes: int) -> GpuLaboratory:
        kept = self.kept
        shared = (self._kernels, self._blas if self._competes else None, self._deterministic, self._builders)
        return GpuLaboratory(
            self._handle, self._stream, self._stopwatch, footprint_bytes, kept.wrong, kept.note, *shared
        )

    @spent_on("plans are kept")
    def keep(self, graphs: Iterable[CudnnGraph], footprint_bytes: int) -> None:
        """Keep the plans of these graphs that were built, as cuDNN serializes them."""
        built = [graph for graph in graphs if not self.tuned[graph.key].revived]
        if not built:
            return
        with out_of_memory("keeping plans"), self._stream:
            lab = self._laboratory(footprint_bytes)
            for graph in built:
                choice, plan = self.tuned[graph.key].plans[0]
                best = self._tune == "none" and not self.kept.carried(graph.key)  # else somebody named it
                self.kept.keep(graph, choice, plan, lab, best)

    def prefer(self, key: str, option: int) -> bool:
        """Take another plan of a graph from now on, unless it computes something else."""
        tuned = self.tuned[key]
        choice, plan = tuned.plans[option]
        with self._stream:
            error = self._laboratory(self.footprint_bytes).error(tuned.graph, plan, tuned.plans[0][1])
        if error is None or not error <= TOLERANCE:
            return False
        tuned.plans = [(replace(choice, error=error), plan), *(p for p in tuned.plans if p[1] is not plan)]
        self.kept.choose(key, tuned.plans[0][0])
        return True

    def give_up(self, graph: CudnnGraph, reason: str) -> bool:
        """Turn to the next plan of a graph, whose first one failed; False if there is none."""
        result = self.tuned[graph.key]
        choice, _ = result.plans.pop(0)
        what = choice.name
        if result.revived:  # perhaps it is not the engine's fault
            what = f"the serialized plan of {what}"
            self.kept.drop(graph.key, choice, reason)
        else:
            self.kept.note(graph.key, choice, reason)
        if not result.plans and (result.revived or graph.key not in self._chosen_again):
            if not result.revived:
                self._chosen_again.add(graph.key)
            del self.tuned[graph.key]
            self.choose({graph.key: graph}, self.footprint_bytes)
            result = self.tuned[graph.key]
        if result.plans:
            warnings.warn(f"{what} failed and gave way to the next plan: {reason}", stacklevel=2)
        return bool(result.plans)

    def plan(self, key: str) -> Any:
        """What runs a graph."""
        return self.tuned[key].plans[0][1]

    def workspace_bytes(self, graphs: Iterable[str]) -> int:
        """The most that one of their plans needs."""
        return max((self.plan(key).workspace_bytes for key in graphs), default=0)

    def choices(self) -> dict[str, Choice]:
        """What was chosen, by `CudnnGraph.key`."""
        return {key: result.plans[0][0] for key, result in self.tuned.items()}

    def entries(self, graphs: Iterable[str]) -> dict[str, Entry]:
        """The plans of graphs, by `CudnnGraph.key`, serialized where they can be."""
        found: dict[str, Entry] = {}
        for key in graphs:
            choice, plan = self.tuned[key].plans[0]
            known = self.kept.entry(key)
            same = known is not None and known.choice.identity == choice.identity
            found[key] = Entry(choice, plan.blob or (known.blob if same and known is not None else None))
        return found
