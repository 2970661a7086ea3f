"""Test requests of strangers: each is read or refused with a reason, and nothing is allocated for a claim."""

from __future__ import annotations

import contextlib
import json
import math
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fusec.serving.served_model import DATATYPES, ServedModel, ServedTensor, datatype_of
from fusec.serving.server.frames import AnswerTensor
from fusec.serving.server.front_end.infer_request import BadRequestError, read_request
from fusec.serving.server.front_end.infer_response import write_answer

MODEL = ServedModel(
    "m",
    (ServedTensor("x", "FP32", (-1, 2)), ServedTensor("n", "INT8", (-1,))),
    (ServedTensor("y", "FP32", (-1, 2)), ServedTensor("z", "FP16", (-1,))),
    max_batch=8,
    sizes=(1, 8),
)
GOOD: dict[str, Any] = {
    "id": "7",
    "inputs": [
        {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2.5], [3, 4]]},
        {"name": "n", "shape": [2], "datatype": "INT8", "data": [-128, 127]},
    ],
    "outputs": [{"name": "y", "parameters": {"binary_data": True}}, {"name": "z"}],
}


def read(data: Any, rest: bytes = b"") -> Any:
    text = json.dumps(data).encode()
    return read_request(memoryview(text + rest), len(text), MODEL)


def changed(path: str, value: Any) -> Any:
    """Return the good request with another value, at `inputs.0.shape` say."""
    data = json.loads(json.dumps(GOOD))
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = data
    for part in way:
        place = place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return data


def test_a_good_request() -> None:
    request = read(GOOD)
    assert (request.id, request.rows) == ("7", 2)
    x, n = request.inputs
    assert x.values.dtype == np.float32
    np.testing.assert_array_equal(x.values, [[1, 2.5], [3, 4]])
    np.testing.assert_array_equal(n.values, np.array([-128, 127], np.int8))
    assert [(o.name, o.binary) for o in request.outputs] == [("y", True), ("z", False)]


def test_binary_tensors_follow_in_the_order_of_the_inputs() -> None:
    data = changed("inputs.0.data", None)
    data["inputs"][0]["parameters"] = {"binary_data_size": 16}
    data["parameters"] = {"binary_data_output": True}
    del data["outputs"]
    request = read(data, bytes(16))
    text = len(json.dumps(data).encode())
    assert [(t.name, t.start) for t in request.inputs] == [("x", text), ("n", -1)]
    assert [(o.name, o.binary) for o in request.outputs] == [("y", True), ("z", True)]


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("id", 7, "id must be a string"),
        ("id", "x" * 2000, "id must be a string"),
        ("model_version", "2", "there is no version '2'"),
        ("inputs", {}, "inputs must be a list"),
        ("inputs.0", 3, "an item of inputs must be an object"),
        ("inputs.1", None, "input 'n' is missing"),
        ("inputs.0.name", "n", "takes INT8, not 'FP32'"),
        ("inputs.0.name", ["x"], "no input"),
        ("inputs.0.name", "\x1b[2J" * 50, r"no input '\\\\x1b\[2J"),
        ("inputs.0.shape", "22", "shape must be a list"),
        ("inputs.0.shape", [2, 2.0], "whole numbers from 1"),
        ("inputs.0.shape", [True, 2], "whole numbers from 1"),
        ("inputs.0.shape", [-1, 2], "whole numbers from 1"),
        ("inputs.0.shape", [0, 2], "whole numbers from 1"),
        ("inputs.0.shape", [1 << 62, 2], "whole numbers from 1"),
        ("inputs.0.shape", [1] * 100, "shape must be a list"),
        ("inputs.0.shape", [2, 3], r"has shape \[-1, 2\], not \[2, 3\]"),
        ("inputs.0.shape", [1 << 39, 2], "numbers, but 4 came"),
        ("inputs.0.shape", [1, 2], "2 numbers, but 4 came"),
        ("inputs.0.data", 5, "data must be a list"),
        ("inputs.0.data", [[1, 2], 3], "data must be a list"),
        ("inputs.0.data", [[[1], [2]], [3, 4]], "nested deeper"),
        ("inputs.0.data", [1, 2, 3, "4"], "an element of data is no FP32"),
        ("inputs.0.data", [1, 2, 3, None], "an element of data is no FP32"),
        ("inputs.0.data", [1, 2, 3, True], "an element of data is no FP32"),
        ("inputs.0.data", [1, 2, 3, 1e39], "out of the range of FP32"),
        ("inputs.0.data", [1, 2, 3, math.nan], "out of the range of FP32"),
        ("inputs.0.data", [1, 2, 3, 10**400], "out of the range of FP32"),
        ("inputs.1.data", [1, 128], "out of the range of INT8"),
        ("inputs.1.data", [1, 1 << 70], "out of the range of INT8"),
        ("inputs.1.data", [1, 1.0], "an element of data is no INT8"),
        ("inputs.0.parameters", {"binary_data_size": 16}, "given twice: as data"),
        ("inputs.0.parameters", {"binary_data_size": 15}, "has 16 bytes, but binary_data_size is '15'"),
        ("inputs.0.parameters", {"binary_data_size": -16}, "binary_data_size is '-16'"),
        ("inputs.0.parameters", {"shared_memory_region": 3}, "must be a name"),
        ("inputs.0.parameters", {"shared_memory_region": "r"}, "must be whole numbers"),
        (
            "inputs.0.parameters",
            {"shared_memory_region": "r", "shared_memory_byte_size": 16, "shared_memory_offset": -1},
            "must be whole numbers",
        ),
        (
            "inputs.0.parameters",
            {"shared_memory_region": "r", "shared_memory_byte_size": 16},
            "given twice: in shared memory and in the request",
        ),
        ("outputs.0.parameters", {"shared_memory_region": "r", "shared_memory_byte_size": "9"}, "must be whole"),
        ("inputs.0.parameters", [], "must be an object"),
        ("parameters", {"binary_data_output": 1}, "must be true or false"),
        ("parameters", {"sequence_id": 4}, "asks for sequence_id"),
        ("outputs.0.name", "z", "asked for twice"),
        ("outputs.0.name", "none", "no output 'none'"),
        ("outputs.0.parameters", {"classification": 3}, "asks for classification"),
        ("outputs.0.parameters", {"binary_data": "no"}, "must be true or false"),
    ],
)
def test_what_is_refused(path: str, value: Any, reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason):
        read(changed(path, value))


