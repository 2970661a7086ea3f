"""Test that the explanation names what stays in floats in a quantised model, with the reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fusec.diagnostics.explain import FloatEdge, explain, float_edges
from fusec.diagnostics.explain.float_edges import is_integer_product
from fusec.execution.compilation import Compiled
from fusec.gpu.autotune.step_choices import PrecisionTimes, TunedChoices, apply_choices, step_key
from fusec.gpu.cudnn.legality.judges import RulesJudge
from fusec.gpu.kernels import GpuFigures
from fusec.ir import Graph
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.passes.partition.equivalent_spellings import IN_HALVES
from fusec.plans.plan_record import Part
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


def compiled(source: Graph, precision: str = "fp32") -> Compiled:
    options, target = Options(precision), load("h200")
    judge = RulesJudge(options.tensor_cores)
    program = partition(run(PIPELINE, source.clone(), options), judge, target)
    return Compiled(source, program, target, options, judge)


def edges(source: Graph, precision: str = "fp32") -> dict[str, FloatEdge]:
    return {edge.value: edge for edge in float_edges(compiled(source, precision))}


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
    model = compiled(source(rng), "fp16")
    explanation = explain(model.program, model.target, model.judge)
    assert "In floats" not in str(explanation)

    text = replace(explanation, floats=float_edges(model)).reasons()
    assert "In floats, in a quantised model:" in text
    assert "its weights are not quantised" in text


RESIDUAL = """graph "g" (%x: i8[8,64,56,56], %z: f32[8,64,56,56]) {
  %s = constant [0.05] : f32[]
  %w = constant weight("w") : i8[64,64,3,3]
  %v = constant weight("v") : f32[16,8,3,3]
  %a.f = cast(%x) {to=f32}
  %a = mul(%a.f, %s)
  %d.f = cast(%w) {to=f32}
  %d = mul(%d.f, %s)
  %c = conv(%a, %d) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1]}
  %y = add(%c, %z)
  %q.d = div(%y, %s)
  %q.r = round(%q.d)
  %q.c = clip(%q.r) {min=-128.0, max=127.0}
  %q = cast(%q.c) {to=i8}
  %g = slice(%z) {starts=[0,0,0,0], sizes=[8,8,56,56], steps=[1,1,1,1]}
  %few = conv(%g, %v) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1]}
  return %q, %few
}"""


def residual(rng: np.random.Generator) -> Compiled:
    weights = {
        "w": rng.integers(-128, 128, (64, 64, 3, 3), np.int8),
        "v": rng.standard_normal((16, 8, 3, 3)).astype(np.float32),
    }
    return compiled(parse(RESIDUAL, weights), "fp16")


def test_an_edge_has_a_cost(rng: np.random.Generator) -> None:
    """The residual of 1.6 million numbers takes three more bytes each in fp32, for each read and write."""
    model = residual(rng)
    read, few = sorted(float_edges(model), key=lambda edge: edge.reason)
    assert (read.reason, few.value) == ("in f32: residual not quantised", "few")
    assert few.reason == "none of its operands is quantised: 8 channels, not 16 or more"
    size = 8 * 64 * 56 * 56
    users = len(next(v for v in model.program.graph.values() if v.name == read.value).uses)
    assert read.cost_us == pytest.approx(3 * size * (1 + users) / model.target.memory_bandwidth * 1e6)
    explanation = replace(explain(model.program, model.target, model.judge), floats=float_edges(model))
    assert f"about {read.cost_us:.1f} µs more than in 8 bits, by the cost model" in explanation.reasons()


def test_a_product_that_was_faster_in_fp16_says_so(rng: np.random.Generator) -> None:
    model = residual(rng)
    (step,) = (s for s in model.program.steps if any(is_integer_product(n) for n in s.nodes))
    key = step_key(model.program.graph, step)
    choice = (Part(len(step.nodes), "cudnn", (IN_HALVES,)),)
    program = apply_choices(model.program, {key: choice}, GpuFigures.of(model.target))
    tuned = TunedChoices(model.program, {key: choice}, {}, {}, precisions={key: PrecisionTimes(41.2, 28.9)})
    found = {edge.value: edge.reason for edge in float_edges(replace(model, program=program, tuned=tuned))}
    assert "in fp16: measured: int8 41 µs, fp16 29 µs" in found.values()


def test_sums_that_stay_integers_are_no_floats(rng: np.random.Generator) -> None:
    text = """graph "g" (%x: i8[2,8], %f: f32[2,8]) {
  %w = constant weight("w") : i8[8,16]
  %s = constant [0.05] : f32[]
  %wide = cast(%x) {to=f32}
  %y = mul(%wide, %f)
  %m = matmul(%x, %w)
  return %m, %y
}"""
    assert edges(parse(text, {"w": rng.integers(-128, 128, (8, 16), np.int8)})) == {}


def test_a_float_model_has_no_such_list() -> None:
    graph = parse('graph "g" (%x: f32[2,3], %y: f32[3,2]) {\n  %z = matmul(%x, %y)\n  return %z\n}')
    assert edges(graph) == {}


def test_a_value_whose_range_is_computed_is_named(rng: np.random.Generator) -> None:
    text = """graph "g" (%x: i8[4,8]) {
  %w = constant weight("w") : i8[8,16]
  %s = constant [0.05] : f32[]
  %p = matmul(%x, %w)
  %f = cast(%p) {to=f32}
  %y = mul(%f, %s)
  %m = reduce(%y) {kind="max", axes=[0, 1], keepdims=false}
  %d = div(%y, %m)
  %r = round(%d)
  %q = cast(%r) {to=i8}
  return %q
}"""
    dynamic = parse(text, {"w": rng.integers(-128, 128, (8, 16), np.int8)})
    assert edges(dynamic)["y"].reason == "its result is stored in f32 until its range is known at run time"
