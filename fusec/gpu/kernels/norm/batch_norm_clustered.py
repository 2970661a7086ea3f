"""Generate batch norm in one launch whose blocks exchange their sums within clusters.

A cluster has all rows of a few channels. Its blocks write into each other's shared memory. A barrier in memory takes
longer, and so do sums that are read from there. Such a launch is not cooperative, so it may begin early.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, Filling, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import CLUSTERS, Arguments, Launch, ceil_div
from fusec.gpu.kernels.codegen.row_plan import RowPlan
from fusec.gpu.kernels.norm.batch_norm_streamed import BatchNormStreamed

CLUSTER = 8  # blocks: CUDA promises no larger clusters, whatever the GPU
LEAST_LANES = 2  # vectors of channels of a block, at least: memory is read by 32 bytes
DOOR_BYTES = 16  # for the barrier, before the sums that the blocks of a cluster send each other
THREADS = (512, 1024)  # of a block
_CUDA = cuda_template(__package__, "batch_norm_clustered.cuh")


def plan_clusters(plan: RowPlan, threads: int, figures: GpuFigures) -> RowPlan | None:
    """Adapt a plan to clusters that fill at least three quarters of the GPU; None if there are no such clusters.

    threads: threads of a block.
    """
    if plan.row or plan.vector == 1 or not figures.has(CLUSTERS) or figures.processors < CLUSTER:
        return None
    lanes = LEAST_LANES
    while ceil_div(plan.groups, lanes) * CLUSTER > figures.processors:
        lanes *= 2
    plan = replace(plan, lanes=lanes, threads=threads // lanes, chunks=CLUSTER, unrolled=1, whole=1)
    full = 4 * plan.blocks * CLUSTER >= 3 * figures.processors
    return plan if full and plan.threads * CLUSTER <= plan.count else None


@dataclass(frozen=True)
class BatchNormClustered(BatchNormStreamed):
    """One launch for a step, of clusters of blocks."""

    form: ClassVar[str] = "clustered"

    @property
    def exists(self) -> bool:
        return self.kind == "float" and super().exists

    @property
    def numbers(self) -> tuple[str, str]:
        return f"blockIdx.x / {self.sums.chunks}u", f"blockIdx.x % {self.sums.chunks}u"

    @property
    def _sent(self) -> int:
        """Bytes that a block is sent."""
        return 8 * self._own * self.sums.chunks

    @property
    def first_byte(self) -> int:
        return DOOR_BYTES + self._sent

    @property
    def scratch_bytes(self) -> int:
        return 0

    def _cluster_cuda(self, name: str, **holes: Filling) -> list[str]:
        plan = self.sums
        template: CudaTemplate = _CUDA.bind(BLOCK=plan.block, CHUNKS=plan.chunks, OWN=self._own)
        return template(name, **holes)

    def launches(self) -> tuple[Launch, ...]:
        plan, arguments = self.sums, Arguments()
        lines = self.resident_body(arguments)
        launch = arguments.early_launch(
            f"{self.name}_{self.form}", lines, plan.blocks * plan.chunks, plan.block, cluster=plan.chunks
        )
        return (replace(launch, resident_bytes=self.resident_bytes, architecture=CLUSTERS),)

    def place(self) -> list[str]:
        return [*super().place(), *self._cluster_cuda("cluster_memory", DOOR_BYTES=DOOR_BYTES, SENT=f"{self._sent}u")]

    def store_sums(self, arguments: Arguments) -> list[str]:
        return [
            *self.wait_for_parameters(),  # before the sums are sent, because a fused update may follow them
            "cluster_is_there();",
            *self._resident_cuda("merge_warps", WARPS=self.sums.block // 32),
            *self._cluster_cuda("send_sums", MERGE_WARPS=self.block_sums()),
        ]

    def meet(self, arguments: Arguments) -> list[str]:
        return ["wait_for_peers(door);"]

    def chunk_sums(self, arguments: Arguments, chunk: str) -> tuple[str, str]:
        first = f"received[(place * {self.sums.chunks}u + {chunk}) * 2u"
        return f"{first}]", f"{first} + 1u]"
