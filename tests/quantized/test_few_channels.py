"""Test that integer convolutions whose channels or filters are no multiples of 8 run in cuDNN, padded with zeros."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import one_program
from quantized.models import Layers, run_onnxruntime

import fusec
from fusec.ir import DType
from fusec.ops import Conv
from fusec.schedule.program import Kind

pytestmark = pytest.mark.cudnn


@pytest.mark.parametrize(("channels", "filters"), [(3, 64), (12, 16), (16, 20), (20, 44)])
@pytest.mark.parametrize("rounds", [True, False])
def test_channels_are_padded(channels: int, filters: int, rounds: bool, rng: np.random.Generator) -> None:
    """Sums of integers exceed the range of fp16, so they are scaled before they are rounded to it."""
    g = Layers()
    zero = np.zeros(filters, np.int8)
    weight = rng.integers(-64, 64, (filters, channels, 3, 3)).astype(np.int8)
    x = g.rounded("x", np.array(0.03, np.float32), np.array(0, np.int8))
    bias = g.constant(rng.standard_normal(filters).astype(np.float32))
    y = g.op("Conv", x, g.weights(weight, np.full(filters, 0.01, np.float32), zero), bias, pads=[1] * 4, name="sums")
    y = g.rounded(y, np.array(0.1, np.float32), np.array(0, np.int8), name="y") if rounds else g.op("Relu", y, name="y")
    model = g.model({"x": (2, channels, 16, 16)}, y)
    feeds = {"x": (4 * rng.standard_normal((2, channels, 16, 16))).astype(np.float32)}
    net = one_program(fusec.compile(model, target="h200", precision="fp16", simulate=True))
    (step,) = (s for s in net.compiled.program.steps if any(isinstance(n.op, Conv) for n in s.nodes))
    assert step.kind is Kind.CUDNN and step.nodes[0].operands[0].type.dtype is DType.I8
    got, want = np.asarray(net.run(None, feeds)[0]), run_onnxruntime(model, feeds)
    assert np.abs(got - want).max() <= (0.101 if rounds else 2e-3 * np.abs(want).max())
