"""Read and check an inference request of the Open Inference Protocol, version 2: JSON, and binary tensors after it.

Strangers write requests. Nothing is allocated before shape, datatype and size of a tensor agree with each other, with
the model and with the bytes that arrived.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from fusec.errors import FusecError
from fusec.serving.served_model import ANY, DATATYPES, ServedModel, ServedTensor
from fusec.serving.server.request_frames import ROWS, RequestForm
from fusec.system.dataclass import dataclass
from fusec.system.printable import printable
from fusec.system.untrusted import read_json

MAX_JSON_BYTES = 16 << 20  # Python needs some ten times the bytes of a JSON text, so larger tensors must be binary
_SHORT = 4096  # bytes of JSON, up to which a request is remembered
MAX_DIM = 1 << 40
_UNSUPPORTED = ("classification", "sequence_id")


class BadRequestError(FusecError):
    """A request breaks the protocol, or does not fit the model."""


@dataclass(frozen=True)
class GivenTensor:
    """A checked input: its bytes are at `start` of the body, or `values` holds them if JSON gave numbers.

    region: shared memory in which `start` counts; None for the body.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    start: int
    values: np.ndarray[Any, Any] | None = None
    region: str = ""

    @property
    def nbytes(self) -> int:
        """Return the number of its bytes."""
        return math.prod(self.shape) * DATATYPES[self.datatype].itemsize


@dataclass(frozen=True)
class WantedOutput:
    """An output that the answer has, and if its numbers are binary.

    region: shared memory to which it is written, if any, from `offset` on, in at most `room` bytes.
    """

    name: str
    binary: bool
    region: str = ""
    offset: int = 0
    room: int = 0


@dataclass(frozen=True)
class InferRequest:
    """A checked request. rows: size of dim 0, or 1 for a model without a batch."""

    id: str
    inputs: tuple[GivenTensor, ...]
    outputs: tuple[WantedOutput, ...]
    rows: int
    form: RequestForm  # what a worker needs to know of this request and of others like it
    text: bytes  # of the form

    @functools.cached_property
    def uses_regions(self) -> bool:
        """Tell if a tensor is in shared memory of the client."""
        return any(each.region for each in (*self.inputs, *self.outputs))


def shown(text: object) -> str:
    """Quote text of a stranger for a message: escaped and short."""
    return repr(printable(str(text)[:80]))


def read_request(body: memoryview, json_bytes: int, model: ServedModel) -> InferRequest:
    """Read a request for a model.

    body: the JSON text, and after `json_bytes` bytes of it the binary tensors.
    Raises BadRequestError if it does not fit.
    """
    read = _read_again if json_bytes <= _SHORT else _read
    return read(bytes(body[:json_bytes]), len(body), model)


def _read(text: bytes, length: int, model: ServedModel) -> InferRequest:
    data = _header(text)
    parameters = _object(data.get("parameters", {}), "parameters")
    request_id = data.get("id", "")
    if not isinstance(request_id, str) or len(request_id) > 1024:
        raise BadRequestError("id must be a string of at most 1024 characters")
    if data.get("model_version", "1") not in ("", "1"):
        raise BadRequestError(f"there is no version {shown(data['model_version'])} of the model, only 1")
    _refuse_unsupported(parameters, "the request")
    place = len(text)
    inputs: dict[str, GivenTensor] = {}
    for item in _objects(data.get("inputs"), "inputs"):
        tensor, place = _input(item, model, length, place)
        if tensor.name in inputs:
            raise BadRequestError(f"input {shown(tensor.name)} is given twice")
        inputs[tensor.name] = tensor
    if missing := [each.name for each in model.inputs if each.name not in inputs]:
        raise BadRequestError(f"input {shown(missing[0])} is missing")
    if place != length:
        raise BadRequestError(f"the binary inputs are {place - len(text)} bytes, but {length - len(text)} came")
    rows = {tensor.shape[0] for tensor in inputs.values()} if model.max_batch else {1}
    if len(rows) != 1:
        raise BadRequestError("inputs have different numbers of rows (dim 0)")
    outputs = _outputs(data, parameters, model)
    form = RequestForm(
        model.name,
        tuple(
            (each.name, each.datatype, (ROWS, *each.shape[1:]) if model.max_batch else each.shape, "")
            for each in inputs.values()
        ),
        tuple(wanted.name for wanted in outputs),
    )
    return InferRequest(request_id, tuple(inputs.values()), outputs, rows.pop(), form, form.text())


