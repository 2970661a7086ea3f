"""Programs for tests of reports: compiled without cuDNN's answers, or with a judge that gives them immediately."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from diagnostics.explain.test_explain import CONV, WEIGHTS, Rule, no_gate
from passes.partition.judges import AcceptAll

from fusec.diagnostics.step_times import measure
from fusec.execution.compilation import Compiled
from fusec.passes.base import Options
from fusec.passes.partition import partition
from fusec.report import ReportedProgram, of_executable
from fusec.runtime import Executable, SimulatorBackend
from fusec.targets.target import load
from fusec.text import parse

BLOCK = f"""
graph "block" (%x: f32[1,8,6,6]) {{
  %w = constant weight("w") : f32[8,8,3,3]
  %b = constant weight("b") : f32[1,8,1,1]
  %c = conv(%x, %w) {CONV} : f32[1,8,6,6] loc("conv0")
  %d = add(%c, %b) loc("conv0")
  %s = sigmoid(%d) loc("gate0")
  %m = mul(%d, %s) loc("mul0")
  %n = sign(%m) loc("sign0")
  %e = conv(%n, %w) {CONV} : f32[1,8,6,6] loc("conv1")
  %f = add(%e, %x) loc("sum1")
  %g = reshape(%f) {{shape=[1, 288]}} loc("flat")
  return %g as "out", %n as "signs"
}}"""
INPUT = np.random.default_rng(3).standard_normal((1, 8, 6, 6)).astype(np.float32)


def lenient() -> AcceptAll:
    """Return a judge that takes all that cuDNN has operations for."""
    return Rule(lambda names: False)


def executable(text: str = BLOCK, target: str = "h200", judge: AcceptAll | None = None, name: str = "") -> Executable:
    """Prepare a program in simulation. name: of the device, to look like a GPU."""
    source, gpu, judge = parse(text, WEIGHTS), load(target), judge or Rule(no_gate)
    compiled = Compiled(source, partition(source.clone(), judge, gpu), gpu, Options(), judge)
    return Executable(compiled, SimulatorBackend(name or "simulated"))


def program(text: str = BLOCK, target: str = "h200", judge: AcceptAll | None = None) -> ReportedProgram:
    """Collect the report of a simulated program."""
    return of_executable(executable(text, target, judge), "block")


def measured_program() -> ReportedProgram:
    """Collect the report of a program with times, as on a GPU."""
    net = executable(name="NVIDIA H200")
    return of_executable(net, "block", bench=replace(measure(net, {"x": INPUT}, runs=3), device="NVIDIA H200"))
