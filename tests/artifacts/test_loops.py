"""Test what holds a compiled loop, whose op has a graph as an attribute: files, locks, explanations and reports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from lowering.lowers_judge import LowersJudge

import fusec
from fusec import convert
from fusec.artifacts import fusec_file, read_file
from fusec.errors import ModelError
from fusec.execution.compilation import Compiled
from fusec.ir import Graph, HostArray
from fusec.lockfile import toml_text
from fusec.ops import Scan
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.plans.verdict import Plan
from fusec.reference import evaluate
from fusec.runtime import Executable, SimulatorBackend
from fusec.targets.target import load as load_target
from fusec.text import parse

LOOP = """graph "g" (%h: f32[2,8], %x: f32[9,2,8]) {
  %w = constant weight("w") : f32[8,8]
  %e = exp(%x)
  %y, %r = scan(%h, %e, %w) {body=graph "a \\"body\\"" (%h: f32[2,8], %x: f32[2,8], %w: f32[8,8]) {
    %i = constant [inf] : f32[]
    %c = constant [0.1] : f32[1]
    %m = matmul(%h, %w)
    %s = add(%m, %x)
    %t = tanh(%s)
    %l = min(%t, %i)
    %y = mul(%l, %c)
    return %y, %s
  }, steps=9, states=1, sequences=1}
  %z = exp(%r)
  return %z, %y
}"""


@pytest.fixture
def loop(rng: np.random.Generator) -> Graph:
    return parse(LOOP, {"w": rng.standard_normal((8, 8)).astype(np.float32)})


def compiled(graph: Graph, precision: str = "fp32") -> Compiled:
    options, judge, target = Options(precision), LowersJudge((Plan(1, (), False, 0, False),)), load_target("h200")
    return Compiled(graph, partition(run(PIPELINE, graph.clone(), options), judge, target), target, options, judge)


def feeds_of(graph: Graph, rng: np.random.Generator) -> dict[str, HostArray]:
    return {v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_saved_loop_computes_the_same(precision: str, loop: Graph, tmp_path: Path, rng: np.random.Generator) -> None:
    c, feeds = compiled(loop, precision), feeds_of(loop, rng)
    fusec_file.save(tmp_path / "m.fusec", [c], sources=True)
    back = read_file.load(tmp_path / "m.fusec", "h200").compiled
    for graph, other in ((back.graph, c.graph), (back.source, c.source)):
        assert str(graph) == str(other)
        (op,), (twin,) = ([n.op for n in g.nodes if isinstance(n.op, Scan)] for g in (graph, other))
        assert op == twin
    first, again = (Executable(each, SimulatorBackend()).run(None, feeds) for each in (c, back))
    for a, b, right in zip(first, again, evaluate(loop, feeds).values(), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.abs(a - right).max() < (1e-5 if precision == "fp32" else 5e-2) * np.abs(right).max()


def test_a_changed_body_in_a_file_is_refused(loop: Graph, tmp_path: Path) -> None:
    """As every other text of a file: a body that the ops refuse is an error with its place."""
    text = str(loop).replace("%m = matmul(%h, %w)", "%m = matmul(%x, %h)")
    with pytest.raises(ModelError, match=r"line \d+, column \d+"):
        parse(text, {"w": np.zeros((8, 8), np.float32)})


def test_a_loop_is_one_row_of_what_is_explained(loop: Graph) -> None:
    exe = Executable(compiled(loop), SimulatorBackend())
    explanation = exe.explain()
    assert [step.kind for step in explanation.steps] == ["cudnn", "kernel", "cudnn"]
    (declined,) = explanation.left_out
    assert "scan" in str(declined) and "one launch" in str(declined)
    json.dumps(explanation.totals)


def test_a_loop_is_verified_timed_and_locked(loop: Graph) -> None:
    exe = Executable(compiled(loop), SimulatorBackend())
    assert exe.verify().ok
    bench = exe.bench(runs=1)
    assert len(bench.steps) == 3
    lock = exe.lock()
    assert toml_text.parse(toml_text.text_of(lock)) == lock


def test_programs_of_different_bodies_differ_in_their_text(loop: Graph) -> None:
    other = parse(str(loop).replace("tanh", "sin"), {"w": np.ones((8, 8), np.float32)})
    texts = {str(compiled(graph).program.steps[1]) for graph in (loop, other)}
    assert len(texts) == 2


def test_a_compiled_loop_is_converted_to_onnx(loop: Graph, rng: np.random.Generator) -> None:
    model, feeds = convert.to_onnx(compiled(loop)), feeds_of(loop, rng)
    (node,) = (n for n in model.graph.node if n.op_type == "Scan")
    assert {p.key: p.value for p in node.metadata_props}["fusec.kind"] == "kernel"
    got = fusec.compile(model.SerializeToString(), target="cpu").run(None, feeds)
    for array, right in zip(got, evaluate(loop, feeds).values(), strict=True):
        np.testing.assert_allclose(array, right, rtol=1e-4, atol=1e-5)
