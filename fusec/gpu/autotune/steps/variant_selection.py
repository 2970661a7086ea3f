"""Choose the variant that runs each kernel on this GPU: named, from the cache, or timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fusec.errors import ExecutionError
from fusec.gpu import kernels
from fusec.gpu.autotune.cache.tuning_cache import TuningCache
from fusec.gpu.autotune.plans.plan_bench import CudnnContext
from fusec.gpu.kernels import GpuFigures, Kernel
from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.gpu.launch.kernel_launcher import Launcher
from fusec.gpu.launch.stream_calls import out_of_memory
from fusec.schedule.program import Kind, Partition


class VariantSelector:
    """Choices of kernel variants, which the launcher holds.

    launcher: compiles and times kernels
    named: for the key of a kernel, the key of the variant to run
    """

    def __init__(self, context: CudnnContext, cache: TuningCache, launcher: Launcher, named: Mapping[str, str]):
        self._stream, self._stopwatch = context.stream, context.stopwatch
        self._cache, self._launcher, self._named = cache, launcher, named

    def kernels_of(self, steps: Iterable[Partition], figures: GpuFigures) -> list[Kernel]:
        """Return the kernels of the steps that kernels run, and use their named variants.

        Raises ExecutionError when a kernel has no variant of that name.
        """
        found = (kernels.find(step.nodes, step.outputs, figures) for step in steps if step.kind is Kind.KERNEL)
        wanted = [kernel for kernel in found if kernel is not None]
        for kernel in wanted:
            if kernel.key in self._named and not self._launcher.take(kernel, self._named[kernel.key]):
                raise ExecutionError(f"{kernel.name}: it has no variant {self._named[kernel.key]}")
        return wanted

    def times_us(self, asked: Mapping[str, Kernel], footprint_bytes: int) -> dict[str, float]:
        """Time kernels, by key, each as its fastest variant; infinite for one that does not compile."""
        times: dict[str, float] = {}
        for key, kernel in asked.items():
            known = self._measured(kernel)
            if known is not None and self._launcher.take(kernel, known["fastest"]):
                times[key] = float(known["time_us"])
        asked = {key: kernel for key, kernel in asked.items() if key not in times}
        if not asked:
            return times
        self._launcher.compile(variant for kernel in asked.values() for variant in variants_of(kernel))

        def time_us(run: Callable[[], None], best_us: float) -> float:
            return self._stopwatch.median_us(run, footprint_bytes, best_us)

        with out_of_memory("timing kernels"), self._stream:
            for key, kernel in asked.items():
                times[key] = self._launcher.measure(kernel, time_us)
                if times[key] < float("inf"):
                    self._store(kernel, self._launcher.fastest(kernel), times[key])
        return times

    def _measured(self, kernel: Kernel) -> Mapping[str, Any] | None:
        """Return what the cache has on a kernel's variants, if they are the same as now."""
        known = self._cache.kernel_variant(kernel.key)
        return known if known.get("variants") == _keys(kernel) else None

    def compile_soon(self, asked: Mapping[str, Kernel]) -> None:
        """Start to compile kernels in threads, while cuDNN lists plans."""
        unknown = [
            variant for kernel in asked.values() if self._measured(kernel) is None for variant in variants_of(kernel)
        ]
        self._launcher.compile_soon(unknown)

    def prefer(self, kernel: Kernel, variant: Kernel) -> bool:
        """Run another variant of a kernel from now on; False if its results differ."""
        with self._stream:
            if not self._launcher.agree(self._launcher.fastest(kernel), variant):
                return False
        time_us = self._launcher.times_us(kernel)[_keys(kernel).index(variant.key)]
        self._launcher.take(kernel, variant.key)
        self._store(kernel, variant, time_us)
        return True

    def _store(self, kernel: Kernel, fastest: Kernel, time_us: float) -> None:
        measured = {"variants": _keys(kernel), "fastest": fastest.key, "time_us": time_us}
        self._cache.store_kernel_variant(kernel.key, measured)


def _keys(kernel: Kernel) -> list[str]:
    return [variant.key for variant in variants_of(kernel)]
