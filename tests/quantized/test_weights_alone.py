"""Products whose weights alone are quantised, in blocks: the weights are dequantised at compile time."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import relative_l2
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import fusec

pytestmark = pytest.mark.cudnn

ROWS, DEPTH, COLUMNS, BLOCK = 1, 1024, 256, 32


def model(bits: int, axis: int, rng: np.random.Generator) -> ModelProto:
    """Make a product with a weight that DequantizeLinear scales in blocks along `axis`."""
    kind, limit = {4: (TensorProto.INT4, 8), 8: (TensorProto.INT8, 128)}[bits]
    codes = rng.integers(-limit, limit, (DEPTH, COLUMNS)).reshape(-1).tolist()
    shape = [DEPTH, COLUMNS]
    shape[axis] //= BLOCK
    scales = numpy_helper.from_array(rng.uniform(0.01, 0.1, shape).astype(np.float16), "s")
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=axis, block_size=BLOCK),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, (ROWS, DEPTH))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)
    graph = helper.make_graph(nodes, "g", [x], [y], [helper.make_tensor("q", kind, (DEPTH, COLUMNS), codes), scales])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_call_runs_the_product_alone(bits: int, axis: int, rng: np.random.Generator) -> None:
    """Scales that were repeated for each weight would be too large to fold, and each call would scale the weight."""
    proto = model(bits, axis, rng)
    net = fusec.compile(proto, target="h200", precision="fp16", simulate=True)
    assert [step.signature for step in net.compiled.program.steps] == ["matmul"]
    feeds = {"x": rng.standard_normal((ROWS, DEPTH)).astype(np.float16)}
    (want,) = ReferenceEvaluator(proto).run(None, feeds)
    assert relative_l2(np.asarray(net.run(None, feeds)[0]), want) < 2e-3
