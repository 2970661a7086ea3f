"""Serve a model with Ray Serve, which joins requests to batches and starts replicas."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusec.errors import ExecutionError
from fusec.ir import quote
from fusec.ray.predictor import BatchPredictor
from fusec.scale.extras import extra_module
from fusec.scale.model_recipe import ModelRecipe
from fusec.scale.row_batches import SYMBOLIC, Rows, row_shape
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class ServeOptions:
    """Options of a deployment.

    max_requests: most requests that run as one batch.
    wait_s: seconds that a request waits for others.
    rows, pad: as for `BatchPredictor`. A model with a fixed batch needs `pad`, because requests rarely fill it.
    replicas: options of `serve.deployment`, such as `{"num_replicas": 4, "ray_actor_options": {"num_gpus": 1}}`.
    """

    max_requests: int = 64
    wait_s: float = 0.005
    rows: int = SYMBOLIC
    pad: bool = False
    replicas: Mapping[str, Any] | None = None


def application(model: str | os.PathLike[str], serving: ServeOptions | None = None, **options: Any) -> Any:
    """Return an application for `serve.run`.

    Its handle has `predict.remote(rows)`: rows of each input by name (arrays), to rows of each output. Over HTTP, it
    takes `{"inputs": {"x": [[...], ...]}}` as JSON and returns `{"outputs": {...}}`.

    model, options: as for `BatchPredictor`.
    """
    serve = extra_module("ray.serve", "ray")
    chosen, recipe = serving or ServeOptions(), ModelRecipe.of(model, options)

    class ModelReplica:
        def __init__(self) -> None:
            self._requests = RequestBatches(BatchPredictor(recipe.path, rows=chosen.rows, pad=chosen.pad, **options))

        @serve.batch(max_batch_size=chosen.max_requests, batch_wait_timeout_s=chosen.wait_s)
        async def _together(self, requests: list[Rows]) -> list[Rows]:
            return await asyncio.to_thread(self._requests.run, requests)

        async def predict(self, rows: Mapping[str, Any]) -> Rows:
            return await self._together(self._requests.checked(rows))

        async def __call__(self, request: Any) -> dict[str, Any]:
            body = await request.json()
            if not isinstance(body, dict) or not isinstance(body.get("inputs"), dict):
                raise ExecutionError('the body is {"inputs": {name: rows}} as JSON')
            results = await self.predict(body["inputs"])
            return {"outputs": {name: array.tolist() for name, array in results.items()}}

    name = os.path.basename(recipe.path)  # noqa: PTH119  # the path may be one of another machine
    deployment = {  # Ray would give a replica 5 requests at a time, which limits its batches
        "name": name.partition(".")[0] or "model",
        "max_ongoing_requests": 2 * chosen.max_requests,
        **(chosen.replicas or {}),
    }
    return serve.deployment(**deployment)(ModelReplica).bind()


class RequestBatches:
    """Joins the rows of several requests to one run of a model, and splits its results."""

    def __init__(self, predictor: BatchPredictor):
        """Take a model. Raises ExecutionError if its rows have no fixed shape, because requests could not be joined."""
        for spec in predictor.model.inputs:
            row_shape(spec)
        self._predictor = predictor

    def checked(self, rows: Mapping[str, Any]) -> Rows:
        """Return the rows of one request as arrays.

        Raises ExecutionError if they do not fit the model, so that no other request of the batch fails with this one.
        """
        specs = self._predictor.model.inputs
        if set(rows) != {spec.name for spec in specs}:
            given = ", ".join(map(quote, rows))
            raise ExecutionError(f"the inputs are {', '.join(quote(spec.name) for spec in specs)}, not {given}")
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for spec in specs:
            try:
                array = np.asarray(rows[spec.name], spec.dtype)
            except (TypeError, ValueError) as error:
                raise ExecutionError(f"input {quote(spec.name)}: {error}") from error
            if array.shape[1:] != row_shape(spec) or not len(array):
                takes, given = list(row_shape(spec)), list(array.shape)
                raise ExecutionError(f"input {quote(spec.name)} takes rows of {takes}, the array is {given}")
            arrays[spec.name] = array
        if len({len(array) for array in arrays.values()}) > 1:
            raise ExecutionError(f"inputs need the same number of rows, not {[len(a) for a in arrays.values()]}")
        return arrays

    def run(self, requests: Sequence[Rows]) -> list[Rows]:
        """Run the rows of all requests together."""
        names = [spec.name for spec in self._predictor.model.inputs]
        joined = {name: np.concatenate([rows[name] for rows in requests]) for name in names}
        results = self._predictor.outputs(joined)
        ends = np.cumsum([len(rows[names[0]]) for rows in requests])
        parts = {name: np.split(array, ends[:-1]) for name, array in results.items()}
        return [{name: arrays[i] for name, arrays in parts.items()} for i in range(len(requests))]
