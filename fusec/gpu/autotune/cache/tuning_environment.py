"""Describe the GPU and the libraries that a tuned choice depends on, for cache keys."""

from __future__ import annotations

from dataclasses import replace

import cudnn
import cupy

from fusec.gpu import device
from fusec.gpu.cublaslt.algorithms import competitor
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import PlanKey
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class TuningEnvironment:
    """Target, GPU and library versions that a tuned choice depends on.

    figures: `Target.figures_digest`; only choices of steps depend on it, because cuDNN's plans do not read the figures.
    """

    target: str
    device: str
    driver: str
    cudnn: str
    frontend: str
    figures: str

    def key(self, subject: str, level: str) -> PlanKey:
        """Return the cache key of a graph, step or kernel at a tuning level."""
        return PlanKey(subject, self.target, self.device, self.driver, self.cudnn, self.frontend, level)


def environment_here(device_name: str, plan_filter: PlanFilter, all_sizes: bool) -> TuningEnvironment:
    """Describe this GPU, its libraries and the plans that may be used, for cache keys.

    all_sizes: plans share kernels for all input shapes.
    """
    here = device.detect()
    words = [cudnn.__version__, competitor()]
    words += ["deterministic"] if plan_filter.deterministic else []
    words += [replace(plan_filter, deterministic=False).key]
    words += ["kernels for all sizes"] if all_sizes else []
    driver, version = str(cupy.cuda.runtime.driverGetVersion()), str(cudnn.backend_version())
    target, figures = ("", "") if here is None else (here.name, here.figures_digest)
    return TuningEnvironment(target, device_name, driver, version, " ".join(word for word in words if word), figures)
