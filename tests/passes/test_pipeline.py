"""Test the pipeline as a whole, on the simplest model."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_close

from fusec.execution.compile_options import CompileOptions
from fusec.passes import PIPELINE, names
from fusec.passes.base import Options, run
from fusec.passes.pass_names import RENAMED
from fusec.reference import evaluate
from fusec.testing.case import Case
from fusec.text import parse

CONV_BN = """graph "main" (%x: f32[1,4,8,8]) {
  %w = constant weight("w") : f32[8,4,3,3]
  %p = constant weight("p") : f32[8]
  %c = conv(%x, %w) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1], groups=1}
  %n = batch_norm(%c, %p, %p, %p, %p)
  %r = relu(%n)
  return %r
}"""


def test_conv_batchnorm_relu_becomes_conv_add_relu(rng: np.random.Generator) -> None:
    weights = {
        "w": rng.standard_normal((8, 4, 3, 3)).astype(np.float32),
        "p": rng.uniform(0.5, 1.5, 8).astype(np.float32),
    }
    graph, x = parse(CONV_BN, weights), rng.standard_normal((1, 4, 8, 8)).astype(np.float32)
    want = evaluate(graph, {"x": x})["r"]
    after = run(PIPELINE, graph)
    assert [n.op.name for n in after.nodes if n.op.name not in ("constant", "relayout")] == ["conv", "add", "relu"]
    assert_close(evaluate(after, {"x": x})["r"], want, 1e-6)


def test_a_pass_has_the_name_of_its_file_and_class() -> None:
    for step in PIPELINE:
        assert step.name == type(step).__module__.rpartition(".")[2]
        assert step.name.replace("_", "") == type(step).__name__.lower()


@pytest.mark.parametrize("name", RENAMED)
def test_a_name_that_a_pass_had_before_leaves_it_out(name: str) -> None:
    """Scripts, `.fusec` files and saved findings use old names. They are not listed, so new findings do not."""
    current = frozenset({RENAMED[name]})
    assert current <= names()
    assert name not in names()
    assert CompileOptions(disable=name).disable == current
    assert Options.from_names("fp32", [name]).disable == current
    saved = {**Case().to_json(), "disable": [name]}
    assert Case.from_json(saved).disable == current
