"""Quantised layers and a quantised CNN on a GPU, against onnxruntime's integer kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import relative_l2
from quantized.models import IMAGE, Layer, quantised_cnn, random_convolution, random_product, run_onnxruntime

import fusec
from fusec.diagnostics.verify import TIES

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

LAYERS = 12


@pytest.mark.parametrize("draw", [random_convolution, random_product])
def test_layers_equal_onnxruntime_within_one_step(
    draw: Callable[[np.random.Generator], Layer], rng: np.random.Generator
) -> None:
    other = count = 0
    for _ in range(LAYERS):
        layer = draw(rng)
        net = fusec.compile(layer.model, precision="fp16", tune="none")
        assert net.device != "simulated"
        steps = np.rint((net.run(None, layer.feeds)[0] - run_onnxruntime(layer.model, layer.feeds)) / layer.step)
        assert np.abs(steps).max(initial=0) <= 1
        other, count = other + np.count_nonzero(steps), count + steps.size
    assert other <= 1 + count * TIES


@pytest.mark.parametrize("rounding", ["source", "fused"])
def test_a_quantised_cnn_computes_what_onnxruntime_does(
    rounding: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = quantised_cnn(tmp_path, symmetric=True, per_channel=True)
    net = fusec.compile(path, precision="fp16", rounding=rounding)
    x = rng.standard_normal(IMAGE).astype(np.float32)
    assert relative_l2(np.asarray(net(x)), run_onnxruntime(str(path), {"x": x})) < 0.03
    assert net.verify().ok, str(net.verify())
