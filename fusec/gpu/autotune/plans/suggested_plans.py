"""Let the plans that a lock file, a compiled file or another input shape suggests compete with each other alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusec.errors import ExecutionError
from fusec.gpu.autotune.cache.tuning_cache import TuningCache
from fusec.gpu.autotune.ranked_plans import Offer, RevivingPlanBench
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import Choice


class SuggestedPlansBench:
    """Bench on which only suggested plans compete.

    A plan is read if it is serialized, else built by name if it is precompiled. Plans are compared with each other, not
    with the reference.
    """

    def __init__(self, bench: RevivingPlanBench, cache: TuningCache):
        self._bench, self._cache = bench, cache
        self._named: dict[str, Sequence[Offer]] = {}  # by graph key

    def offers(self, graph: CudnnGraph) -> Sequence[Offer]:
        entries = self._cache.suggested(graph.key)
        if all(entry.blob is not None for entry in entries):
            return [Offer(place, entry.choice, True) for place, entry in enumerate(entries)]
        offered = self._all(graph)
        return [offer for offer in offered if offer.precompiled] or offered[:1]

    def _all(self, graph: CudnnGraph) -> Sequence[Offer]:
        """Return the suggested plans that exist on this GPU."""
        if graph.key not in self._named:
            choices = [entry.choice for entry in self._cache.suggested(graph.key)]
            self._named[graph.key] = self._bench.named(graph, choices)
        return self._named[graph.key]

    def expect(self, orders: Sequence[tuple[CudnnGraph, Offer]]) -> None:
        self._bench.expect(orders)

    def build(self, graph: CudnnGraph, offer: Offer) -> Any:
        wanted = offer.choice.identity
        blob = next((e.blob for e in self._cache.suggested(graph.key) if e.choice.identity == wanted), None)
        if blob is not None:
            try:
                return self._bench.revive(graph, blob)
            except ExecutionError as error:
                self._cache.drop(graph.key, offer.choice, str(error))
        here = next((o for o in self._all(graph) if o.choice.identity == wanted), None)
        if here is None:
            raise ExecutionError("cuDNN does not offer this plan on this GPU")
        return self._bench.build(graph, here)

    def time_us(self, graph: CudnnGraph, plan: Any) -> float:
        return self._bench.time_us(graph, plan)

    def once_us(self, graph: CudnnGraph, plan: Any) -> float:
        return self._bench.once_us(graph, plan)

    def error(self, graph: CudnnGraph, plan: Any, other: Any | None) -> float | None:
        return None if other is None else self._bench.error(graph, plan, other)

    def quarantine(self, graph: CudnnGraph, choice: Choice, reason: str) -> None:
        self._bench.quarantine(graph, choice, reason)
