"""Test on a GPU that workers build plans compiled at run time, compile kernels, and end."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.autotune.test_coordinate_descent_on_device import graph_of
from helpers import assert_close, one_program

import fusec
from fusec.gpu.cudnn.build_pool import BuildPool
from fusec.gpu.cudnn.legality import Oracle
from fusec.ir import DType
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
    plan, exchange = BuildPool.plan, Oracle.exchange

    def counted(self: BuildPool, *args: Any) -> bytes | None:
        blob = plan(self, *args)
        came["plans" if blob else "none"] += 1
        return blob

    def asked(self: Oracle, question: dict[str, Any], **options: Any) -> Any:
        answer, worker = exchange(self, question, **options)
        came["kernels"] += "compiled" in answer if isinstance(answer, dict) else 0
        crew.append(self)
        return answer, worker

    crew: list[Oracle] = []
    monkeypatch.setattr(BuildPool, "plan", counted)
    monkeypatch.setattr(Oracle, "exchange", asked)
    graph = graph_of(LAYERS, rng)
    executable = one_program(fusec.compile(graph, precision="fp16"))
    assert came["plans"] > 3 and came["plans"] > came["none"] and came["kernels"] > 0
    assert executable.spent is not None and executable.spent.stages["plans are built"].count > 3
    x = rng.standard_normal((8, 72, 28, 28)).astype(np.float16)
    (want,) = evaluate(graph, {"x": x}, precision=DType.F64).values()
    for _ in range(2):
        assert_close(np.asarray(executable(x=x)).astype(np.float64), want, 5e-3)
    until = time.monotonic() + 20
    while crew[0]._all and time.monotonic() < until:
        time.sleep(0.1)
    assert crew[0]._all == [], "their memory is the model's again"
    seen = dict(came)
    again = fusec.compile(graph, precision="fp16")
    assert dict(came) == seen, "what is known is built nowhere"
    assert_close(np.asarray(again(x=x)).astype(np.float64), want, 5e-3)
