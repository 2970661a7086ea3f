"""Test `fusec run` with several models and folders, and comparisons of models that are no ONNX files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli.command import SHAPE, fusec

pytestmark = pytest.mark.cudnn

TEXT = 'graph "g" (%x: f32[1,8,8,8]) {\n  %r = relu(%x)\n  %y = sign(%r)\n  return %y\n}'


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "tiny.fusec"
    assert fusec("compile", model, *SHAPE, "--target", "h200", "-o", path).exit_code == 0
    return path


@pytest.fixture
def folder(model: Path, saved: Path, tmp_path: Path) -> Path:
    (tmp_path / "models" / "deep").mkdir(parents=True)
    shutil.copy(model, tmp_path / "models" / "deep" / "b.onnx")
    shutil.copy(saved, tmp_path / "models" / "a.fusec")
    (tmp_path / "models" / "notes.md").write_text("no model")
    return tmp_path / "models"


def test_a_compiled_model_is_compared_by_the_graph_it_carries(saved: Path) -> None:
    result = fusec("run", saved, "--compare", "onnxruntime", "--json")
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)["outputs"]
    assert 0 < row["error"] < 1e-5, "not compared with itself: the sums have another order"


def test_a_compiled_model_that_is_wrong_is_found(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusec.runtime import Executable

    right = Executable.run
    monkeypatch.setattr(Executable, "run", lambda self, names, feeds: [1.01 * y for y in right(self, names, feeds)])
    result = fusec("run", saved, "--compare", "onnxruntime")
    assert (result.exit_code, "differs from onnxruntime by more than" in result.stderr) == (1, True)


def test_a_graph_in_text_form_is_compared(tmp_path: Path) -> None:
    (tmp_path / "net.txt").write_text(TEXT)
    assert fusec("run", tmp_path / "net.txt", "--compare", "onnxruntime").exit_code == 0
    bits = 'graph "g" (%s: u64[2]) {\n  %y = random_bits(%s) {shape=[4]}\n  return %y\n}'
    (tmp_path / "bits.txt").write_text(bits)
    result = fusec("run", tmp_path / "bits.txt", "--compare", "onnxruntime")
    assert result.exit_code == 2
    assert "--compare needs its graph as ONNX, which cannot express it: " in result.stderr


def test_each_model_has_a_line(folder: Path, model: Path) -> None:
    result = fusec("run", model, folder, folder, "--target", "h200", *SHAPE, "--compare", "onnxruntime")
    lines = result.stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        str(model),
        str(folder / "a.fusec"),
        str(folder / "deep" / "b.onnx"),
    ]
    # --shape is an error for the file with one program, and none for the others
    assert [line.split(": ")[1].split(",")[0] for line in lines] == ["ok", "error", "ok"]
    assert "4 steps (4 launches), in simulation in" in lines[0] and ", distance " in lines[0]
    assert result.exit_code == 2
    assert result.stderr == "fusec: error: 1 of 3 models failed\n"


def test_the_status_is_that_of_the_worst(folder: Path, model: Path, tmp_path: Path) -> None:
    both = ("run", model, folder / "deep", *SHAPE, "--json")
    good = fusec(*both, "--compare", "onnxruntime")
    assert (good.exit_code, good.stderr) == (0, "")
    rows = json.loads(good.stdout)["models"]
    assert [row["status"] for row in rows] == [0, 0]
    assert all(row["outputs"][0]["error"] < 1e-5 for row in rows)
    wrong = fusec(*both, "--precision", "bf16", "--compare", "onnxruntime", "--tolerance", "1e-9")
    assert wrong.exit_code == 1
    assert [row["status"] for row in json.loads(wrong.stdout)["models"]] == [1, 1]
    missing = fusec("run", model, tmp_path / "none.onnx", *SHAPE, "--json")
    assert missing.exit_code == 2
    assert [row["status"] for row in json.loads(missing.stdout)["models"]] == [0, 2]


def test_mistakes_with_several_models(folder: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for given, words in (
        ((tmp_path / "empty",), "has no file that ends in .onnx"),
        ((model, folder, "-o", tmp_path / "y.npz"), "--output is for one model, not for 3"),
        ((model, folder, "--input", f"x={tmp_path / 'x.npy'}"), "x.npy"),
    ):
        result = fusec("run", *given)
        assert (result.exit_code, result.stdout) == (2, "")
        assert words in result.stderr
