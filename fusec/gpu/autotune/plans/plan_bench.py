"""Build plans on a GPU, time them, and compare their results on random data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import cudnn
import cupy
import numpy as np

from fusec.errors import ExecutionError
from fusec.gpu.autotune.ranked_plans import Offer
from fusec.gpu.cublaslt.algorithms import Blas, BlasPlan, is_algorithm
from fusec.gpu.cudnn.plans.built_plan import BuiltPlan, revive
from fusec.gpu.cudnn.plans.frontend_plans import FrontendPlans
from fusec.gpu.cudnn.plans.plan_list import DECLINED, compiles_slowly
from fusec.gpu.cudnn.worker_processes.build_pool import BuildPool
from fusec.gpu.measure.random_inputs import distance, poison, random_data
from fusec.gpu.measure.timer import Stopwatch, device_failure
from fusec.ir import Array
from fusec.lowering.cudnn_graph import CudnnGraph, CudnnTensor
from fusec.lowering.known_bugs import wrong_plan
from fusec.lowering.simulator import extent, simulate
from fusec.plans.engine_numbers import PYTHON_ENGINES
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import BLAS, Choice
from fusec.system.compile_timer import spent_on
from fusec.system.dataclass import dataclass

MAX_SIMULATED = 3e7  # multiplications: some tenths of a second in NumPy
SPARE_BYTES = 1 << 28  # free memory that plans leave to others
SURELY_FREE = 1 / 16  # part of the memory that was free, which still is
AnyPlan = BuiltPlan | BlasPlan


@dataclass(frozen=True)
class CudnnContext:
    """Context in which plans are built and timed on a GPU.

    handle: handle of cuDNN. stream: its stream, on which plans run
    stopwatch: times work on that stream
    kernel_cache: cuDNN's cache of kernels compiled at run time; with it, graphs without a precompiled plan are planned
        for all input shapes and share kernels
    plan_filter: the plans that may be used
    build_pool: worker processes that build the plans compiled at run time
    """

    handle: Any
    stream: Any
    stopwatch: Stopwatch
    kernel_cache: Any = None
    plan_filter: PlanFilter = field(default_factory=PlanFilter)
    build_pool: BuildPool | None = None


@dataclass(frozen=True)
class Quarantine:
    """Access to the plans never to use, by graph key: `reason` tells why one is in quarantine, `add` puts one there."""

    reason: Callable[[str, Choice], str | None]
    add: Callable[[str, Choice, str], None]


class GpuPlanBench:
    """Bench on the GPU of a cuDNN handle.

    footprint_bytes: memory that the whole model touches; it decides if a plan finds its operands in the L2 cache
    blas: cuBLASLt, whose plans are offered after cuDNN's; None for cuDNN alone
    """

    def __init__(
        self,
        context: CudnnContext,
        footprint_bytes: int,
        quarantine: Quarantine,
        blas: Blas | None,
    ):
        self._context, self._blas = context, blas
        self._handle, self._stream = context.handle, context.stream
        self._quarantine = quarantine
        self._footprint_bytes = footprint_bytes
        self._graph: CudnnGraph | None = None
        self._frontend = FrontendPlans(context.handle, context.kernel_cache, context.plan_filter, context.build_pool)
        self._data: dict[int, Array] = {}
        self._free_bytes = 0  # when it was last asked for
        self._reference: dict[CudnnTensor, Array] | None = None

    @spent_on("plans are listed")
    def offers(self, graph: CudnnGraph) -> Sequence[Offer]:
        """Return the plans for a graph that may be used: cuDNN's in its order, then cuBLASLt's.

        Raises ExecutionError if there is none.
        """
        offers: list[Offer] = []
        wrong = "it offers no plan"
        for place, (choice, precompiled) in enumerate(self._frontend.plans(graph)):
            reason = (
                wrong_plan(graph, choice.engine, dict(choice.knobs))
                or self._context.plan_filter.reason(choice.engine)
                or self._quarantine.reason(graph.key, choice)
            )
            if reason is not None or choice.engine >= PYTHON_ENGINES:
                wrong = reason or wrong
                continue
            offers.append(Offer(place, choice, precompiled, compiles_slowly(graph, choice.engine)))
        others = [] if self._blas is None else self._blas.offers(graph)
        reason = self._context.plan_filter.reason
        others = [choice for choice in others if reason(choice.engine, choice.workspace_bytes) is None]
        sound = [choice for choice in others if self._quarantine.reason(graph.key, choice) is None]
        offers += [Offer(place, choice, True) for place, choice in enumerate(sound)]
        if not offers:
            raise ExecutionError(f"cuDNN has no plan on this GPU for\n{graph}\n{wrong}")
        return offers

    @spent_on("plans are listed")
    def named(self, graph: CudnnGraph, choices: Sequence[Choice]) -> Sequence[Offer]:
        """Return the plans of these engines and knobs, without cuDNN's list, which takes longer than to build them.

        Plans that cuDNN refuses or the filter leaves out are not among them.
        """
        offers: list[Offer] = []
        for choice in choices:
            if choice.engine == BLAS:
                offers.append(Offer(0, choice, True))
            elif not (
                wrong_plan(graph, choice.engine, dict(choice.knobs)) or self._context.plan_filter.reason(choice.engine)
            ):
                try:
                    _, place = self._frontend.create(graph, choice)
                except ExecutionError:  # cuDNN declines the graph
                    return ()
                except DECLINED:  # also where the frontend does not know a knob of cuDNN
                    continue
                offers.append(Offer(place, choice, self._frontend.is_precompiled(graph, place)))
        return offers

    def expect(self, orders: Sequence[tuple[CudnnGraph, Offer]]) -> None:
        if self._context.build_pool is not None:
            self._context.build_pool.expect([(graph, offer.choice) for graph, offer in orders if not offer.precompiled])

    @spent_on("plans are built")
    def build(self, graph: CudnnGraph, offer: Offer) -> AnyPlan:
        if offer.choice.engine == BLAS:
            return self._library().build(graph, offer.choice)
        blob = (
            None
            if self._context.build_pool is None or offer.precompiled
            else self._context.build_pool.plan(graph, offer.choice)
        )
        if blob is not None:
            return self.revive(graph, blob)
        pygraph, place = self._frontend.find(graph, offer.choice)
        try:
            pygraph.build_plan_at_index(place)
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as error:
            raise ExecutionError(str(error)) from error
        workspace_bytes = int(pygraph.get_workspace_size_plan_at_index(place))
        self._require_workspace(workspace_bytes)
        return BuiltPlan(pygraph, place, workspace_bytes, _scalars(graph))

    def _require_workspace(self, workspace_bytes: int) -> None:
        """Raise ExecutionError for a workspace that exceeds the caller's limit, or the free memory."""
        limit = self._context.plan_filter.workspace_limit
        if limit is not None and workspace_bytes > limit:
            raise ExecutionError(f"a workspace of {workspace_bytes} bytes, workspace_limit is {limit}")
        # Asking for the free memory takes long while other processes create contexts. It may shrink after it was asked
        # for, but not to a small part.
        if workspace_bytes <= self._free_bytes * SURELY_FREE:
            return
        free, _ = cupy.cuda.runtime.memGetInfo()
        self._free_bytes = free = free + cupy.get_default_memory_pool().free_bytes()
        if workspace_bytes > max(free - SPARE_BYTES, 0):
            raise ExecutionError(f"a workspace of {workspace_bytes >> 20} MB, {free >> 20} MB are free")

    def _library(self) -> Blas:
        if self._blas is None:
            raise ExecutionError("cuBLASLt is not available")
        return self._blas

    def revive(self, graph: CudnnGraph, blob: bytes) -> AnyPlan:
        """Read a serialized plan of a graph, which takes milliseconds. Only for a blob that is trusted.

        Raises ExecutionError if cuDNN does not accept it.
        """
        if is_algorithm(blob):
            return self._library().revive(graph, blob)
        plan = revive(blob, self._handle)
        workspace_bytes = int(plan.get_workspace_size())
        self._require_workspace(workspace_bytes)
        return BuiltPlan(plan, 0, workspace_bytes, _scalars(graph), blob)

    def serialized(self, plan: AnyPlan) -> bytes | None:
        """Serialize a plan, with its kernel if that serves all input shapes."""
        if isinstance(plan, BlasPlan) or plan.blob is not None:
            return plan.blob
        plan.pygraph.build_plan_at_index(plan.index)  # selects the plan, which is built already
        return bytes(plan.pygraph.serialize())

    def is_revived(self, plan: AnyPlan) -> bool:
        return not isinstance(plan, BlasPlan) and plan.blob is not None

    @spent_on("plans are timed")
    def time_us(self, graph: CudnnGraph, plan: AnyPlan) -> float:
        return self._context.stopwatch.within_us(self._ready_to_run(graph, plan), self._footprint_bytes)

    @spent_on("plans are timed")
    def once_us(self, graph: CudnnGraph, plan: AnyPlan) -> float:
        return self._context.stopwatch.us(self._ready_to_run(graph, plan))

    def _ready_to_run(self, graph: CudnnGraph, plan: AnyPlan) -> Callable[[], None]:
        """Return a function that runs a plan on random data."""
        self._load_data(graph)
        addresses, scratch = self._bound(plan, self._data)
        return lambda: self._run(plan, addresses, scratch)

    @spent_on("plans are compared")
    def error(self, graph: CudnnGraph, plan: AnyPlan, other: AnyPlan | None) -> float | None:
        self._load_data(graph)
        want = self._simulated() if other is None else self._results(other)
        return None if want is None else distance(self._results(plan), want)

    def quarantine(self, graph: CudnnGraph, choice: Choice, reason: str) -> None:
        self._quarantine.add(graph.key, choice, reason)

    def _load_data(self, graph: CudnnGraph) -> None:
        """Draw random data for a graph, and free that of the graph before."""
        if self._graph is not None and self._graph.key == graph.key:
            return
        self._graph, self._reference, self._data = None, None, {}
        with self._stream:
            self._data = {t.uid: random_data(t) for t in (*graph.inputs, *graph.outputs)}
        self._graph = graph

    def _bound(self, plan: AnyPlan, data: dict[int, Array]) -> tuple[dict[int, int], Array | None]:
        with self._stream:
            scratch = cupy.empty(plan.workspace_bytes, cupy.uint8) if plan.workspace_bytes else None
        return plan.addresses({uid: array.data.ptr for uid, array in data.items()}), scratch

    def _run(self, plan: AnyPlan, addresses: dict[int, int], scratch: Array | None) -> None:
        try:
            plan.execute(addresses, 0 if scratch is None else scratch.data.ptr, self._handle)
        except RuntimeError as error:
            raise device_failure(f"cuDNN failed to run it: {error}") from error

    def _results(self, plan: AnyPlan) -> dict[CudnnTensor, Array]:
        """Run a plan and return its outputs, in memory that was poisoned before."""
        assert self._graph is not None
        data = dict(self._data)
        with self._stream:
            for tensor in self._graph.outputs:
                data[tensor.uid] = cupy.empty(data[tensor.uid].size, cupy.uint8)
                poison(data[tensor.uid])
            addresses, scratch = self._bound(plan, data)
            self._run(plan, addresses, scratch)
            self._stream.synchronize()
        return {t: data[t.uid] for t in self._graph.outputs}

    def _simulated(self) -> dict[CudnnTensor, Array] | None:
        assert self._graph is not None
        if self._reference is None:
            if multiplications(self._graph) > MAX_SIMULATED:
                return None
            host = {t.uid: _typed(self._data[t.uid].get(), t) for t in self._graph.inputs}
            host |= {t.uid: _poison(t) for t in self._graph.outputs}
            simulate(self._graph, host)
            self._reference = {t: cupy.asarray(host[t.uid].view(np.uint8)) for t in self._graph.outputs}
        return self._reference


