"""Test that quantised models have few launches: no rounding, copy or cast stays alone, and cuDNN runs products."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exported.packing import read
from helpers import assert_close, one_program
from onnxruntime.quantization import QuantType
from quantization.models import linear_net
from quantization.test_exported_models import fed
from quantized.models import dynamic_products

import fusec
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.runtime import Executable
from fusec.schedule.program import Kind

pytestmark = pytest.mark.cudnn


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["bert-script"])
def test_every_rounding_is_in_a_step_that_computes_its_operand(name: str, format: str) -> None:
    model = read(name)
    feeds = fed(model)
    quantised = fusec.quantize(model, [feeds], format=format).model
    launches: list[int] = []
    for each in (model, quantised):
        shapes = {name: array.shape for name, array in feeds.items()}
        executable = fusec.compile(each, precision="fp16", target="h200", simulate=True, shapes=shapes)
        assert isinstance(executable, Executable)
        compiled = executable.compiled
        program = fuse_steps(compiled.program, compiled.figures, products=True)
        launches.append(program.launches)
        alone = [
            step.signature
            for step in program.steps
            if step.signature.startswith(("cast+mul+round", "cast+mul+clip", "round"))
        ]
        assert not alone
    assert launches[1] <= launches[0]


def test_cudnn_multiplies_integers_with_odd_columns(rng: np.random.Generator) -> None:
    """The weights of the last layer of a classifier are padded. Else each thread of a kernel adds up one sum."""
    data = {"x": rng.standard_normal((32, 50)).astype(np.float32)}
    quantised = fusec.quantize(linear_net(32, depth=1, width=50), [data]).model
    executable = one_program(fusec.compile(quantised, precision="fp16", target="h200", simulate=True))
    program = fuse_steps(executable.compiled.program, executable.compiled.figures, products=True)
    (product,) = (step for step in program.steps if any(node.op.name == "matmul" for node in step.nodes))
    assert product.kind is Kind.CUDNN and program.launches == 3, [step.signature for step in program.steps]
    want = one_program(fusec.compile(quantised, target="cpu"))(**data)
    assert_close(executable(**data), want, 2e-3)


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_dynamically_quantised_product_takes_three_launches(tmp_path: Path, per_channel: bool) -> None:
    """One for both ends of the range, the scale and the zero point, one that rounds, and the product with its terms."""
    layers = dynamic_products(tmp_path, QuantType.QInt8, per_channel)
    compiled = one_program(fusec.compile(layers.model, target="h200", simulate=True)).compiled
    program = fuse_steps(compiled.program, compiled.figures)
    names = [step.signature for step in program.steps if step.kind is not Kind.VIEW]
    assert program.launches == 6 == len(names), names
    for first, second, third in (names[:3], names[3:]):
        assert first.startswith("reduce") and second.startswith("div+round") and "matmul" in third, names
