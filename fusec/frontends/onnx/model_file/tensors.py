"""Read TensorProtos as Literals: inline bytes, typed fields, sparse tensors, and external data (read lazily).

For security, external data must be inside the model's folder: fusec opens no file elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import SparseTensorProto, TensorProto

from fusec.errors import VerifyError
from fusec.exporters.onnx_element_types import ELEMENT_TYPES
from fusec.frontends.onnx.model_file.external_files import opened
from fusec.frontends.onnx.model_file.limits import require_constant
from fusec.frontends.onnx.model_file.split_model import TensorFiles, place_of
from fusec.frontends.onnx.model_file.stored_data import StoredData
from fusec.ir import HALVES, DType, Literal, TensorType
from fusec.lowering.packing import code_bytes, from_codes
from fusec.ops.spec import require
from fusec.system.byte_ranges import Place

DTYPES: dict[int, DType] = {number: dtype for dtype, number in ELEMENT_TYPES.items()}
# the field that has the elements of a tensor without raw_data; all other types are packed in int32_data
_FIELDS = {
    DType.F32: "float_data",
    DType.F64: "double_data",
    DType.I64: "int64_data",
    DType.U32: "uint64_data",
    DType.U64: "uint64_data",
}
_TYPED = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")


def dtype_of(element_type: int) -> DType:
    """Return the DType of an ONNX element type. Raises VerifyError if fusec lacks it."""
    if element_type in DTYPES:
        return DTYPES[element_type]
    known = element_type in TensorProto.DataType.values()
    name = TensorProto.DataType.Name(element_type).lower() if known else f"number {element_type}"
    raise VerifyError(f"element type {name} is not supported")


def shape_of(dims: Sequence[int]) -> tuple[int, ...]:
    """Convert dims to a shape. Raises VerifyError if one is negative."""
    require(all(d >= 0 for d in dims), f"negative dimension in shape {list(dims)}")
    return tuple(dims)


class Tensors:
    """Read the tensors of one model. files: where external data is."""

    def __init__(self, files: TensorFiles | None = None):
        self._files = files or TensorFiles()

    def literal(self, tensor: TensorProto) -> Literal:
        """Read a tensor. Raises VerifyError if its data does not fit its declared type."""
        type = TensorType(shape_of(tensor.dims), dtype_of(tensor.data_type))
        require(not tensor.HasField("segment"), "segmented tensors are not supported")
        if type.dtype is DType.STRING:
            strings = _strings(tensor, type)
            return Literal(type, lambda: strings, tensor.name)
        if (place := place_of(tensor, self._files)) is not None:
            return self._own(place, type, tensor.name)
        if tensor.data_location == TensorProto.EXTERNAL:
            return self._external(tensor, type)
        _require_one_field(tensor)
        array = _packed(tensor, type) if type.dtype.is_narrow else _inline(tensor, type)
        return Literal(type, lambda: array, tensor.name)

    def sparse(self, tensor: SparseTensorProto) -> Literal:
        """Read a sparse tensor as a dense literal.

        Values and indices are checked now. The dense array is made when it is first read.
        """
        type = TensorType(shape_of(tensor.dims), dtype_of(tensor.values.data_type))
        require_constant(type, "the dense form of a sparse tensor,")
        sources = self.literal(tensor.values), self.literal(tensor.indices)
        values, indices = sources[0].array.reshape(-1), sources[1].array
        require(indices.dtype == np.int64, f"indices of a sparse tensor are {indices.dtype}, not int64")
        count = values.shape[0]
        if indices.shape == (count, type.rank) and indices.ndim == 2:
            inside = bool(((indices >= 0) & (indices < np.array(type.shape, np.int64))).all())
            require(inside, f"an index of a sparse tensor is outside {list(type.shape)}")
            flat = indices @ np.array(type.strides, np.int64)
        else:
            require(indices.shape == (count,), f"sparse tensor of {count} values, indices {list(indices.shape)}")
            inside = bool(((indices >= 0) & (indices < type.size)).all())
            require(inside, f"an index of a sparse tensor is outside its {type.size} elements")
            flat = indices

        def dense() -> np.ndarray[Any, Any]:
            array = np.zeros(type.size, type.dtype.numpy)
            array[flat] = values
            return array.reshape(type.shape)

        return Literal(type, dense, tensor.values.name, sources=sources)

    def _own(self, place: Place, type: TensorType, name: str) -> Literal:
        """Return the literal of data that is in the model's own bytes."""
        need = code_bytes(type.size, type.dtype)
        require(place.length == need, f"{type} takes {need} bytes, its data has {place.length}")
        assert self._files.own is not None, "a place is in some bytes"
        return Literal(type, StoredData(self._files.own, place, type), name, keep=False)

    def _external(self, tensor: TensorProto, type: TensorType) -> Literal:
        """Return a literal that reads external data when it is needed. Raises VerifyError if its place is not valid."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        require("location" in entries, "external data without a location")
        location = entries["location"]
        require(
            self._files.folder is not None,
            f"external data in {location!r}, but the model was not given as a path: give its path, "
            "or load the data first (onnx.load_external_data_for_model)",
        )
        data = opened(self._files, location)
        offset = _number(entries.get("offset", "0"), "offset")
        need = code_bytes(type.size, type.dtype)
        length = _number(entries.get("length", str(need)), "length")
        require(length == need, f"{type} takes {need} bytes, its external data in {location!r} has {length}")
        require(
            offset + length <= data.size,
            f"external data at bytes {offset} to {offset + length} of {location!r}, which has {data.size}",
        )
        return Literal(type, StoredData(data, Place(offset, length), type, location), tensor.name, keep=False)


def _number(text: str, what: str) -> int:
    require(text.isascii() and text.isdigit() and len(text) < 20, f"external data with the {what} {text!r}")
    return int(text)


def _require_one_field(tensor: TensorProto) -> None:
    """Check that only one field has elements, because two could differ and readers use different ones.

    Raises VerifyError if two fields have elements.
    """
    fields = [name for name in _TYPED if getattr(tensor, name)]
    fields += ["raw_data"] if tensor.HasField("raw_data") else []
    require(len(fields) <= 1, f"holds its elements twice, in {' and '.join(fields)}: keep one of them")


def _packed(tensor: TensorProto, type: TensorType) -> np.ndarray[Any, Any]:
    """Unpack the elements of a narrow type. ONNX packs two of 4 bits or four of 2 bits into a byte."""
    if tensor.HasField("raw_data"):
        codes = np.frombuffer(tensor.raw_data, np.uint8)
    else:
        codes = np.array(tensor.int32_data, np.int32).astype(np.uint8)
    need = code_bytes(type.size, type.dtype)
    require(len(codes) == need, f"{type} takes {need} bytes, its data has {len(codes)}")
    return from_codes(codes, type.size, type.dtype).reshape(type.shape)


def _strings(tensor: TensorProto, type: TensorType) -> np.ndarray[Any, Any]:
    """Return the strings of the message itself; ONNX has no other place for them."""
    count = len(tensor.string_data)
    _require_one_field(tensor)
    require(count == type.size, f"{type} takes {type.size} elements, its data has {count}")
    array = np.empty(count, object)
    try:
        array[:] = [text.decode("utf-8") for text in tensor.string_data]
    except UnicodeDecodeError as error:
        raise VerifyError("a string is not UTF-8") from error
    return array.reshape(type.shape)


def _inline(tensor: TensorProto, type: TensorType) -> np.ndarray[Any, Any]:
    """Return a read-only array of the elements in the message itself."""
    if tensor.HasField("raw_data"):
        raw = tensor.raw_data
        require(len(raw) == type.nbytes, f"{type} takes {type.nbytes} bytes, its data has {len(raw)}")
        return np.frombuffer(raw, type.dtype.numpy).reshape(type.shape)
    items = getattr(tensor, _FIELDS.get(type.dtype, "int32_data"))
    require(len(items) == math.prod(type.shape), f"{type} takes {type.size} elements, its data has {len(items)}")
    if type.dtype in _FIELDS:
        wide = np.array(items, np.uint64 if type.dtype is DType.U32 else type.dtype.numpy)
        return wide.astype(type.dtype.numpy, copy=False).reshape(type.shape)
    packed = np.array(items, np.int32)
    if type.dtype in HALVES:
        return packed.astype(np.uint16).view(type.dtype.numpy).reshape(type.shape)
    return packed.astype(type.dtype.numpy).reshape(type.shape)
