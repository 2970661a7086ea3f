"""Test `fusec run` of a model whose inputs and outputs are strings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cli.command import fusec
from frontends.onnx.models import info, model
from onnx import TensorProto, helper


@pytest.fixture
def joined(tmp_path: Path) -> Path:
    inputs = [info("x", [3], TensorProto.STRING), info("y", [1], TensorProto.STRING)]
    outputs = [info("z", [3], TensorProto.STRING), info("same", [3], TensorProto.BOOL)]
    nodes = [helper.make_node("StringConcat", ["x", "y"], ["z"]), helper.make_node("Equal", ["x", "y"], ["same"])]
    path = tmp_path / "joined.onnx"
    path.write_bytes(model(nodes, inputs, outputs).SerializeToString())
    return path


def test_inputs_are_random_words(joined: Path, tmp_path: Path) -> None:
    command = ["run", joined, "--target", "h200", "-o", tmp_path / "out.npz", "--compare", "onnxruntime"]
    result = fusec(*command, "--json")
    assert result.exit_code == 0, result.stderr
    (z, same) = json.loads(result.stdout)["outputs"]
    assert (z["dtype"], z["shape"], z["mean"], z["error"]) == ("string", [3], None, 0)
    assert (same["dtype"], same["error"]) == ("bool", 0)
    with np.load(tmp_path / "out.npz", allow_pickle=False) as written:
        assert {len(text) for text in written["z"].tolist()} == {8}  # two random words of four letters
        assert len(set(written["z"].tolist())) > 1
    assert "z: string [3]\n" in fusec(*command).stdout


def test_inputs_and_constants_are_read_from_files(joined: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array(["a", "bb", "é"]))
    np.save(tmp_path / "y.npy", np.array(["bb"]))
    given = ["--input", f"x={tmp_path / 'x.npy'}", "--constant", f"y={tmp_path / 'y.npy'}"]
    result = fusec("run", joined, "--target", "h200", *given, "-o", tmp_path / "out.npz")
    assert result.exit_code == 0, result.stderr
    with np.load(tmp_path / "out.npz", allow_pickle=False) as written:
        assert written["z"].tolist() == ["abb", "bbbb", "ébb"]
        assert written["same"].tolist() == [False, True, False]


def test_numbers_are_no_strings(joined: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3, np.float32))
    result = fusec("run", joined, "--target", "h200", "--input", f"x={tmp_path / 'x.npy'}")
    assert result.exit_code == 2
    assert "input 'x' takes strings, not float32" in result.stderr
