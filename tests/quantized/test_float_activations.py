"""Test quantised models whose activations are not rounded to 8 bits, and the choice between both forms by time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import relative_l2
from onnx import ModelProto
from onnxruntime.quantization import QuantFormat
from quantized.models import IMAGE, quantised_cnn, run_onnxruntime, small_cnn

import fusec
from fusec.compiler.faster_form import faster_form, multiplies_bytes
from fusec.diagnostics.explain.float_edges import float_edges
from fusec.passes.base import ROUND_ACTIVATIONS, Options
from fusec.passes.quantization.run_in_integers import RunInIntegers
from fusec.reference import evaluate
from fusec.runtime import Executable
from fusec.text import parse

pytestmark = [pytest.mark.cudnn, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def compiled(model: Path | ModelProto, *disable: str) -> Executable:
    found = fusec.compile(model, target="h200", precision="fp16", simulate=True, disable=disable)
    assert isinstance(found, Executable)
    return found


@pytest.mark.parametrize("form", list(QuantFormat))
def test_without_rounded_activations_the_steps_are_those_of_the_float_model(
    form: QuantFormat, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = quantised_cnn(tmp_path, True, True, False, form)
    net = compiled(path, ROUND_ACTIVATIONS, "keep_packed_weights")
    assert multiplies_bytes(compiled(path).compiled) and not multiplies_bytes(net.compiled)
    steps, plain = ([s.signature for s in each.compiled.program.steps] for each in (net, compiled(small_cnn())))
    assert steps == plain
    assert {edge.reason for edge in float_edges(net.compiled)} == {
        "activations are not rounded to 8 bits (round_activations is left out)"
    }
    x = rng.standard_normal(IMAGE).astype(np.float32)
    got, want = np.asarray(net(x)), run_onnxruntime(str(path), {"x": x})
    assert 0 < relative_l2(got, want) < 0.05


CASE = """graph "g" (%x: f32[1,2,4,4]) {{
  %s = constant [0.5] : f32[]
  %z = constant [{zero}] : f32[]
  {before}
  %d = div({name}, %s)
  %r = round(%d)
  %a = add(%r, %z)
  %c = clip(%a) {{min={low}, max={high}}}
  %q = cast(%c) {{to={to}}}
  %p = pad(%q) {{pads=[0,0,1,1,0,0,1,1], mode="constant", value={zero}}}
  %f = cast(%p) {{to=f32}}
  %g = sub(%f, %z)
  %y = mul(%g, {scale})
  return %y
}}"""
SIGNED = {"zero": -3.0, "low": -128.0, "high": 127.0, "to": "i8", "before": "", "name": "%x", "scale": "%s"}
UNSIGNED = {**SIGNED, "zero": 0.0, "low": 0.0, "high": 255.0, "to": "u8"}


@pytest.mark.parametrize(
    ("changed", "ops"),
    [
        (SIGNED, ["pad"]),
        (UNSIGNED, ["clip", "pad"]),
        ({**UNSIGNED, "before": "%b = relu(%x)", "name": "%b"}, ["relu", "pad"]),
        ({**SIGNED, "before": "%t = constant [0.25] : f32[]", "scale": "%t"}, None),
    ],
    ids=["signed", "limits that are a relu", "a relu of its own", "another scale"],
)
def test_limits_stay_where_they_are_an_activation(
    changed: dict[str, object], ops: list[str] | None, rng: np.random.Generator
) -> None:
    graph = parse(CASE.format(**changed))
    names = [node.op.name for node in graph.nodes]
    feeds = {"x": rng.uniform(-20, 20, (1, 2, 4, 4)).astype(np.float32)}
    (want,) = evaluate(graph, feeds).values()
    RunInIntegers().run(graph, Options(disable=frozenset({ROUND_ACTIVATIONS})))
    graph.prune()
    found = [node.op.name for node in graph.nodes if node.operands]
    assert found == (ops or [name for name in names if name != "constant"])
    (got,) = evaluate(graph, feeds).values()
    assert np.abs(got - want).max() <= 0.2500001
    assert ops is None or np.abs(got - want).max() > 0


def test_the_faster_form_of_the_whole_is_taken(tmp_path: Path) -> None:
    integers, floats = compiled(quantised_cnn(tmp_path, True, True)), compiled(small_cnn())
    for times, want in (((2.0, 1.0), floats), ((1.0, 2.0), integers), ((None, 1.0), integers), ((1.0, None), integers)):
        known = dict(zip((integers, floats), times, strict=True))
        assert faster_form(integers, lambda: floats, known.__getitem__) is want
    assert faster_form(floats, lambda: pytest.fail("compiled again"), lambda _: 1.0) is floats
