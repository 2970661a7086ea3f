"""Run a model over a Dask bag or array. Nothing is computed before Dask is asked for the result."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from fusec.errors import ExecutionError
from fusec.scale.batch_pipeline import loaded_pipeline
from fusec.scale.extras import extra_module
from fusec.scale.model_recipe import ModelRecipe, call_with, loaded
from fusec.scale.row_batches import SYMBOLIC, BatchOptions, row_shape, run_rows


def map_bag(bag: Any, model: str | os.PathLike[str], **options: Any) -> Any:
    """Return a bag with the result of each batch of a bag.

    bag: its elements are batches: arrays, tuples of arrays in the order of the inputs, or dicts by name.
    model: path of an ONNX file or a `.fusec` file, which all workers see.
    options: options of `fusec.compile`, or of `fusec.load` for a `.fusec` file.
    """
    return bag.map_partitions(_run_batches, ModelRecipe.of(model, options))


def map_array(
    array: Any, model: str | os.PathLike[str], *, rows: int = SYMBOLIC, pad: bool = False, **options: Any
) -> Any:
    """Return the results of a model with one input over the rows of a Dask array: an array, or a dict for several.

    The interface of the model is asked of a worker now; the rest is computed when Dask is asked for the result.

    array: its first dim is the rows. Its chunks need not fit the model's batch.
    rows, pad: see `BatchOptions`. A chunk whose rows do not fill the model's batch needs `pad`.
    model, options: as for `map_bag`.
    """
    dask, arrays = extra_module("dask", "dask"), extra_module("dask.array", "dask")
    recipe, batches = ModelRecipe.of(model, options), BatchOptions(rows, pad)
    name, outputs = dask.delayed(_interface)(recipe).compute()
    whole_rows = array.rechunk(dict.fromkeys(range(1, array.ndim), -1))
    blocks = whole_rows.to_delayed().reshape(-1)
    parts = [dask.delayed(_run_block)(block, recipe, batches, name) for block in blocks]
    results = {
        output: arrays.concatenate(
            [
                arrays.from_delayed(part[output], (count, *shape), np.dtype(dtype))
                for part, count in zip(parts, whole_rows.chunks[0], strict=True)
            ]
        )
        for output, shape, dtype in outputs
    }
    return results if len(results) > 1 else next(iter(results.values()))


def _interface(recipe: ModelRecipe) -> tuple[str, list[tuple[str, tuple[int, ...], np.dtype[Any]]]]:
    """Return the name of a model's one input, and the name, row shape and dtype of each output."""
    model = loaded(recipe)
    if len(model.inputs) != 1:
        names = ", ".join(spec.name for spec in model.inputs)
        raise ExecutionError(f"{recipe.path}: has the inputs {names}; an array is for a model with one: use map_bag")
    outputs = [(spec.name, row_shape(spec), np.dtype(spec.dtype)) for spec in model.outputs]
    return model.inputs[0].name, outputs


def _run_block(block: Any, recipe: ModelRecipe, options: BatchOptions, name: str) -> dict[str, Any]:
    return run_rows(loaded_pipeline(recipe), {name: np.asarray(block)}, options)


def _run_batches(batches: Iterable[Any], recipe: ModelRecipe) -> list[Any]:
    return [call_with(loaded(recipe), batch) for batch in batches]
