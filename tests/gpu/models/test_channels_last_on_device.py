"""Test inputs and outputs in NHWC on a GPU: results equal the reference's in each mix of memory orders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from execution.test_channels_last import BLOCK, last, lies_last, source
from helpers import assert_close, one_program

import fusec
from fusec.reference import evaluate

pytestmark = pytest.mark.gpu

STEM = """graph "stem" (%x: f32[4,3,32,32]) {
  %w = constant weight("w") : f32[32,3,3,3]
  %c = conv(%x, %w) {strides=[2,2], pads=[1,1,1,1], dilations=[1,1]}
  %r = relu(%c)
  %p = max_pool(%r) {window=[2,2], strides=[2,2], pads=[0,0,0,0], dilations=[1,1]}
  return %p
}"""
PATCHES = """graph "patches" (%x: f32[4,3,32,32]) {
  %w = constant weight("w") : f32[32,3,4,4]
  %c = conv(%x, %w) {strides=[4,4], pads=[0,0,0,0], dilations=[1,1]}
  return %c
}"""


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["block", "stem", "patches"])
def test_arrays_of_any_order(name: str, precision: str) -> None:
    import cupy

    rng = np.random.default_rng(0)
    text = {"block": BLOCK, "stem": STEM, "patches": PATCHES}[name]
    if name == "block":
        graph = source()
    else:
        shape = (32, 3, 3, 3) if name == "stem" else (32, 3, 4, 4)
        graph = fusec.text.parse(text, {"w": rng.standard_normal(shape).astype(np.float32) / 5})
    net = one_program(fusec.compile(graph, precision=precision, tune="none", channels_last=True))
    assert net.inputs[0].order == net.outputs[0].order == (0, 2, 3, 1)
    for _ in range(4):  # step by step, recorded, and replayed
        given = {s.name: rng.standard_normal(s.shape).astype(np.float32) for s in net.inputs}
        want = next(iter(evaluate(graph, given).values()))
        for turn in (last, np.ascontiguousarray):
            here: dict[str, Any] = {k: cupy.asarray(turn(a) if a.ndim == 4 else a) for k, a in given.items()}
            y = net.run(None, here)[0]
            assert lies_last(y) and isinstance(y, cupy.ndarray)
            assert_close(y.get(), want, 1e-4 if precision == "fp32" else 5e-3)
            out = cupy.asarray(turn(np.zeros_like(want)))
            net.run([net.outputs[0].name], here, out={net.outputs[0].name: out})
            assert_close(out.get(), want, 1e-4 if precision == "fp32" else 5e-3)
            host = net.run(None, {k: a.get() if k != "x" else turn(given["x"]) for k, a in here.items()})[0]
            assert lies_last(host) and isinstance(host, np.ndarray)
            assert_close(host, want, 1e-4 if precision == "fp32" else 5e-3)


def test_torch_tensors_keep_their_memory_format() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    from fusec import torch_backend

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 1))
    net = net.cuda().half().eval().to(memory_format=torch.channels_last)
    fast = torch.compile(net, backend=torch_backend.backend, options={"tune": "none", "precision": "fp16"})
    x = torch.randn(2, 16, 8, 8, device="cuda").half().to(memory_format=torch.channels_last)
    with torch.inference_mode():
        for _ in range(3):
            y, want = fast(x), net(x)
            assert y.stride() == want.stride() and y.is_contiguous(memory_format=torch.channels_last)
            assert_close(y.float().cpu().numpy(), want.float().cpu().numpy(), 5e-3)
