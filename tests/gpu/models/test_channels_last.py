"""Test inputs and outputs that lie channels last, on a stand-in for the GPU: one copy each, or none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from execution.test_channels_last import BLOCK, compiled, feeds, last, lies_last
from gpu.stand_in_gpu import Machine, on_device
from helpers import assert_close

from fusec.plans.plan_cache import PlanStore
from fusec.reference import evaluate
from fusec.runtime import Executable

pytest.importorskip("cupy")
pytest.importorskip("cudnn")

# of pointwise ops alone: what the stand-in has for kernels needs a compiler
POINTWISE = """graph "g" (%x: f32[2,8,6,5]) {
  %r = relu(%x)
  %y = mul(%r, %r)
  return %y
}"""


def build(path: Path, text: str) -> Executable:
    from fusec.gpu.backend import CudnnBackend

    return Executable(compiled(True, text), CudnnBackend("none", store=PlanStore(path)))


def test_an_array_that_lies_so_is_copied_in_one_piece(machine: Machine, tmp_path: Path) -> None:
    net = build(tmp_path, POINTWISE)
    x = np.empty(0)
    for seed in range(4):
        x = feeds(seed, x=(2, 8, 6, 5))["x"]
        machine.copied.clear()
        y = net.run(None, {"x": on_device(last(x))})[0]
        assert [kind for kind, _ in machine.copied] == [3, 3]
        assert lies_last(y) and y.shape == x.shape
        np.testing.assert_array_equal(y.get(), np.maximum(x, 0) ** 2)
    machine.copied.clear()
    host = net.run(None, {"x": last(x)})[0]
    assert [kind for kind, _ in machine.copied] == [1, 2]
    assert lies_last(host) and type(host) is np.ndarray
    rows = net.run(None, {"x": on_device(x)})[0]
    np.testing.assert_array_equal(rows.get(), host)
    for out in (on_device(last(np.empty_like(x))), on_device(np.empty_like(x))):
        machine.copied.clear()
        net.run(None, {"x": net.input_buffers["x"]}, out={"y": out})
        assert [kind for kind, _ in machine.copied] == ([3] if lies_last(out) else [])


def test_what_is_given_in_rows_is_right_too(machine: Machine, tmp_path: Path) -> None:
    net = build(tmp_path, BLOCK)
    for seed in range(3):
        given = feeds(seed)
        want = evaluate(net.compiled.source, given)
        for x in (given["x"], last(given["x"])):
            y, m = net.run(None, {"x": on_device(x), "t": on_device(given["t"])})
            assert lies_last(y)
            assert_close(y.get(), want["y"], 1e-5)
            assert_close(m.get(), want["m"], 1e-5)