def test_inputs_must_have_equal_rows_and_come_once() -> None:
    data = changed("inputs.1.data", [1, 2, 3])
    data["inputs"][1]["shape"] = [3]
    with pytest.raises(BadRequestError, match="different numbers of rows"):
        read(data)
    data = changed("id", "8")
    data["inputs"].append(data["inputs"][0])
    with pytest.raises(BadRequestError, match="input 'x' is given twice"):
        read(data)
    with pytest.raises(BadRequestError, match="the binary inputs are 0 bytes, but 3 came"):
        read(GOOD, b"abc")


def test_random_changes_are_read_or_refused() -> None:
    """Values of all kinds at all places, and bytes changed at random: no other error, and no large allocation."""
    rng = random.Random(1)
    values = [0, -1, 1 << 63, 1.5, "", "x", True, [], [[]], {}, {"a": 1}, [2, 2], "FP32", 1e308, [None]]
    places: list[str] = []

    def walk(data: Any, way: str) -> None:
        items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
        for key, item in items:
            places.append(f"{way}{key}")
            walk(item, f"{way}{key}.")

    walk(GOOD, "")
    for place in places:
        for value in values:
            with contextlib.suppress(BadRequestError):
                read(changed(place, value))
    text = json.dumps(GOOD).encode()
    passed = 0
    for _ in range(3000):
        data = bytearray(text)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.choice(b'[]{}",:0123456789eE.-tfnu\\x\xff')
        with contextlib.suppress(BadRequestError):
            read_request(memoryview(bytes(data)), rng.choice([len(data), len(data) - 1, 0]), MODEL)
            passed += 1
    assert passed


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_goes_both_ways(datatype: str) -> None:
    dtype = DATATYPES[datatype]
    assert datatype_of(dtype, "x") == datatype
    model = ServedModel("m", (ServedTensor("x", datatype, (3,)),), (ServedTensor("x", datatype, (3,)),), 0, ())
    values = [True, False, True] if datatype == "BOOL" else [0, 1, 100]
    text = json.dumps({"inputs": [{"name": "x", "shape": [3], "datatype": datatype, "data": values}]}).encode()
    request = read_request(memoryview(text), len(text), model)
    array = request.inputs[0].values
    assert array is not None
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, np.array(values).astype(dtype))
    (body,), json_bytes = write_answer("m", request, {"x": AnswerTensor(datatype, (3,), memoryview(array.tobytes()))})
    assert json_bytes is None
    assert json.loads(bytes(body))["outputs"][0]["data"] == values


def test_an_answer_with_nan_must_be_binary() -> None:
    request = read(GOOD)
    y = np.array([[1, 2], [3, np.nan]], np.float32)
    z = np.array([1, 2], np.float16)
    tensors = {
        "y": AnswerTensor("FP32", (2, 2), memoryview(y.tobytes())),
        "z": AnswerTensor("FP16", (2,), memoryview(z.tobytes())),
    }
    (text, binary), json_bytes = write_answer("m", request, tensors)
    assert json_bytes == len(text)
    assert bytes(binary) == y.tobytes()
    told = json.loads(bytes(text))
    assert told["id"] == "7"
    assert told["outputs"][1] == {"name": "z", "datatype": "FP16", "shape": [2], "data": [1.0, 2.0]}
    plain = read(changed("outputs.0.parameters", {"binary_data": False}))
    with pytest.raises(BadRequestError, match="output 'y' has NaN or infinity"):
        write_answer("m", plain, tensors)


def test_types_without_a_name_are_refused() -> None:
    with pytest.raises(Exception, match="no name for"):
        datatype_of(np.dtype(ml_dtypes.float8_e4m3fn), "x")
