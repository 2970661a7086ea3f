"""Test on a GPU that workers build plans compiled at run time, that child processes compile kernels, and all end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gpu.autotune.model.test_coordinate_descent_on_device import graph_of
from helpers import assert_close, one_program

import fusec
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.gpu.cudnn.worker_processes.build_pool import BuildPool
from fusec.gpu.launch.nvrtc_process import NvrtcChild
from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import Choice
from fusec.reference import evaluate

pytestmark = pytest.mark.gpu

# Activations for which cuDNN compiles at run time, after convolutions, one of them depthwise. No kernel of fusec takes
# the 3x3 convolution of 72 channels, so its plans are searched.
LAYERS = """graph "layers" (%x: f16[8,72,28,28]) {
  %v = constant weight("v") : f16[72,72,3,3]
  %w = constant weight("w") : f16[72,1,3,3]
  %u = constant weight("u") : f16[72,72,1,1]
  %c = conv(%x, %v) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1], groups=1}
  %s = swish(%c)
  %d = conv(%s, %w) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1], groups=72}
  %t = tanh(%d)
  %e = conv(%t, %u) {strides=[1,1], pads=[0,0,0,0], dilations=[1,1], groups=1}
  %g = gelu(%e)
  %y = add(%g, %x)
  return %y
}"""


def test_plans_compiled_by_workers_compete_and_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "fusec"))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cupy"))
    came: Counter[str] = Counter()
    of_graph: Counter[str] = Counter()  # plans that workers built, by key of the graph
    crew: list[BuildPool] = []
    plan, cubin = BuildPool.plan, NvrtcChild.cubin

    def counted(self: BuildPool, graph: CudnnGraph, choice: Choice) -> bytes | None:
        crew.append(self)
        blob = plan(self, graph, choice)
        came["plans" if blob else "none"] += 1
        of_graph[graph.key] += blob is not None
        return blob

    def compiled(self: NvrtcChild, code: str, options: Sequence[str]) -> bytes | None:
        came["kernels"] += 1
        return cubin(self, code, options)

    monkeypatch.setattr(BuildPool, "plan", counted)
    monkeypatch.setattr(NvrtcChild, "cubin", compiled)
    graph = graph_of(LAYERS, rng)
    executable = one_program(fusec.compile(graph, precision="fp16"))
    assert max(of_graph.values(), default=0) > 1, f"plans of one graph compete: {came}"
    assert came["plans"] > came["none"] and came["kernels"] > 0, came
    x = rng.standard_normal((8, 72, 28, 28)).astype(np.float16)
    (want,) = evaluate(graph, {"x": x}, precision=DType.F64).values()
    for _ in range(2):
        assert_close(np.asarray(executable(x=x)).astype(np.float64), want, 5e-3)
    until = time.monotonic() + 20
    workers = crew[0]._workers
    assert isinstance(workers, Oracle)
    while workers._all and time.monotonic() < until:
        time.sleep(0.1)
    assert workers._all == [], "their memory is the model's again"
    seen = dict(came)
    again = fusec.compile(graph, precision="fp16")
    assert dict(came) == seen, "what is known is built nowhere"
    assert_close(np.asarray(again(x=x)).astype(np.float64), want, 5e-3)
