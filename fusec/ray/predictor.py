"""Define the callable class that Ray Data makes in each of its actors."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from fusec.errors import ExecutionError
from fusec.ir import quote
from fusec.scale.batch_pipeline import loaded_pipeline
from fusec.scale.model_recipe import ModelRecipe
from fusec.scale.row_batches import SYMBOLIC, BatchOptions, Rows, run_rows


class BatchPredictor:
    """A model for `Dataset.map_batches`. It adds a column for each output, and keeps all other columns.

    Ray makes one in each actor, and shows the actor the GPU that it was given.
    """

    def __init__(self, model: str | os.PathLike[str], *, rows: int = SYMBOLIC, pad: bool = False, **options: Any):
        """Load the model.

        model: path of an ONNX file or a `.fusec` file, which all machines see.
        rows, pad: see `BatchOptions`. The last batch of a dataset rarely fills a fixed batch: then it needs `pad`.
        options: options of `fusec.compile`, or of `fusec.load` for a `.fusec` file.
        """
        self._pipeline = loaded_pipeline(ModelRecipe.of(model, options))
        self.model = self._pipeline.model
        self._batches = BatchOptions(rows, pad)

    def __call__(self, batch: Rows) -> dict[str, np.ndarray[Any, Any]]:
        """Run the model over the rows of a batch, whose columns include the inputs by name."""
        if missing := [spec.name for spec in self.model.inputs if spec.name not in batch]:
            columns = ", ".join(map(quote, batch))
            raise ExecutionError(f"the batch lacks the input {quote(missing[0])}; its columns are {columns}")
        return {**batch, **self.outputs(batch)}

    def outputs(self, rows: Rows) -> dict[str, np.ndarray[Any, Any]]:
        """Run the model over rows and return its outputs alone."""
        return run_rows(self._pipeline, rows, self._batches)