def _scalars(graph: CudnnGraph) -> dict[int, np.ndarray[Any, Any]]:
    return {t.uid: np.full(1, t.value, t.dtype.numpy) for t in graph.tensors if t.value is not None}


def multiplications(graph: CudnnGraph) -> float:
    """Estimate the multiplications of a graph."""
    total = float(sum(np.prod(t.dims) for t in graph.tensors))
    for call in graph.calls:
        if call.op in ("conv_fprop", "conv_dgrad"):
            total += float(np.prod(graph.tensor(call.outputs[0]).dims)) * float(
                np.prod(graph.tensor(call.inputs[1]).dims[1:])
            )
        if call.op == "conv_wgrad":
            loss, filters = graph.tensor(call.inputs[1]).dims, graph.tensor(call.outputs[0]).dims
            total += float(np.prod(loss)) * float(np.prod(filters[1:]))
        if call.op == "sdpa":
            q, k, v = (graph.tensor(uid).dims for uid in call.inputs[:3])
            total += float(np.prod(q[:3])) * k[2] * (q[3] + v[3])
        if call.op == "matmul":
            total += float(np.prod(graph.tensor(call.outputs[0]).dims)) * graph.tensor(call.inputs[0]).dims[-1]
    return total


def _poison(tensor: CudnnTensor) -> np.ndarray[Any, Any]:
    """Fill a buffer as `_results` does, because a tensor with gaps must leave the gaps alone."""
    return _typed(np.full(extent(tensor) * tensor.dtype.itemsize, 0xFF, np.uint8), tensor)


def _typed(raw: np.ndarray[Any, Any], tensor: CudnnTensor) -> np.ndarray[Any, Any]:
    return raw.view(tensor.dtype.numpy)
