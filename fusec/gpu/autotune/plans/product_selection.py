"""Choose the algorithm of cuBLASLt for each product that cuDNN refuses: a stored one, or the fastest that is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.errors import ExecutionError
from fusec.gpu.autotune.plans.plan_bench import AnyPlan, GpuPlanBench, Quarantine
from fusec.gpu.autotune.plans.plan_check import reject_wrong_plans
from fusec.gpu.autotune.plans.plan_search import rank_plans
from fusec.gpu.autotune.plans.plan_selection import PlanSelector
from fusec.gpu.autotune.ranked_plans import Offer, RankedPlans
from fusec.gpu.cublaslt.algorithms import Blas
from fusec.gpu.launch.stream_calls import out_of_memory
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.system.compile_timer import spent_on


class ProductBench(GpuPlanBench):
    """Bench on which cuBLASLt's algorithms alone compete."""

    def offers(self, graph: CudnnGraph) -> Sequence[Offer]:
        limit, choices = self._context.plan_filter.workspace_limit, self._library().offers(graph)
        fitting = [choice for choice in choices if limit is None or choice.workspace_bytes <= limit]
        sound = [choice for choice in fitting if self._quarantine.reason(graph.key, choice) is None]
        return [Offer(place, choice, True) for place, choice in enumerate(sound)]

    def expect(self, orders: Sequence[tuple[CudnnGraph, Offer]]) -> None:
        """Announce nothing to the workers, because an algorithm is not built."""


class ProductSelector:
    """Plans of products that cuDNN refuses, each chosen when it is first asked for.

    plans: chooses the plans of cuDNN's graphs; its context, cache and tuning level apply here, too
    """

    def __init__(self, plans: PlanSelector, blas: Blas):
        self._plans, self._blas = plans, blas
        self._chosen = dict[str, AnyPlan | None]()  # by key of the graph

    def plan(self, graph: CudnnGraph) -> AnyPlan | None:
        """Return the plan that runs a product; None if no algorithm computes it right, or there is no room to try one.

        With level `none` nothing is timed: a stored algorithm runs it, or else the first one that is right.
        """
        if graph.key not in self._chosen:
            try:
                with out_of_memory("choosing products"), self._plans.context.stream:
                    self._chosen[graph.key] = self._choose(graph)
            except ExecutionError:  # out of memory
                self._chosen[graph.key] = None
        return self._chosen[graph.key]

    @spent_on("products are chosen")
    def _choose(self, graph: CudnnGraph) -> AnyPlan | None:
        cache, options = self._plans.cache, self._plans.options
        quarantine = Quarantine(cache.quarantine_reason, cache.quarantine)
        bench = ProductBench(self._plans.context, self._plans.footprint_bytes, quarantine, self._blas)
        offers, known = bench.offers(graph), cache.product(graph.key)
        for offer in offers:
            if known is not None and offer.choice.identity == known.identity:
                return bench.build(graph, offer)
        if options.level == "none":
            return _first_right(bench, graph, offers)
        result = rank_plans({graph.key: graph}, bench, replace(options, progress=None))[graph.key]
        if not result.plans:
            return None
        choice, plan = result.plans[0]
        if choice.complete:
            cache.store_product(graph.key, choice)
        return plan


def _first_right(bench: ProductBench, graph: CudnnGraph, offers: Sequence[Offer]) -> AnyPlan | None:
    """Return the first plan whose results are those of the reference, or that is too large to compare."""
    for offer in offers:
        try:
            result = RankedPlans(graph, [(offer.choice, bench.build(graph, offer))])
            reject_wrong_plans(bench, result)
        except ExecutionError:
            continue
        if result.plans:
            return result.plans[0][1]
    return None
