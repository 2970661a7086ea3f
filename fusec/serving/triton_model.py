"""Run a `.fusec` file in the Python backend of NVIDIA Triton, which imports this in a process for each instance.

Triton forms the batches. It hands their requests over one by one, so they are joined here again.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fusec.errors import FusecError
from fusec.serving.choose_device import AUTO, SIMULATED
from fusec.serving.predictor import Predictor

MODEL_FILE = "model.fusec"


class TritonPythonModel:
    """The class that Triton looks for in `model.py`."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model on the GPU of this instance; an instance on the CPU runs in simulation."""
        self._utils: Any = importlib.import_module("triton_python_backend_utils")  # only Triton has it
        kind, number = args.get("model_instance_kind", "AUTO"), args.get("model_instance_device_id", "0")
        device: str | int = AUTO if kind not in ("CPU", "GPU") else int(number) if kind == "GPU" else SIMULATED
        path = Path(args["model_repository"]) / args["model_version"] / MODEL_FILE
        self._predictor = Predictor(path, device=device).load()
        self._names = [spec.name for spec in self._predictor.inputs]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Return a response for each request, in order. Requests whose rows may be joined run together."""
        groups: dict[Any, list[int]] = defaultdict(list)
        feeds: list[dict[str, Any]] = []
        for place, request in enumerate(requests):
            tensors = {name: self._utils.get_input_tensor_by_name(request, name) for name in self._names}
            feeds.append({name: tensor.as_numpy() for name, tensor in tensors.items() if tensor is not None})
            groups[self._group(feeds[-1], place)].append(place)
        responses: list[Any] = [None] * len(requests)
        for places in groups.values():
            for place, response in zip(places, self._together(requests, feeds, places), strict=True):
                responses[place] = response
        return responses

    def _group(self, feeds: Mapping[str, Any], place: int) -> Any:
        """Return a key that requests share if their rows may be joined."""
        if len(feeds) < len(self._names) or not all(array.ndim for array in feeds.values()):
            return place
        rest = tuple(feeds[name].shape[1:] for name in self._names)
        types = tuple(feeds[name].dtype for name in self._names)
        rows = {len(array) for array in feeds.values()}
        return (rest, types) if self._predictor.sizes.of(rest) and len(rows) == 1 else place

    def _together(
        self, requests: Sequence[Any], feeds: Sequence[Mapping[str, Any]], places: Sequence[int]
    ) -> list[Any]:
        utils = self._utils
        try:
            given = feeds[places[0]]
            if len(places) > 1:
                given = {name: np.concatenate([feeds[place][name] for place in places]) for name in self._names}
            results = self._predictor(given)
        except FusecError as error:
            failure = utils.TritonError(str(error))
            return [utils.InferenceResponse(output_tensors=[], error=failure) for _ in places]
        responses: list[Any] = []
        start = 0
        for place in places:
            end = start + len(feeds[place][self._names[0]]) if len(places) > 1 else None
            wanted = requests[place].requested_output_names()
            tensors = [utils.Tensor(name, np.ascontiguousarray(results[name][start:end])) for name in wanted]
            responses.append(utils.InferenceResponse(output_tensors=tensors))
            start = end or 0
        return responses
