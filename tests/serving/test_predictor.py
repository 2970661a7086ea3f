"""Test a predictor: any number of rows, on the batch sizes of a file, in any process."""

from __future__ import annotations

import pickle  # noqa: TID251 - what is tested is that a predictor can be pickled
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from frontends.onnx.models import info, model, run
from helpers import assert_close
from serving.files import classifier, images, node, saved, weights

import fusec
from fusec.errors import ExecutionError, FusecError, ModelError, TargetError
from fusec.serving.batch_sizes import split_rows

pytestmark = [pytest.mark.cudnn, pytest.mark.usefixtures("no_gpu")]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("files"), [1, 4])


def check(predictor: fusec.Predictor, rows: int) -> None:
    x = images(rows, seed=rows)
    got = predictor({"image": x})
    logits, label = run(classifier(), {"image": x}) if rows else (np.zeros((0, 5)), np.zeros(0))
    assert list(got) == ["logits", "label"]
    assert got["logits"].shape == (rows, 5)
    assert_close(got["logits"], logits, 1e-5)
    np.testing.assert_array_equal(got["label"], label)


def test_rows_are_split_and_padded(file: Path) -> None:
    predictor = fusec.Predictor(file)
    assert "not loaded" in repr(predictor)
    for rows in (1, 2, 4, 5, 11, 0):
        check(predictor, rows)
    assert predictor.sizes.largest == 4
    assert predictor.device == "simulated"
    assert [(s.name, s.shape, s.dtype) for s in predictor.inputs] == [("image", ("batch", 3, 8, 8), np.uint8)]
    assert list(predictor({"image": images(3)}, ["label"])) == ["label"]


def test_a_file_of_one_batch_takes_any_number(tmp_path: Path) -> None:
    predictor = fusec.Predictor(saved(tmp_path, [3]))
    for rows in (1, 3, 7):
        check(predictor, rows)
    assert isinstance(predictor.executable, fusec.Executable)


def test_runs_cover_all_rows() -> None:
    assert split_rows(11, [1, 4]) == [(0, 4, 4), (4, 4, 4), (8, 3, 4)]
    assert split_rows(9, [1, 4]) == [(0, 4, 4), (4, 4, 4), (8, 1, 1)]
    assert split_rows(3, [8]) == [(0, 3, 8)]


def test_pickled_by_path_and_loaded_in_the_worker(file: Path) -> None:
    predictor = fusec.Predictor(file, device="simulated", warm_up=False).load()
    data = pickle.dumps(predictor)
    assert len(data) < 500
    again = pickle.loads(data)  # noqa: S301 - as above
    assert "not loaded" in repr(again)
    check(again, 2)
    program = (
        "import pickle, sys, numpy; p = pickle.loads(sys.stdin.buffer.read());"
        "print(p({'image': numpy.full((2, 3, 8, 8), 7, numpy.uint8)})['logits'].shape, p.device)"
    )
    told = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, check=True)
    assert told.stdout == b"(2, 5) simulated\n"


def test_what_does_not_fit_is_refused(file: Path, tmp_path: Path) -> None:
    predictor = fusec.Predictor(file)
    with pytest.raises(ExecutionError, match="no input %picture"):
        predictor({"picture": images(1)})
    with pytest.raises(ExecutionError, match=r"takes uint8, not float32"):
        predictor({"image": images(2).astype(np.float32)})
    with pytest.raises(ExecutionError, match=r"has shape"):
        predictor({"image": images(2)[:, :2]})
    with pytest.raises(ExecutionError, match="no output"):
        predictor({"image": images(2)}, ["none"])
    with pytest.raises(ModelError, match="No such file"):
        fusec.Predictor(tmp_path / "none.fusec").load()


def test_a_gpu_that_is_not_there(file: Path) -> None:
    with pytest.raises(TargetError, match="GPU 3 was asked for, but this machine has no NVIDIA driver"):
        fusec.Predictor(file, device=3).load()
    with pytest.raises(TargetError, match="must be auto, simulated or the number of a GPU"):
        fusec.Predictor(file, device="gpu").load()


def test_rows_that_are_no_batch_are_not_joined(tmp_path: Path) -> None:
    """The result of a row depends on its number, so a row must not move within a batch."""
    nodes = [node("Add", ["x", "number"], ["y"])]
    proto = model(nodes, [info("x", [3, 2])], [info("y", [3, 2])], {"number": weights(0, 3, 1)})
    path = tmp_path / "numbered.fusec"
    exe = fusec.compile(proto, target="h200", simulate=True)
    assert isinstance(exe, fusec.Executable)
    exe.save(path)
    predictor = fusec.Predictor(path)
    assert predictor.sizes.largest == 0
    assert "rows meet different numbers of operand" in predictor.sizes.refused
    x = weights(5, 3, 2)
    assert_close(predictor({"x": x})["y"], x + weights(0, 3, 1), 1e-6)
    with pytest.raises(FusecError, match=r"has shape \[3, 2\], the array \[2, 2\]"):
        predictor({"x": x[:2]})


def test_inputs_with_different_numbers_of_rows(tmp_path: Path) -> None:
    proto = model([node("Add", ["a", "b"], ["y"])], [info("a", [4, 2]), info("b", [4, 2])], [info("y", [4, 2])], {})
    path = tmp_path / "sum.fusec"
    exe = fusec.compile(proto, target="h200", simulate=True)
    assert isinstance(exe, fusec.Executable)
    exe.save(path)
    with pytest.raises(ExecutionError, match=r"different numbers of rows: %a 2, %b 3"):
        fusec.Predictor(path)({"a": weights(0, 2, 2), "b": weights(0, 3, 2)})


def test_rows_of_a_file_without_source_weights_are_joined(tmp_path: Path) -> None:
    """The proof that rows may be joined compares the weights of two sizes by their digests."""
    w = np.random.default_rng(0).standard_normal((32, 4096)).astype(np.float32)
    large = model([node("MatMul", ["x", "w"], ["y"])], [info("x", ["N", 32])], ["y"], {"w": w})
    made = fusec.compile(large, target="h200", precision="fp16", shapes={"N": (1, 4)}, buckets={"N": (1, 4)})
    made.save(tmp_path / "large.fusec")
    predictor = fusec.Predictor(tmp_path / "large.fusec").load()
    assert not predictor.executable.at({"x": (4, 32)}).compiled.has_sources  # type: ignore[union-attr]
    assert predictor.sizes.refused == "" and predictor.sizes.largest == 4
