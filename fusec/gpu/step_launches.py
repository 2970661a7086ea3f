"""Launch a step on the GPU: bind a cuDNN graph to its plan, another step to its kernel or to cuBLASLt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from fusec.errors import ExecutionError
from fusec.gpu import kernels
from fusec.gpu.autotune.plans.plan_bench import AnyPlan
from fusec.gpu.autotune.plans.plan_selection import PlanSelector
from fusec.gpu.autotune.plans.product_selection import ProductSelector
from fusec.gpu.cublaslt.lone_matmul import buffers_of, lone_product
from fusec.gpu.launch.cuda_graph import StepLaunch
from fusec.gpu.launch.kernel_launcher import Launcher, Memory
from fusec.gpu.launch.workspace import Workspace
from fusec.ir import Array
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.schedule.program import Partition
from fusec.system.dataclass import dataclass


@dataclass
class StepLaunches:
    """Plans, kernels and products of a program, which run over memory that a caller gives.

    products: chooses the algorithms of products that cuDNN refuses; None where cuBLASLt is not installed
    """

    plans: PlanSelector
    launcher: Launcher
    figures: kernels.GpuFigures
    products: ProductSelector | None
    workspace: Workspace
    _lone: set[Partition] = field(default_factory=set[Partition])

    def bind(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> StepLaunch:
        """Return a function that runs a graph over buffers, by uid."""
        return self._launch(self.plans.plan(graph.key), graph, buffers)

    def _launch(self, plan: AnyPlan, graph: CudnnGraph, buffers: Mapping[int, Array]) -> StepLaunch:
        handle, workspace = self.plans.context.handle, self.workspace.address()
        addresses = plan.addresses({uid: array.data.ptr for uid, array in buffers.items()})
        held = list(buffers.values())  # `run` holds them, because it has only their addresses

        def run() -> None:
            try:
                plan.execute(addresses, workspace(), handle)
            except RuntimeError as error:
                raise ExecutionError(f"cuDNN failed to run\n{graph} over {len(held)} buffers\n{error}") from error

        return StepLaunch(run, plan.workspace_bytes, blocks_meet=graph.blocks_meet)

    def kernel(self, step: Partition) -> kernels.Kernel | None:
        """Return the kernel of a step that is no cuDNN graph; None if no family has one."""
        return kernels.find(step.nodes, step.outputs, self.figures)

    def bind_kernel(self, step: Partition, memory: Memory) -> StepLaunch | None:
        """Return a function that runs a step by its kernel, or by cuBLASLt; None if neither can."""
        kernel = self.kernel(step)
        if kernel is None or not self.launcher.runs(kernel):
            return self._bind_product(step, memory)
        shares_scratch = self.launcher.fastest(kernel).scratch_bytes > 0
        return StepLaunch(self.launcher.bind(kernel, memory), shares_scratch=shares_scratch, is_kernel=True)

    def _bind_product(self, step: Partition, memory: Memory) -> StepLaunch | None:
        """Bind a product that cuDNN refuses, to run by cuBLASLt; None if that has no algorithm with right results."""
        lowered = None if self.products is None else lone_product(step)
        plan = None if self.products is None or lowered is None else self.products.plan(lowered.graph)
        if lowered is None or plan is None:
            return None
        self._lone.add(step)
        self.workspace.reserve(plan.workspace_bytes)
        return self._launch(plan, lowered.graph, buffers_of(step, lowered, memory))

    def library(self, work: CudnnGraph | Partition) -> str:
        """Name the library that runs a graph, or the kind of another step."""
        if isinstance(work, CudnnGraph):
            return self.plans.ranked[work.key].plans[0][0].library
        return "cublaslt" if work in self._lone else work.kind.value
