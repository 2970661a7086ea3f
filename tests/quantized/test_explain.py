"""The explanation names what stays in floats in a quantised model, with the reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fusec.diagnostics.explain import FloatEdge, explain, float_edges
from fusec.gpu.cudnn.partition_oracles import RulesJudge
from fusec.ir import Graph
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.targets.target import load
from fusec.text import parse

MODEL = """graph "g" (%x: i8[2,4,8], %v: i8[2,8,5], %f: f32[2,5,4]) {
  %s = constant [0.05] : f32[]
  %z = constant [-7.0] : f32[]
  %w = constant weight("w") : i8[8,16]
  %u = constant weight("u") : f32[8,16]
  %a.f = cast(%x) {to=f32}
  %a = mul(%a.f, %s)
  %b.z = sub(%a.f, %z)
  %b = mul(%b.z, %s)
  %c.f = cast(%v) {to=f32}
  %c = mul(%c.f, %s)
  %d.f = cast(%w) {to=f32}
  %d = mul(%d.f, %s)
  %integers = matmul(%a, %d)
  %y = softmax(%integers) {axis=-1}
  %weights = matmul(%a, %u)
  %zeros = matmul(%b, %c)
  %floats = matmul(%zeros, %f)
  return %y, %weights, %floats
}"""


def edges(source: Graph, precision: str = "fp32") -> dict[str, FloatEdge]:
    options, target = Options(precision), load("h200")
    graph = run(PIPELINE, source.clone(), options)
    program = partition(graph, RulesJudge(options.tensor_cores), target)
    return {edge.value: edge for edge in float_edges(source, program, options)}


def source(rng: np.random.Generator) -> Graph:
    weights = {"w": rng.integers(-128, 128, (8, 16), np.int8), "u": rng.standard_normal((8, 16)).astype(np.float32)}
    return parse(MODEL, weights)


def test_what_stays_in_floats_has_a_reason(rng: np.random.Generator) -> None:
    found = edges(source(rng))
    reasons = {name: edge.reason for name, edge in found.items()}
    assert reasons == {
        "integers": "its result is stored in f32 for softmax",
        "weights": "its weights are not quantised",
        "zeros": "%x has a zero point, and the other operand is no constant matrix",
        "floats": "none of its operands is quantised",
    }


def test_the_printed_explanation_groups_them(rng: np.random.Generator) -> None:
    model = source(rng)
    target, options = load("h200"), Options("fp16")
    judge = RulesJudge(options.tensor_cores)
    program = partition(run(PIPELINE, model.clone(), options), judge, target)
    explanation = explain(program, target, judge)
    assert "In floats" not in str(explanation)

    text = replace(explanation, floats=float_edges(model, program, options)).reasons()
    assert "In floats, in a quantised model:" in text
    assert "its weights are not quantised" in text


def test_a_float_model_has_no_such_list() -> None:
    graph = parse('graph "g" (%x: f32[2,3], %y: f32[3,2]) {\n  %z = matmul(%x, %y)\n  return %z\n}')
    assert edges(graph) == {}
