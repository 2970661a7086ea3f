"""Test models that onnxruntime quantised dynamically: products of integers with scales and zero points of run time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import one_program, relative_l2
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import QuantType
from quantized.models import DynamicLayers, dynamic_convolution, dynamic_products

import fusec
from fusec.ir import DType
from fusec.ops import Conv, MatMul

pytestmark = [pytest.mark.cudnn, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.mark.parametrize("kind", [QuantType.QInt8, QuantType.QUInt8])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("draw", [dynamic_products, dynamic_convolution])
def test_integer_products_with_scales_of_run_time(
    draw: Callable[[Path, QuantType, bool], DynamicLayers], per_channel: bool, kind: QuantType, tmp_path: Path
) -> None:
    """In fp16 too the sums of integers, which exceed its range, are not rounded before their scale."""
    layers = draw(tmp_path, kind, per_channel)
    net = one_program(fusec.compile(layers.model, target="h200", precision="fp16", simulate=True))
    products = [n for n in net.compiled.graph.nodes if isinstance(n.op, (Conv, MatMul))]
    assert products and {n.operands[0].type.dtype for n in products} == {DType.I8}
    (got,) = net.run(None, layers.feeds)
    (want,) = ReferenceEvaluator(layers.model).run(None, layers.feeds)
    assert relative_l2(got, want) < 0.01


def test_the_scale_zero_point_and_bias_are_in_the_step_of_the_product(tmp_path: Path) -> None:
    layers = dynamic_products(tmp_path, QuantType.QInt8, per_channel=True)
    net = fusec.compile(layers.model, target="h200", precision="fp16", simulate=True)
    net.assert_fused("matmul+cast+sub+mul+bias+cast+relu")
