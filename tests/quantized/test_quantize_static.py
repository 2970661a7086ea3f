"""Test a CNN that onnxruntime quantised: onnxruntime's results, in about as many steps as the float model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import one_program, quick, relative_l2
from onnxruntime.quantization import QuantFormat
from quantized.models import IMAGE, quantised_cnn, run_onnxruntime, small_cnn

import fusec
from fusec.ir import DType, Node
from fusec.ops import Conv, MatMul
from fusec.schedule.program import Kind

pytestmark = [
    pytest.mark.cudnn,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

VARIANTS = {
    "signed, symmetric, per channel": (True, True, False),
    "signed, with zero points": (False, True, False),
    "unsigned, with zero points, per tensor": (False, False, True),
}


def products(nodes: tuple[Node, ...]) -> list[Node]:
    return [n for n in nodes if isinstance(n.op, (Conv, MatMul))]


@pytest.mark.parametrize("title", quick(VARIANTS, ["signed, with zero points"]))
def test_a_quantised_cnn_runs_in_integers(title: str, tmp_path: Path, rng: np.random.Generator) -> None:
    symmetric, per_channel, unsigned = VARIANTS[title]
    path = quantised_cnn(tmp_path, symmetric, per_channel, unsigned)
    net = one_program(fusec.compile(path, target="h200", precision="fp32", simulate=True, rounding="source"))
    program = net.compiled.program
    anchored = [step for step in program.steps if products(step.nodes)]
    assert len(anchored) == 5
    for step in anchored:  # each stores rounded integers
        assert step.kind is Kind.CUDNN
        assert products(step.nodes)[0].operands[0].type.dtype is DType.I8
        assert [v.type.dtype for v in step.outputs] == [DType.I8]

    x = rng.standard_normal(IMAGE).astype(np.float32)
    want = run_onnxruntime(str(path), {"x": x})
    step = np.unique(np.abs(np.diff(np.unique(want)))).min()
    assert np.abs(np.asarray(net(x)) - want).max() <= 1.01 * step


def test_the_quantised_cnn_takes_few_more_steps_than_the_float_one(tmp_path: Path, rng: np.random.Generator) -> None:
    """It rounds its input, the mean and the result; the residual block is one step, as in floats."""
    path = quantised_cnn(tmp_path, True, True)
    float_net = one_program(fusec.compile(small_cnn(), target="h200", precision="fp16", simulate=True))
    net = one_program(fusec.compile(path, target="h200", precision="fp16", simulate=True))
    extra = net.compiled.program.launches - float_net.compiled.program.launches
    assert extra <= 4
    net.assert_fused("conv+cast+mul+bias+clip+add*round+clip+cast")
    x = rng.standard_normal(IMAGE).astype(np.float32)
    want = run_onnxruntime(str(path), {"x": x})
    assert relative_l2(np.asarray(net(x)), want) < 0.02


@pytest.mark.parametrize("title", quick(VARIANTS, ["signed, with zero points"]))
def test_integer_operators_run_as_their_qdq_form_does(title: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """QLinearConv, QLinearAdd, QGemm and the others make the steps that Q/DQ nodes around float ops make."""
    symmetric, per_channel, unsigned = VARIANTS[title]
    paths = [quantised_cnn(tmp_path, symmetric, per_channel, unsigned, form) for form in QuantFormat]
    options: dict[str, Any] = {"target": "h200", "precision": "fp16", "simulate": True, "rounding": "source"}
    nets = [one_program(fusec.compile(path, **options)) for path in paths]
    assert len({net.compiled.program.launches for net in nets}) == 1
    for net in nets:
        found = [node for step in net.compiled.program.steps for node in products(step.nodes)]
        assert len(found) == 5 and {node.operands[0].type.dtype for node in found} == {DType.I8}
        assert net.explain().floats == ()
    x = rng.standard_normal(IMAGE).astype(np.float32)
    want = run_onnxruntime(str(paths[0]), {"x": x})
    assert all(relative_l2(np.asarray(net(x)), want) < 0.02 for net in nets)
