"""Test the optimised graph as ONNX: it names every step, and onnxruntime computes the same as the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from cli.command import SHAPE, tiny
from cli.command import fusec as command
from helpers import assert_close

from examples.models import light, random_inputs, randomised
from fusec import convert, driver, frontends
from fusec.errors import FusecError
from fusec.ir import print_node
from fusec.schedule.program import Kind

pytestmark = pytest.mark.cudnn


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny(tmp_path)


def answers(model: bytes | str, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return [np.asarray(result) for result in session.run(None, feeds)]


@pytest.mark.parametrize(("precision", "rtol"), [("fp32", 1e-5), ("fp16", 5e-3)])
def test_onnxruntime_runs_the_optimised_graph(precision: str, rtol: float) -> None:
    source = randomised(onnx.load(light("squeezenet")), 3)
    feeds = random_inputs(source, 5)
    written = convert.to_bytes(driver.build(source, target="h200", precision=precision))
    onnx.checker.check_model(onnx.ModelProto.FromString(written), full_check=True)
    got, want = answers(written, feeds), answers(source.SerializeToString(), feeds)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, rtol)


def test_each_node_names_its_step_and_how_that_runs(model: Path) -> None:
    compiled = driver.build(model, target="h200", shapes={"x": (1, 8, 8, 8)})
    proto = convert.to_onnx(compiled)
    assert len({node.name for node in proto.graph.node} - {""}) == len(proto.graph.node)
    every = [{p.key: p.value for p in node.metadata_props} for node in proto.graph.node]
    told = {notes["fusec.node"]: notes for notes in every}
    assert {int(notes["fusec.step"]) for notes in told.values()} == set(range(len(compiled.program.steps)))
    for index, (step, lowered) in enumerate(zip(compiled.program.steps, compiled.lowered, strict=True)):
        for node in step.nodes:
            notes = told[print_node(node)]
            assert notes["fusec.step"] == str(index)
            assert notes["fusec.partition"] == step.signature
            assert notes["fusec.kind"] == step.kind.value
            assert notes.get("fusec.cudnn") == (None if lowered is None else str(lowered.graph))
            assert ("fusec.plans" in notes) == (step.kind is Kind.CUDNN)
            if step.kind is Kind.CUDNN:
                assert notes["fusec.result"].startswith("virtual") == (node.result in step.virtual)
    conv = next(n for n in proto.graph.node if n.op_type == "Conv")
    assert next(p.value for p in conv.metadata_props if p.key == "fusec.origin") == "conv"
    assert {p.key: p.value for p in proto.metadata_props}["fusec.target"] == "h200"
    assert {v.name for v in proto.graph.value_info} >= {conv.output[0]}


def test_the_exported_graph_compiles_to_the_same_steps(model: Path) -> None:
    compiled = driver.build(model, target="h200", shapes={"x": (1, 8, 8, 8)})
    again = driver.build(convert.to_onnx(compiled), target="h200")
    assert [s.signature for s in again.program.steps] == [s.signature for s in compiled.program.steps]


def test_a_model_too_large_for_one_file_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = driver.build(model, target="h200", shapes={"x": (1, 8, 8, 8)})
    monkeypatch.setattr(convert, "LIMIT", 1000)
    with pytest.raises(FusecError, match=r"takes \d+ bytes as ONNX, and a file of protobuf holds 1000"):
        convert.to_bytes(compiled)


def test_the_command_writes_a_file(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.onnx"
    result = command("convert", model, "-o", path, *SHAPE, "--target", "a100", "--json")
    assert result.exit_code == 0, result.stderr
    assert '"target": "a100"' in result.stdout
    x = {"x": np.random.default_rng(0).standard_normal((1, 8, 8, 8)).astype(np.float32)}
    assert_close(answers(str(path), x)[0], answers(str(model), x)[0], 1e-5)
    assert frontends.load(path).inputs[0].type.shape == (1, 8, 8, 8)
    assert "nodes in" in command("convert", model, "-o", path, *SHAPE).stdout
    assert command("convert", model).exit_code == 2
    missing = command("convert", model, "-o", tmp_path / "no" / "out.onnx", *SHAPE)
    assert missing.exit_code == 2
    assert "there is no folder" in missing.stderr
