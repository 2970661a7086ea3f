"""Test that a written-out recurrence becomes few steps, whatever its length, and that its export is found again."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_close

import fusec
from fusec.exporters.onnx import to_onnx
from fusec.ir import DType, Graph, TensorType
from fusec.ops import LinearScan

STEPS = 24


def scan(steps: int) -> Graph:
    graph = Graph("scan")
    a, b = (graph.add_input(name, TensorType((2, steps, 3, 4), DType.F32)) for name in "ab")
    graph.set_outputs([graph.add(LinearScan(1), a, b)], ["h"])
    return graph


@pytest.mark.cudnn
def test_an_exported_recurrence_is_one_launch(rng: np.random.Generator) -> None:
    graph = scan(STEPS)
    a, b = (rng.uniform(-1, 1, v.type.shape).astype(np.float32) for v in graph.inputs)
    model = to_onnx(graph).SerializeToString()
    exe = fusec.compile(model, target="h200")
    assert isinstance(exe, fusec.Executable)
    assert [step.signature for step in exe.compiled.program.steps] == ["linear_scan"]
    (got,) = exe.run(None, {"a": a, "b": b})
    wanted = np.zeros((2, STEPS, 3, 4))
    state = np.zeros((2, 3, 4))
    for t in range(STEPS):
        state = a[:, t].astype(np.float64) * state + b[:, t]
        wanted[:, t] = state
    assert_close(np.asarray(got), wanted, 1e-6)
    plain = fusec.compile(model, target="h200", disable=["recognise_scan"])
    assert isinstance(plain, fusec.Executable)
    assert plain.compiled.program.launches > 1
