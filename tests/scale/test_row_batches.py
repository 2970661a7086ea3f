"""Test that rows are split into batches and joined, and read from and written to files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_close

from fusec.errors import ExecutionError, FusecError
from fusec.scale.batch_pipeline import loaded_pipeline
from fusec.scale.extras import extra_module
from fusec.scale.model_recipe import ModelRecipe, loaded
from fusec.scale.row_batches import BatchOptions, run_rows
from fusec.scale.row_files import read_rows, result_path, row_files, write_rows

Array = np.ndarray[Any, Any]


@pytest.fixture
def recipe(model: Path) -> ModelRecipe:
    return ModelRecipe.of(model, {"target": "cpu"})


def test_rows_are_cut_to_the_models_batch(
    recipe: ModelRecipe, meaning: Callable[[Array], Array], rng: np.random.Generator
) -> None:
    run = loaded_pipeline(recipe)
    assert loaded_pipeline(recipe) is run, "it is made once"
    assert run.model is loaded(recipe)
    rows = rng.standard_normal((11, 6)).astype(np.float32)
    assert_close(run_rows(run, {"x": rows[:8], "unused": rows})["z"], meaning(rows[:8]), 1e-6)
    assert_close(run_rows(run, {"x": rows}, BatchOptions(pad=True))["z"], meaning(rows), 1e-6)
    assert run_rows(run, {"x": rows[:0]})["z"].shape == (0, 6)
    with pytest.raises(ExecutionError, match="the last batch of %x has 3 rows, and the model takes 4"):
        run_rows(run, {"x": rows})


def test_a_model_that_takes_any_number_of_rows_is_not_padded(tmp_path: Path, rng: np.random.Generator) -> None:
    """Its results may depend on other rows."""
    from onnx import TensorProto, helper, save

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"], axis=0)], "g", [x], [y])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), tmp_path / "m.onnx")
    run = loaded_pipeline(ModelRecipe.of(tmp_path / "m.onnx", {"target": "cpu", "shapes": {"n": "1..5"}}))
    rows = rng.standard_normal((7, 2)).astype(np.float32)
    wanted = [np.exp(part) / np.exp(part).sum(0) for part in (rows[:5], rows[5:])]
    assert_close(run_rows(run, {"x": rows}, BatchOptions(rows=5, pad=True))["y"], np.concatenate(wanted), 1e-6)


def test_a_model_without_rows_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "m.txt"
    path.write_text('graph "g" (%x: f32[4,6], %w: f32[3,6]) {\n %y = relu(%x)\n %v = relu(%w)\n return %y, %v\n}')
    rows = rng.standard_normal((4, 6)).astype(np.float32)
    with pytest.raises(ExecutionError, match="the inputs have no first dim in common"):
        run_rows(loaded_pipeline(ModelRecipe.of(path, {"target": "cpu"})), {"x": rows, "w": rows})
    path = tmp_path / "sum.txt"
    path.write_text('graph "g" (%x: f32[4,6]) {\n %y = transpose(%x) {perm=[1,0]}\n return %y\n}')
    with pytest.raises(ExecutionError, match=r"output %y has the shape \[6, 4\]: no row for each"):
        run_rows(loaded_pipeline(ModelRecipe.of(path, {"target": "cpu"})), {"x": rows})
    with pytest.raises(ExecutionError, match="the same number of rows"):
        run_rows(loaded_pipeline(ModelRecipe.of(tmp_path / "m.txt", {"target": "cpu"})), {"x": rows, "w": rows[:3]})


@pytest.mark.parametrize("ending", [".npy", ".npz", ".parquet"])
def test_files_of_rows(ending: str, tmp_path: Path, rng: np.random.Generator) -> None:
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / "model.txt"
    path.write_text('graph "g" (%x: f32[4,2,3]) {\n %y = relu(%x)\n return %y\n}')
    run = loaded(ModelRecipe.of(path, {"target": "cpu"}))
    rows = rng.standard_normal((8, 2, 3)).astype(np.float32)
    file = tmp_path / f"rows{ending}"
    write_rows(file, {"x": rows})
    assert row_files(tmp_path, tmp_path / "out") == [file]
    assert_close(read_rows(file, run)["x"], rows, 0)
    assert result_path(file, tmp_path / "out", run.outputs).name == file.name
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ExecutionError, match=f"rows{ending}: cannot be read"):
        read_rows(file, run)
    with pytest.raises(FusecError, match="has no file of rows"):
        row_files(tmp_path / "empty", tmp_path / "out")


def test_a_missing_extra_is_named() -> None:
    with pytest.raises(FusecError, match=r"no_such_package is not installed .* pip install 'fusec\[dask\]'"):
        extra_module("no_such_package", "dask")
