"""Does a GPU compute what the graph means? End to end, and each cuDNN graph for itself."""

from __future__ import annotations

import numpy as np

from fusec import driver
from fusec.errors import TargetError
from fusec.gpu import device
from fusec.ir import Graph
from fusec.target import load
from fusec.testing.bounds import allowed, compare, execution
from fusec.testing.case import Case
from fusec.testing.compiling import lowered_agrees
from fusec.testing.prepared import CASE, prepared, quiet, stored_values


def device_agrees(graph: Graph, case: Case = CASE) -> None:
    """Compiled for the GPU at hand and run on it, a graph gives the outputs of the model, and so does each step."""
    if not device.is_present(load(case.target)):
        raise TargetError(f"this machine has no GPU that is a {case.target}")
    from fusec.gpu.backend import CudnnBackend  # needs cupy and cudnn, which only a GPU machine must have

    shared = prepared(graph, case)
    with quiet():
        executable = driver.compile(
            graph, target=case.target, precision=case.precision, tune="none", disable=case.disable
        )
    rounding = execution(case.options.tensor_cores, device=True)
    backend, compiled = executable.backend, executable.compiled
    assert isinstance(backend, CudnnBackend)
    values, seen = stored_values(compiled.graph, shared.feeds), set[str]()
    for index, (step, lowered) in enumerate(zip(compiled.program.steps, compiled.lowered, strict=True)):
        if lowered is None or lowered.graph.key in seen:
            continue
        seen.add(lowered.graph.key)
        feeds = {v.name: values[v] for v in step.inputs}
        what = f"step {index} {step.signature} on the GPU"
        lowered_agrees(step, lowered, feeds, rounding, what, backend.run_on_host)
    names = [spec.name for spec in executable.outputs]
    got = dict(zip(names, executable.run(None, dict(shared.feeds)), strict=True))
    added = allowed(compiled.graph, shared.feeds, rounding)
    compare({name: np.asarray(array) for name, array in got.items()}, [shared.narrowed_meaning, added], "the GPU")
