"""Run a model over a folder of files in the workers of Dask, and write a file of results for each."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from fusec.dask.calls import current_client, finished_calls
from fusec.errors import ExecutionError
from fusec.scale.batch_pipeline import loaded_pipeline
from fusec.scale.extras import extra_module
from fusec.scale.model_recipe import ModelRecipe
from fusec.scale.row_batches import SYMBOLIC, BatchOptions, run_rows
from fusec.scale.row_files import read_rows, result_path, row_files, write_rows


def map_folder(
    source: str | os.PathLike[str],
    results: str | os.PathLike[str],
    model: str | os.PathLike[str],
    *,
    rows: int = SYMBOLIC,
    pad: bool = False,
    **options: Any,
) -> list[Path]:
    """Run a model over the rows of each file in a folder, write the results, and return their paths.

    A file appears in `results` whole or not at all, and one that is there already is not computed again. So the same
    call continues a run that was stopped.

    source: folder of .npy files (a model with one input), or .npz or .parquet files whose arrays or columns have the
        names of the inputs. A row of a column is a number, or the list of a row's numbers.
    results: another folder, for a file of the same name and type; .npz for .npy if the model has several outputs.
    rows, pad: see `BatchOptions`.
    model, options: as for `map_bag`. All workers must see the model and both folders.
    Raises FusecError if there are no files, or if two results would have one name; ExecutionError for a bad file.
    """
    recipe, batches = ModelRecipe.of(model, options), BatchOptions(rows, pad)
    goal = Path(results).absolute()
    sources = row_files(Path(source).absolute(), goal)
    run = partial(_run_file, folder=goal, recipe=recipe, options=batches)
    client = current_client()
    if client is None:
        dask = extra_module("dask", "dask")
        return list(dask.compute(*(dask.delayed(run)(path) for path in sources)))
    futures = finished_calls(client, run, sources)
    # One result of each type tells the names of all. To collect all of them would take as long as to run a few files.
    samples = {path.suffix: future for path, future in zip(sources, futures, strict=True)}
    endings = {ending: path.suffix for ending, path in client.gather(samples).items()}
    return [goal / path.with_suffix(endings[path.suffix]).name for path in sources]


def _run_file(source: Path, folder: Path, recipe: ModelRecipe, options: BatchOptions) -> Path:
    pipeline = loaded_pipeline(recipe)
    goal = result_path(source, folder, pipeline.model.outputs)
    if not goal.exists():
        rows = read_rows(source, pipeline.model)
        try:
            found = run_rows(pipeline, rows, options)
        except ExecutionError as error:
            raise ExecutionError(f"{source}: {error}") from error
        write_rows(goal, found)
    return goal
