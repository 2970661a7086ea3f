"""Check that every plan that cuDNN offers for a step computes what the step means."""

from __future__ import annotations

from dataclasses import replace

from fusec.errors import ExecutionError
from fusec.ir import Graph
from fusec.testing.case import Case, MismatchError
from fusec.testing.error_bounds.bounds import execution
from fusec.testing.properties.compiling import lowered_agrees
from fusec.testing.properties.fixtures import CASE
from fusec.testing.properties.on_device import different_graphs, gpu_backend, leave_if_faulted, on_this_gpu

PER_ENGINE = 3  # plans of one engine differ only in knobs, so mostly all or none are wrong


def plans_agree(graph: Graph, case: Case = CASE) -> None:
    """Compare every plan of each cuDNN graph with what its step means.

    Autotuning compares a plan before it chooses it. Without tuning, cuDNN's first plan runs unchecked, and that plan
    differs from release to release. As in `device_agrees`, a memory fault ends the process.
    """
    shared, backend = on_this_gpu(graph, case, "cudnn"), gpu_backend()
    rounding = execution(case.options.tensor_cores, device=True)
    for step in different_graphs(shared):
        for choice, run in backend.plan_runners(step.lowered.graph, PER_ENGINE):
            planned = replace(step, what=f"plan {choice.name} of {step.what}")
            try:
                lowered_agrees(planned, rounding, lambda _, buffers, run=run: run(buffers))
            except ExecutionError as error:
                leave_if_faulted(error, backend)
                raise MismatchError(f"{planned.what}: {error}") from error
