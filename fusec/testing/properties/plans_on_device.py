"""Check that every plan that cuDNN offers for a step computes what the step means."""

from __future__ import annotations

from dataclasses import replace

from fusec.errors import ExecutionError, TargetError
from fusec.gpu import device
from fusec.ir import Graph
from fusec.targets.target import load
from fusec.testing.case import Case, MismatchError
from fusec.testing.error_bounds.bounds import execution
from fusec.testing.properties.compiling import lowered_agrees
from fusec.testing.properties.fixtures import CASE, prepared, stored_values
from fusec.testing.properties.on_device import gpu_backend, leave_if_faulted

PER_ENGINE = 3  # plans of one engine differ only in knobs, so mostly all or none are wrong


def plans_agree(graph: Graph, case: Case = CASE) -> None:
    """Compare every plan of each cuDNN graph with what its step means.

    Autotuning compares a plan before it chooses it. Without tuning, cuDNN's first plan runs unchecked, and that plan
    differs from release to release. As in `device_agrees`, a memory fault ends the process.
    """
    if not device.is_present(load(case.target)):
        raise TargetError(f"this machine has no GPU that is a {case.target}")
    style = "ties" if case.style == "special" else case.style
    shared = prepared(graph, replace(case, judge="cudnn", style=style))
    compiled, backend = shared.compiled, gpu_backend()
    rounding = execution(case.options.tensor_cores, device=True)
    values, seen = stored_values(compiled.graph, shared.feeds), set[str]()
    for index, (step, lowered) in enumerate(zip(compiled.program.steps, compiled.lowered, strict=True)):
        if lowered is None or lowered.graph.key in seen:
            continue
        seen.add(lowered.graph.key)
        feeds = {v.name: values[v] for v in step.inputs}
        for choice, run in backend.plan_runners(lowered.graph, PER_ENGINE):
            what = f"plan {choice.name} of step {index} {step.signature}"
            try:
                lowered_agrees(step, lowered, feeds, rounding, what, lambda _, buffers, run=run: run(buffers))
            except ExecutionError as error:
                leave_if_faulted(error, backend)
                raise MismatchError(f"{what}: {error}") from error