_read_again = functools.lru_cache(maxsize=1024)(_read)  # a client sends the same text again and again


def _header(text: bytes) -> dict[str, Any]:
    try:
        data = read_json(text)
    except ValueError as error:
        raise BadRequestError(f"the request is not JSON: {printable(str(error)[:200])}") from error
    return _object(data, "the request")


def _object(data: Any, what: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise BadRequestError(f"{what} must be an object")
    return cast("dict[str, Any]", data)


def _objects(data: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(data, list):
        raise BadRequestError(f"{what} must be a list")
    return [_object(item, f"an item of {what}") for item in cast("list[Any]", data)]


def _refuse_unsupported(parameters: Mapping[str, Any], what: str) -> None:
    for name in _UNSUPPORTED:
        if parameters.get(name):
            raise BadRequestError(f"{what} asks for {name}, which this server does not support")


def _known(tensors: Sequence[ServedTensor], name: Any, kind: str) -> ServedTensor:
    for each in tensors:
        if each.name == name:
            return each
    raise BadRequestError(f"the model has no {kind} {shown(name)}")


def _input(item: Mapping[str, Any], model: ServedModel, length: int, place: int) -> tuple[GivenTensor, int]:
    """Read one input, and return it with the place in the body after its bytes."""
    spec = _known(model.inputs, item.get("name"), "input")
    what = f"input {shown(spec.name)}"
    if item.get("datatype") != spec.datatype:
        raise BadRequestError(f"{what} takes {spec.datatype}, not {shown(item.get('datatype'))}")
    shape = _shape(item.get("shape"), spec, what)
    parameters = _object(item.get("parameters", {}), f"parameters of {what}")
    _refuse_unsupported(parameters, what)
    count = math.prod(shape)
    nbytes = count * DATATYPES[spec.datatype].itemsize
    if (region := _region(parameters, what)) is not None:
        if "data" in item or "binary_data_size" in parameters:
            raise BadRequestError(f"{what} is given twice: in shared memory and in the request")
        name, start, size = region
        if size != nbytes:
            raise BadRequestError(
                f"{what} of shape {list(shape)} has {nbytes} bytes, but shared_memory_byte_size is {size}"
            )
        return GivenTensor(spec.name, spec.datatype, shape, start, None, name), place
    size = parameters.get("binary_data_size")
    if size is None:
        return GivenTensor(spec.name, spec.datatype, shape, -1, _numbers(item.get("data"), spec, shape, what)), place
    if type(size) is not int or size != nbytes:
        raise BadRequestError(
            f"{what} of shape {list(shape)} has {nbytes} bytes, but binary_data_size is {shown(size)}"
        )
    if "data" in item:
        raise BadRequestError(f"{what} is given twice: as data and as binary data")
    if place + nbytes > length:
        raise BadRequestError(f"{what} has {nbytes} bytes, but only {length - place} came")
    return GivenTensor(spec.name, spec.datatype, shape, place), place + nbytes


def _region(parameters: Mapping[str, Any], what: str) -> tuple[str, int, int] | None:
    """Return name, offset and bytes of the shared memory of a tensor; None if it is in none."""
    name, offset = parameters.get("shared_memory_region"), parameters.get("shared_memory_offset", 0)
    size = parameters.get("shared_memory_byte_size")
    if name is None:
        return None
    if not isinstance(name, str) or not name:
        raise BadRequestError(f"shared_memory_region of {what} must be a name")
    if type(offset) is not int or type(size) is not int or not 0 <= offset < MAX_DIM or not 0 < size < MAX_DIM:
        raise BadRequestError(f"shared_memory_offset and shared_memory_byte_size of {what} must be whole numbers")
    return name, offset, size


def _shape(given: Any, spec: ServedTensor, what: str) -> tuple[int, ...]:
    if not isinstance(given, list) or len(cast("list[Any]", given)) > 32:
        raise BadRequestError(f"{what}: shape must be a list of sizes")
    sizes = cast("list[Any]", given)
    if not all(type(size) is int and 1 <= size <= MAX_DIM for size in sizes):
        raise BadRequestError(f"{what}: sizes of a shape are whole numbers from 1")
    shape, want = tuple(cast("list[int]", sizes)), spec.shape
    fits = want is None or (
        len(shape) == len(want) and all(w in (ANY, size) for w, size in zip(want, shape, strict=True))
    )
    if not fits:
        raise BadRequestError(f"{what} has shape {list(want or ())}, not {list(shape)}")
    return shape


def _numbers(data: Any, spec: ServedTensor, shape: tuple[int, ...], what: str) -> np.ndarray[Any, Any]:
    """Read numbers of JSON, nested or flat, in row-major order."""
    flat: list[Any] = []
    _flatten(data, flat, len(shape), what)
    if len(flat) != math.prod(shape):
        raise BadRequestError(f"{what} of shape {list(shape)} has {math.prod(shape)} numbers, but {len(flat)} came")
    dtype = DATATYPES[spec.datatype]
    kinds = (bool,) if spec.datatype == "BOOL" else (int,) if dtype.kind in "iu" else (int, float)
    if not all(type(number) in kinds for number in flat):
        raise BadRequestError(f"{what}: an element of data is no {spec.datatype}")
    wrong = f"{what}: an element of data is out of the range of {spec.datatype}"
    try:
        with np.errstate(over="ignore"):
            array = np.array(flat, dtype if dtype.kind in "iub" else np.float64).astype(dtype)
    except (OverflowError, ValueError) as error:
        raise BadRequestError(wrong) from error
    if dtype.kind not in "iub" and not np.isfinite(array.astype(np.float64)).all():
        raise BadRequestError(wrong)
    return array.reshape(shape)


def _flatten(data: Any, flat: list[Any], depth: int, what: str) -> None:
    if not isinstance(data, list):
        raise BadRequestError(f"{what}: data must be a list of numbers, nested as its shape or flat")
    items = cast("list[Any]", data)
    if not any(isinstance(item, list) for item in items):
        flat.extend(items)
        return
    if depth <= 1:
        raise BadRequestError(f"{what}: data is nested deeper than its shape")
    for item in items:
        _flatten(item, flat, depth - 1, what)


def _outputs(data: Mapping[str, Any], parameters: Mapping[str, Any], model: ServedModel) -> tuple[WantedOutput, ...]:
    binary = parameters.get("binary_data_output", False)
    if type(binary) is not bool:
        raise BadRequestError("binary_data_output must be true or false")
    if not data.get("outputs"):
        return tuple(WantedOutput(each.name, binary) for each in model.outputs)
    found: dict[str, WantedOutput] = {}
    for item in _objects(data["outputs"], "outputs"):
        name = _known(model.outputs, item.get("name"), "output").name
        of_output = _object(item.get("parameters", {}), f"parameters of output {shown(name)}")
        _refuse_unsupported(of_output, f"output {shown(name)}")
        as_binary = of_output.get("binary_data", binary)
        if type(as_binary) is not bool:
            raise BadRequestError(f"binary_data of output {shown(name)} must be true or false")
        if name in found:
            raise BadRequestError(f"output {shown(name)} is asked for twice")
        region = _region(of_output, f"output {shown(name)}") or ("", 0, 0)
        found[name] = WantedOutput(name, as_binary, *region)
    return tuple(found.values())
