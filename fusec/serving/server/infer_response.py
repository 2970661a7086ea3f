"""Write the answer to an inference request of the Open Inference Protocol, version 2."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from fusec.serving.served_model import DATATYPES
from fusec.serving.server.frames import AnswerTensor
from fusec.serving.server.infer_request import BadRequestError, InferRequest, shown


def write_answer(
    model: str, request: InferRequest, tensors: Mapping[str, AnswerTensor]
) -> tuple[list[bytes | memoryview], int | None]:
    """Return the parts of an answer's body, and the number of bytes that are JSON; None if nothing comes after these.

    Raises BadRequestError: when JSON was asked for, which has no NaN and no infinity, and an output has one.
    """
    outputs: list[dict[str, Any]] = []
    binary: list[memoryview] = []
    for wanted in request.outputs:
        tensor = tensors[wanted.name]
        item: dict[str, Any] = {"name": wanted.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if wanted.region:
            place = {"shared_memory_region": wanted.region, "shared_memory_byte_size": len(tensor.data)}
            item["parameters"] = place | ({"shared_memory_offset": wanted.offset} if wanted.offset else {})
        elif wanted.binary:
            item["parameters"] = {"binary_data_size": len(tensor.data)}
            binary.append(tensor.data)
        else:
            item["data"] = _numbers(wanted.name, tensor)
        outputs.append(item)
    answer: dict[str, Any] = {"model_name": model, "model_version": "1", "outputs": outputs}
    if request.id:
        answer["id"] = request.id
    text = json.dumps(answer, separators=(",", ":")).encode()
    return ([text, *binary], len(text)) if binary else ([text], None)


def _numbers(name: str, tensor: AnswerTensor) -> list[Any]:
    array = np.frombuffer(tensor.data, DATATYPES[tensor.datatype])
    if array.dtype.kind not in "iub":
        array = array.astype(np.float64 if array.dtype.itemsize == 8 else np.float32)
        if not np.isfinite(array).all():
            raise BadRequestError(f"output {shown(name)} has NaN or infinity, which JSON lacks: ask for binary data")
    return array.tolist()
