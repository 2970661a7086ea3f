"""Test `.fusec` files that are written without the weights that only the imported model has."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli.command import fusec
from lowering.lowers_judge import LowersJudge
from onnx import helper, numpy_helper

from fusec.artifacts import container, fusec_file
from fusec.diagnostics.explain import explain
from fusec.diagnostics.verify import verify
from fusec.errors import ModelError
from fusec.execution.compilation import Compiled
from fusec.exporters.onnx import to_onnx
from fusec.ir import print_graph
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.plans.verdict import Plan
from fusec.runtime import Executable, SimulatorBackend
from fusec.targets.target import load as load_target
from fusec.text import parse

LINEAR = """
graph "linear" (%x: f32[8,256]) {
  %w = constant weight("w") : f32[256,512]
  %b = constant weight("b") : f32[512]
  %y = matmul(%x, %w)
  %z = add(%y, %b)
  return %z
}"""
WEIGHT_BYTES = 256 * 512 * 4


def linear(precision: str) -> Compiled:
    rng = np.random.default_rng(1)
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("w", (256, 512)), ("b", (512,)))}
    source, options, goal = parse(LINEAR, weights), Options(precision), load_target("h200")
    graph = run(PIPELINE, source.clone(), options)
    return Compiled(source, partition(graph, LowersJudge((Plan(1, (), True),)), goal), goal, options, None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "linear.fusec"


def result(compiled: Compiled) -> np.ndarray:
    x = np.random.default_rng(2).standard_normal((8, 256)).astype(np.float32)
    return np.asarray(Executable(compiled, SimulatorBackend())(x))


def manifest(path: Path) -> dict[str, object]:
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("manifest.json"))


def test_the_file_holds_each_weight_once(path: Path) -> None:
    before = linear("fp16")
    fusec_file.save(path, [before], sources=True)
    assert path.stat().st_size > 1.5 * WEIGHT_BYTES
    assert manifest(path)["format"] == 1
    fusec_file.save(path, [before])
    assert path.stat().st_size < 0.6 * WEIGHT_BYTES
    assert manifest(path)["format"] == 3
    after = fusec_file.load(path, "h200").compiled
    assert np.array_equal(result(after), result(before))
    assert print_graph(after.source, locations=True) == print_graph(before.source, locations=True)
    assert str(explain(after.program, after.target)) == str(explain(before.program, before.target))
    labels = [[v.literal.label for v in c.source.values() if v.literal is not None] for c in (after, before)]
    assert labels[0] == labels[1]


def test_a_file_whose_program_has_all_weights_lacks_none(path: Path) -> None:
    fusec_file.save(path, [linear("fp32")])
    assert manifest(path)["format"] == 1
    after = fusec_file.load(path, "h200").compiled
    assert after.has_sources
    assert {check.level for check in verify(after).checks} == {"passes", "body", "lowered"}


def test_verify_says_what_it_cannot_check(path: Path) -> None:
    fusec_file.save(path, [linear("fp16")], sources=True)
    whole = verify(fusec_file.load(path, "h200").compiled)
    assert not whole.notes
    fusec_file.save(path, [linear("fp16")])
    part = verify(fusec_file.load(path, "h200").compiled)
    assert part.ok
    assert part.checks == tuple(check for check in whole.checks if check.level != "passes")
    assert part.to_json()["notes"] == list(part.notes)
    assert "note: passes: not checked" in str(part)


def test_what_needs_the_weights_is_refused_with_the_remedy(path: Path) -> None:
    fusec_file.save(path, [linear("fp16")])
    after = fusec_file.load(path, "h200").compiled
    with pytest.raises(ModelError, match=r"linear\.fusec: was written without the weights of the imported model"):
        to_onnx(after.source)
    again = path.with_name("again.fusec")
    with pytest.raises(ModelError, match="was written without the weights"):
        fusec_file.save(again, [after], sources=True)
    fusec_file.save(again, [after])
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("text", ["[]", "{", '{"d": ["f32[2]"]}', '{"d": ["f33[2]", "w"]}', '{"d": 3}'])
def test_a_malformed_list_of_weights(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fusec_file.save(path, [linear("fp16")])
    monkeypatch.setattr(container.Reader, "text", _replaced(container.Reader.text, text))
    with pytest.raises(ModelError, match=r"source\.json"):
        fusec_file.load(path, "h200")


def _replaced(text: Callable[[container.Reader, str], str], other: str) -> Callable[[container.Reader, str], str]:
    return lambda self, name: other if name == "source.json" else text(self, name)


def test_the_command(tmp_path: Path) -> None:
    weight = np.random.default_rng(3).standard_normal((256, 512)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", 1, [8, 256])],
        [helper.make_tensor_value_info("y", 1, [8, 512])],
        [numpy_helper.from_array(weight, "w")],
    )
    model, file = tmp_path / "linear.onnx", tmp_path / "linear.fusec"
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), model)
    options = ("--target", "h200", "--precision", "fp16")
    assert fusec("compile", model, *options, "--sources", "-o", file).exit_code == 0
    assert fusec("run", file, "--compare", "onnxruntime").exit_code == 0
    with_sources = file.stat().st_size
    assert fusec("compile", model, *options, "-o", file).exit_code == 0
    assert file.stat().st_size < with_sources - 0.9 * WEIGHT_BYTES
    assert fusec("run", file).exit_code == 0
    checked = json.loads(fusec("verify", file, "--json").stdout)
    assert checked["ok"]
    assert len(checked["notes"]) == 1
    refused = fusec("run", file, "--compare", "onnxruntime")
    assert refused.exit_code == 2
    assert "was written without the weights of the imported model" in refused.stderr
    useless = fusec("compile", model, *options, "--sources")
    assert useless.exit_code == 2
    assert "--sources needs -o FILE.fusec" in useless.stderr
