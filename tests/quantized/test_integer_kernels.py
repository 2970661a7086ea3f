"""Test random quantised layers against onnxruntime's integer kernels: equal but for single steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers import quick
from quantized.models import Layer, random_convolution, random_product, run_onnxruntime

from fusec import frontends
from fusec.execution.compilation import Compiled
from fusec.execution.simulator_backend import SimulatorBackend
from fusec.gpu.cudnn.legality.judges import RulesJudge
from fusec.ir import DType
from fusec.ops import Conv, MatMul
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.runtime import Executable
from fusec.targets.target import load

LAYERS = 30  # of each kind and precision


def simulated(layer: Layer, precision: str) -> Executable:
    """Compile a layer as if cuDNN took all that can be lowered, for the simulator."""
    source = frontends.load(layer.model, None)
    graph = run(PIPELINE, source.clone(), Options(precision))
    target, options = load("h200"), Options(precision)
    judge = RulesJudge(options.tensor_cores)
    compiled = Compiled(source, partition(graph, judge, target), target, options, judge)
    return Executable(compiled, SimulatorBackend())


@pytest.mark.parametrize("draw", [random_convolution, random_product])
@pytest.mark.parametrize("precision", quick(["fp32", "fp16"], ["fp16"]))
def test_layers_equal_onnxruntime_within_one_step(
    draw: Callable[[np.random.Generator], Layer], precision: str, rng: np.random.Generator
) -> None:
    other = count = products = 0
    for _ in range(LAYERS):
        layer = draw(rng)
        net = simulated(layer, precision)
        steps = np.rint((net.run(None, layer.feeds)[0] - run_onnxruntime(layer.model, layer.feeds)) / layer.step)
        assert np.abs(steps).max(initial=0) <= 1
        found = [n for n in net.compiled.graph.nodes if isinstance(n.op, (Conv, MatMul))]
        if found[0].operands[0].type.dtype is DType.I8:  # others are rounded to 16 bits before
            products += 1
            other, count = other + np.count_nonzero(steps), count + steps.size
    assert other <= count / 200, "rounding differs for other numbers than those next to ties"
    assert products >= LAYERS * 3 // 5, "few products are of integers"
