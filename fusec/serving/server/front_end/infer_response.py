"""Write the answer to an inference request of the Open Inference Protocol, version 2."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from fusec.serving.served_model import DATATYPES
from fusec.serving.server.frames import AnswerTensor
from fusec.serving.server.front_end.infer_request import BadRequestError, InferRequest, WantedOutput, shown


def write_answer(
    model: str, request: InferRequest, tensors: Mapping[str, AnswerTensor]
) -> tuple[list[bytes | memoryview], int | None]:
    """Return the parts of an answer's body, and the number of bytes that are JSON; None if nothing comes after these.

    Raises BadRequestError if JSON was asked for, which has no NaN and no infinity, and an output has one.
    """
    outputs: list[str] = []
    binary: list[memoryview] = []
    for wanted in request.outputs:
        tensor = tensors[wanted.name]
        if wanted.region or wanted.binary:
            outputs.append(_described(wanted, tensor.datatype, tuple(tensor.shape), len(tensor.data)))
            binary += [] if wanted.region else [tensor.data]
        else:
            item = {"name": wanted.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
            outputs.append(_json(item | {"data": _numbers(wanted.name, tensor)}))
    end = f'],"id":{_json(request.id)}}}' if request.id else "]}"
    text = f"{_start(model)}{','.join(outputs)}{end}".encode()
    return ([text, *binary], len(text)) if binary else ([text], None)


def _json(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


@functools.lru_cache(maxsize=256)
def _start(model: str) -> str:
    """Return the JSON of an answer up to its outputs."""
    return f'{{"model_name":{_json(model)},"model_version":"1","outputs":['


@functools.lru_cache(maxsize=1024)  # a client asks for the same outputs again and again
def _described(wanted: WantedOutput, datatype: str, shape: tuple[int, ...], nbytes: int) -> str:
    """Return the JSON of an output whose numbers are elsewhere: after the JSON, or in shared memory."""
    item: dict[str, Any] = {"name": wanted.name, "datatype": datatype, "shape": shape}
    if wanted.region:
        place = {"shared_memory_region": wanted.region, "shared_memory_byte_size": nbytes}
        return _json(item | {"parameters": place | ({"shared_memory_offset": wanted.offset} if wanted.offset else {})})
    return _json(item | {"parameters": {"binary_data_size": nbytes}})


def _numbers(name: str, tensor: AnswerTensor) -> list[Any]:
    array = np.frombuffer(tensor.data, DATATYPES[tensor.datatype])
    if array.dtype.kind not in "iub":
        array = array.astype(np.float64 if array.dtype.itemsize == 8 else np.float32)
        if not np.isfinite(array).all():
            raise BadRequestError(f"output {shown(name)} has NaN or infinity, which JSON lacks: ask for binary data")
    return array.tolist()
