"""Read and write rows of arrays as files: .npy, .npz and Parquet."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fusec.errors import ExecutionError, FusecError
from fusec.scale.extras import extra_module
from fusec.scale.row_batches import Rows, row_shape
from fusec.system.atomic_write import written

if TYPE_CHECKING:
    from fusec.scale.model_recipe import Runnable

ENDINGS = (".npy", ".npz", ".parquet")


def row_files(folder: Path, results: Path) -> list[Path]:
    """List the files of rows in a folder.

    Raises FusecError if there are none, or if a file of results in the folder `results` would have the name of another.
    """
    found = sorted(path for path in folder.glob("*") if path.suffix in ENDINGS)
    if not found:
        raise FusecError(f"{folder}: has no file of rows ({', '.join(ENDINGS)})")
    if results.resolve() == folder.resolve():
        raise FusecError(f"{folder}: holds the rows; results of the same names need another folder")
    names = {path.name for path in found}
    for path in found:
        if path.suffix == ".npy" and f"{path.stem}.npz" in names:
            raise FusecError(f"{path}: {path.stem}.npz is there, too; results of both may need one name: rename one")
    return found


def read_rows(path: Path, model: Runnable) -> Rows:
    """Read the inputs of a model. An .npy file is for a model with one input; other files name arrays or columns.

    Raises ExecutionError if the file is damaged, or lacks an input.
    """
    names = [spec.name for spec in model.inputs]
    try:
        if path.suffix == ".npy":
            if len(names) != 1:
                raise ExecutionError(
                    f"{path}: an .npy file holds one array; the model has the inputs {', '.join(names)}"
                )
            return {names[0]: np.load(path, mmap_mode="r", allow_pickle=False)}
        if path.suffix == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in names}
        return _read_parquet(path, model)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ExecutionError(f"{path}: cannot be read: {error}") from error


def write_rows(path: Path, rows: Rows) -> None:
    """Write outputs as the file type says. The file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written(path, durable=False, collects=False) as file:
        if path.suffix == ".npy":
            np.save(file, next(iter(rows.values())), allow_pickle=False)
        elif path.suffix == ".npz":
            arrays: dict[str, Any] = dict(rows)
            np.savez(file, **arrays)
        else:
            _write_parquet(file, rows)


def result_path(path: Path, folder: Path, outputs: Sequence[Any]) -> Path:
    """Return the file for the results of a file of inputs: .npz instead of .npy for several outputs."""
    suffix = ".npz" if path.suffix == ".npy" and len(outputs) > 1 else path.suffix
    return folder / path.with_suffix(suffix).name


def _read_parquet(path: Path, model: Runnable) -> Rows:
    parquet = extra_module("pyarrow.parquet", "dask")
    table = parquet.read_table(path, columns=[spec.name for spec in model.inputs])
    rows: dict[str, np.ndarray[Any, Any]] = {}
    for spec in model.inputs:
        column = table.column(spec.name).combine_chunks()
        shape = row_shape(spec)
        while hasattr(column.type, "value_type"):  # a list, of fixed size or not
            column = column.flatten()
        rows[spec.name] = column.to_numpy(zero_copy_only=False).reshape(table.num_rows, *shape)
    return rows


def _write_parquet(file: Any, rows: Rows) -> None:
    arrow, parquet = extra_module("pyarrow", "dask"), extra_module("pyarrow.parquet", "dask")
    columns: dict[str, Any] = {}
    for name, array in rows.items():
        flat = arrow.array(np.ascontiguousarray(array).reshape(-1))
        width = int(np.prod(array.shape[1:]))
        columns[name] = flat if array.ndim == 1 else arrow.FixedSizeListArray.from_arrays(flat, width)
    parquet.write_table(arrow.table(columns), file)
