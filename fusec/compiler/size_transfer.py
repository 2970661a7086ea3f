"""Prepare a program for another input shape of a model, with the choices that were made for the shapes before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusec.compiler.gpu_executable import autotune
from fusec.errors import ExecutionError
from fusec.execution.compilation import Compiled
from fusec.execution.compile_options import CompileOptions
from fusec.execution.shape_family import ShapeFamily
from fusec.gpu.autotune.plans.plan_search import TuningOptions
from fusec.gpu.autotune.step_choices import can_run_as_kernel
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.runtime import Executable


def executable_for_size(
    compiled: Compiled, build: Callable[[], Compiled], family: ShapeFamily, options: CompileOptions
) -> Executable:
    """Prepare a program on a GPU with the plans and choices of a near input shape, if there is one.

    build: builds the program again, if no plan builds for a graph whose verdict was reused from another shape.
    """
    from fusec.gpu.autotune.cache.tuning_cache import KnownChoices
    from fusec.gpu.backend import CudnnBackend  # needs cupy and cudnn, which only a GPU machine must have

    may_transfer = True
    while True:
        transferred = family.transferred(compiled) if may_transfer else None
        if transferred is None:
            tuning, known = TuningOptions(options.tune, options.budget_s, options.progress), None
        else:
            compiled = replace(compiled, program=transferred.program, tuned=transferred.tuned)
            tuning = TuningOptions(progress=options.progress)
            known = KnownChoices(variants=transferred.variants, side_by_side=transferred.tuned.side_by_side)
        shared_kernels, build_pool = family.shared_kernels(), family.builders()
        backend = CudnnBackend(tuning, known, kernel_cache=shared_kernels, build_pool=build_pool)
        if backend.tune == "none":
            graphs = backend.plans.without_blob(cudnn_graphs(compiled, prefer_kernels=transferred is None))
            refused: list[CudnnGraph] = []
            received = backend.plans.receive(family.plans(graphs, refused))
            if refused:
                compiled = build()
                continue
            backend.plans.suggest(family.named_plans(graph for key, graph in graphs.items() if key not in received))
        try:
            if transferred is None:
                executable = autotune(compiled, backend, family.weights, prefer_kernels=options.tune == "none")
            else:
                executable = Executable(compiled, backend, family.weights)
        except ExecutionError:
            if transferred is None:
                raise
            compiled, may_transfer = build(), False  # the choices of the near shape do not run for this one
            continue
        family.record(executable, backend, cudnn_graphs(executable.compiled), measured=transferred is None)
        return executable


def cudnn_graphs(compiled: Compiled, prefer_kernels: bool = False) -> dict[str, CudnnGraph]:
    """Return the cuDNN graphs of a program by key. prefer_kernels: leave out those that a kernel of fusec can run."""
    return {
        lowered.graph.key: lowered.graph
        for step, lowered in zip(compiled.program.steps, compiled.lowered, strict=True)
        if lowered is not None and not (prefer_kernels and can_run_as_kernel(step, compiled.figures))
    }
