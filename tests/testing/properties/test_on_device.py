"""Test the properties of a GPU: with the simulator in place of the GPU, then on a real one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from fusec.errors import ExecutionError, TargetError
from fusec.execution.backend import Captured
from fusec.execution.simulator_backend import SimulatorBackend
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.simulator import simulate
from fusec.plans.plan_record import Choice
from fusec.schedule.program import Program
from fusec.testing.case import Case, MismatchError
from fusec.testing.properties import on_device, plans_on_device
from fusec.testing.properties.judges import lowers
from fusec.testing.properties.on_device import device_agrees
from fusec.testing.properties.plans_on_device import plans_agree
from fusec.text import parse

GRAPH = parse("""graph "g" (%x: f32[2,8,4,4]) {
  %b = constant [1.0, 2.0, 3.0, 4.0, -1.0, -2.0, -3.0, 0.5] : f32[8,1,1]
  %a = add(%x, %b)
  %r = relu(%a)
  %s = softmax(%r) {axis=1}
  %y = mul(%s, %r)
  return %y
}""")


class Stand(SimulatorBackend):
    """The simulator in place of a GPU, with a chosen fault."""

    def __init__(self, fault: str = ""):
        self.fault = fault

    def run_on_host(self, graph: CudnnGraph, buffers: Mapping[int, Any]) -> None:
        if self.fault == "illegal":
            raise ExecutionError("an illegal memory access was encountered")
        simulate(graph, buffers)
        if self.fault == "wrong":
            buffers[graph.outputs[0].uid][0] += 1

    def plan_runners(self, graph: CudnnGraph, per_engine: int) -> Iterator[tuple[Choice, Callable[[Any], None]]]:
        assert per_engine > 1
        yield Choice(7, ()), lambda buffers: simulate(graph, buffers)
        yield Choice(8, ()), lambda buffers: self.run_on_host(graph, buffers)

    def tune_steps(self, program: Program, *_: Any) -> Program:
        return program

    def bind(self, graph: CudnnGraph, buffers: Mapping[int, Any]) -> Callable[[], None]:
        return lambda: self.run_on_host(graph, buffers)

    def capture(self, runs: Sequence[Callable[[], None]], waits: Any = None, ahead: Any = None) -> Captured:
        return super().capture([] if self.fault == "stale" else runs)  # or whatever was left in memory


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(backend: Stand) -> None:
        monkeypatch.setattr(on_device.device, "is_present", lambda target: True)
        monkeypatch.setattr(on_device, "gpu_backend", lambda: backend)
        monkeypatch.setattr(plans_on_device, "gpu_backend", lambda: backend)
        monkeypatch.setitem(on_device.prepared.__globals__["JUDGES"], "cudnn", lowers)

    return use


def test_property_holds_for_a_correct_gpu(gpu: Any) -> None:
    gpu(Stand())
    for style in ("normal", "special", "integers"):
        device_agrees(GRAPH, Case(style=style))


def test_wrong_result_is_found(gpu: Any) -> None:
    gpu(Stand("wrong"))
    with pytest.raises(MismatchError, match="on the GPU"):
        device_agrees(GRAPH)


def test_recording_that_does_nothing_is_found(gpu: Any) -> None:
    gpu(Stand("stale"))
    with pytest.raises(MismatchError, match="the GPU: "):
        device_agrees(GRAPH)


def test_error_of_a_step_is_raised(gpu: Any) -> None:
    gpu(Stand("illegal"))
    with pytest.raises(ExecutionError, match="illegal"):
        device_agrees(GRAPH)


@pytest.mark.parametrize("fault", ["wrong", "illegal"])
def test_wrong_plan_that_is_not_the_first_is_found(gpu: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(on_device, "_alive", lambda backend: True)
    gpu(Stand())
    plans_agree(GRAPH)
    gpu(Stand(fault))
    with pytest.raises(MismatchError, match="plan engine 8 of step 0"):
        plans_agree(GRAPH)


def test_lost_cuda_context_ends_the_process(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def leave(status: int) -> None:
        ended.append(status)
        raise SystemExit(status)

    gpu(Stand("illegal"))
    monkeypatch.setattr(on_device, "_alive", lambda backend: False)
    monkeypatch.setattr(on_device.os, "_exit", leave)
    with pytest.raises(SystemExit):
        device_agrees(GRAPH)
    assert ended == [on_device.FAULTED]


def test_error_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device.device, "is_present", lambda target: False)
    for check in (device_agrees, plans_agree):
        with pytest.raises(TargetError, match="no GPU that is a h200"):
            check(GRAPH)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_on_this_gpu(precision: str) -> None:
    for style in ("normal", "integers", "special"):
        device_agrees(GRAPH, Case(precision=precision, style=style))
        plans_agree(GRAPH, Case(precision=precision, style=style))


@pytest.mark.gpu
def test_fuzzing_on_this_gpu(tmp_path: Any) -> None:
    command = [sys.executable, "-m", "fusec", "fuzz", "--device", "--property", "device_agrees", "--examples", "50"]
    options = ["--workers", "4", "--database", str(tmp_path / "db"), "--findings", str(tmp_path / "findings")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not np.any([(tmp_path / "findings").exists()])
