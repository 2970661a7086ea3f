"""Choose the judge of which ops fuse: cuDNN, or fusec's rules alone if cuDNN is not installed."""

from __future__ import annotations

import warnings
from dataclasses import replace

from fusec.compiler.choose_target import require_cudnn
from fusec.errors import CudnnNotAskedWarning, FusecError
from fusec.execution.compilation import NOT_ASKED
from fusec.execution.shape_family import ShapeFamily
from fusec.gpu import device
from fusec.gpu.cudnn.legality.judges import CudnnJudge, RulesJudge
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.gpu.cudnn.without_driver import deviceless
from fusec.gpu.cudnn.worker_processes.build_pool import BuildPool
from fusec.passes.base import Options
from fusec.passes.partition import Judge
from fusec.plans.plan_filter import PlanFilter
from fusec.system.dataclass import dataclass
from fusec.targets.target import Target


@dataclass(frozen=True)
class CudnnWorkers:
    """Worker processes that ask cuDNN. borrowed: they belong to the caller, who may use them for other models."""

    oracle: Oracle | None = None
    borrowed: bool = False

    def builders(self, plan_filter: PlanFilter) -> BuildPool | None:
        """Return a pool that builds plans in these processes, and ends them afterwards unless they are borrowed."""
        return None if self.oracle is None else BuildPool(self.oracle, plan_filter, ends=not self.borrowed)

    def close(self) -> None:
        """End the processes, which hold memory of the GPU, unless they are borrowed."""
        if self.oracle is not None and not self.borrowed:
            self.oracle.close()


def start_workers(
    target: Target,
    on_gpu: bool,
    plan_filter: PlanFilter,
    oracle: Oracle | None = None,
    family: ShapeFamily | None = None,
) -> CudnnWorkers:
    """Return the workers of the caller or of a shape family, or new ones; none if cuDNN is not installed.

    A family that transfers plans has its own way to use workers, and kernels for all shapes exist in this process only.

    on_gpu: the GPU of the target is there, and will run the program.
    oracle: the workers of the caller.
    family: the programs of the same model for other input shapes.
    Raises FusecError if the caller's workers are for another target.
    """
    if oracle is not None:
        if oracle.target != target:
            raise FusecError(f"the oracle asks about {oracle.target.name}, not about {target.name}")
        return CudnnWorkers(oracle, borrowed=True)
    if deviceless.is_absent() or (family is not None and (family.transfers or family.share_kernels)):
        return CudnnWorkers()
    if family is not None and family.workers is not None:
        return CudnnWorkers(family.workers)
    # On a GPU the plans that are built to judge graphs are the plans to run.
    oracle = Oracle(target, device=on_gpu, hand_over=on_gpu, reuse_builds=not on_gpu, plan_filter=plan_filter)
    if on_gpu:  # where plans are built in them later, too
        oracle.start_if_new()
    if family is not None:
        family.workers = oracle
    return CudnnWorkers(oracle)


def choose_judge(target: Target, options: Options, oracle: Oracle | None, family: ShapeFamily | None) -> Judge:
    """Return the judge of which ops fuse; programs of one shape family share it.

    Without cuDNN, fusec's rules judge, with a CudnnNotAskedWarning. They propose steps as for cuDNN, so that `run` and
    `verify` still check passes and lowered graphs.

    oracle: the workers that ask cuDNN; None starts new ones.
    family: the programs of the same model for other input shapes.
    """
    if family is not None and family.judge is not None:
        return family.judge
    if deviceless.is_absent():
        if device.is_present(target):
            require_cudnn()
        warnings.warn(NOT_ASKED, CudnnNotAskedWarning, stacklevel=2)
        judge = RulesJudge(options.tensor_cores)
    else:
        if oracle is not None:
            _require_filter(oracle, options.plan_filter)
        elif family is not None:
            oracle = family.oracle(target, options.plan_filter)
        else:
            on_gpu = device.is_present(target)
            oracle = Oracle(target, device=on_gpu, reuse_builds=not on_gpu, plan_filter=options.plan_filter)
        judge = CudnnJudge(oracle, options.tensor_cores)
    if family is not None:
        family.judge = judge
    return judge


def _require_filter(oracle: Oracle, plan_filter: PlanFilter) -> None:
    """Raise FusecError if the verdicts of an oracle are about other plans. One that takes all may be deterministic."""
    if replace(oracle.plan_filter, deterministic=False) != replace(plan_filter, deterministic=False):
        raise FusecError("the oracle was made for other heuristics, engines or workspace_limit than this compilation")
