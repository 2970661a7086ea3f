"""Test that calibration data from files and Python objects becomes batches that fit; all else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusec.errors import FusecError
from fusec.frontends import Declaration
from fusec.ir import DType
from fusec.quantization.calibration_data import ROWS, batches

FIXED = (Declaration("x", DType.F32, (4, 3)),)
OPEN = (Declaration("x", DType.F32, ("N", 3)),)
TWO = (Declaration("ids", DType.I64, ("N", 5)), Declaration("mask", DType.F32, ("N", 5)))


def data(rows: int, width: int = 3) -> np.ndarray:
    return np.arange(rows * width, dtype=np.float32).reshape(rows, width)


def shapes(given: Any, inputs: tuple[Declaration, ...]) -> list[Any]:
    return [{name: array.shape for name, array in batch.items()} for batch in batches(given, inputs)]


def test_files_are_split_into_batches_of_the_model(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=data(10))
    found = list(batches(tmp_path / "a.npz", FIXED))
    assert [batch["x"].tolist() for batch in found] == [data(10)[:4].tolist(), data(10)[4:8].tolist()]
    np.save(tmp_path / "b.npy", data(20))
    assert shapes(str(tmp_path / "b.npy"), OPEN) == [{"x": (ROWS, 3)}, {"x": (ROWS, 3)}]


def test_a_folder_is_read_in_order_of_the_names(tmp_path: Path) -> None:
    for name, start in (("2.npy", 100), ("1.npz", 0)):
        array = data(4) + start
        np.save(tmp_path / name, array) if name.endswith("y") else np.savez(tmp_path / name, x=array)
    (tmp_path / "notes.txt").write_text("not data")
    assert [float(batch["x"][0, 0]) for batch in batches(tmp_path, FIXED)] == [0.0, 100.0]


@pytest.mark.parametrize("form", ["array", "names", "list of arrays", "function", "generator", "tuples"])
def test_python_objects(form: str) -> None:
    each = [data(4), data(4) + 1]
    given: dict[str, Any] = {
        "array": np.concatenate(each),
        "names": {"x": np.concatenate(each)},
        "list of arrays": each,
        "function": lambda: ({"x": array} for array in each),
        "generator": ({"x": array} for array in each),
        "tuples": [(array,) for array in each],
    }
    found = list(batches(given[form], FIXED))
    assert [batch["x"].tolist() for batch in found] == [array.tolist() for array in each]


def test_several_inputs_by_name_or_in_order() -> None:
    ids, mask = np.ones((2, 5), np.int64), np.zeros((2, 5), np.float32)
    assert shapes([(ids, mask), {"mask": mask, "ids": ids}], TWO) == [{"ids": (2, 5), "mask": (2, 5)}] * 2
    assert shapes({"ids": ids, "mask": mask}, TWO) == [{"ids": (2, 5), "mask": (2, 5)}]


def test_floats_are_cast_to_the_inputs_float() -> None:
    (batch,) = batches([data(4).astype(np.float64)], FIXED)
    assert batch["x"].dtype == np.float32


@pytest.mark.parametrize(
    ("given", "inputs", "message"),
    [
        ([{"y": data(4)}], FIXED, "calibration batch 0: the model has no input 'y'; inputs: x"),
        ([{}], FIXED, "calibration batch 0: has no array for input 'x'"),
        ([data(4), data(5)], FIXED, r"calibration batch 1: input 'x' has shape \[4, 3\], the array \[5, 3\]"),
        (data(8, 4), FIXED, r"calibration data: input 'x' has shape \[4, 3\], the array \[8, 4\]"),
        (data(2), FIXED, "calibration data: holds 2 samples, and a batch of the model takes 4"),
        ([np.ones((4, 3), np.int32)], FIXED, "input 'x' takes float32, not int32"),
        ([(np.ones((2, 5)), np.ones((2, 5)))], TWO, "input 'ids' takes int64, not float64"),
        ([(np.ones((2, 5)),)], TWO, "holds 1 arrays, the model has 2 inputs"),
    ],
)
def test_data_that_does_not_fit_the_model_is_refused(given: Any, inputs: tuple[Declaration, ...], message: str) -> None:
    with pytest.raises(FusecError, match=message):
        list(batches(given, inputs))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_bytes(b"PK\x03\x04 no archive")
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("bad.npz", "not a readable .npz file"),
        ("objects.npy", "holds Python objects, which are never read"),
        ("none.npy", "No such file"),
        ("empty", "holds no .npz or .npy files"),
        ("data.csv", "a folder, an .npz file or an .npy file"),
    ):
        with pytest.raises(FusecError, match=message):
            list(batches(tmp_path / name, FIXED))
