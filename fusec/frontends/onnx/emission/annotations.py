"""Compare values of the graph with the types that the model declares for them.

A wrong annotation of a computed value gives a warning only, because exporters leave stale annotations in models.
"""

from __future__ import annotations

from onnx import ValueInfoProto

from fusec.errors import VerifyError
from fusec.frontends.onnx.emission.emit import Emitter, ModelValue, TensorList
from fusec.frontends.onnx.emission.scope import Scope
from fusec.frontends.onnx.model_file.inputs import element_type, tensor_type
from fusec.ir import DType, Value
from fusec.ops.spec import require

STALE = "fusec uses the types that it infers instead of these annotations"


def check(scope: Scope, name: str, value: ModelValue, emit: Emitter) -> None:
    """Compare a value with the declared type of its name, and note a wrong annotation.

    Raises VerifyError if the type of an input or the element type of an output is wrong, since callers rely on
    them.
    """
    given = scope.inputs.get(name)
    if given is not None:
        difference, _ = _difference(given, value)
        require(not difference, difference)
    annotation = scope.annotations.get(name)
    if annotation is None:
        return
    strict = name in scope.outputs
    try:
        difference, dtype = _difference(annotation, value)
    except VerifyError as error:
        if strict or isinstance(value, TensorList):
            raise
        difference, dtype = f"{name!r}: {error}", None
    else:
        wrong = isinstance(value, Value) and dtype is not None and dtype is not value.type.dtype
        require(not (strict and wrong), difference)
    if difference:
        emit.note(STALE, difference)


def _difference(declared: ValueInfoProto, value: ModelValue) -> tuple[str, DType | None]:
    """Describe the difference ("" for none), and return the declared element type. Symbolic dims match all sizes."""
    kind, name = element_type(declared.type).WhichOneof("value"), declared.name
    if not kind:
        return "", None
    if isinstance(value, TensorList) and not value.present:
        optional = declared.type.WhichOneof("value") == "optional_type"
        require(optional, f"the model declares {name!r} as {kind}, but it is an optional value without an element")
        return "", None
    if isinstance(value, TensorList):
        require(kind == "sequence_type", f"the model declares {name!r} as {kind}, but it is a sequence")
        return "", None
    if declared.type.sequence_type.elem_type.WhichOneof("value") == "map_type":
        return "", None  # ZipMap makes maps of scores, which stay a tensor
    dtype, dims = tensor_type(declared)
    agrees = dims is None or (
        len(dims) == value.type.rank
        and all(isinstance(d, str) or d == size for d, size in zip(dims, value.type.shape, strict=True))
    )
    if agrees and dtype is value.type.dtype:
        return "", dtype
    shape = "" if dims is None else "[" + ",".join(str(d) if d != "" else "?" for d in dims) + "]"
    return f"the model declares {name!r} as {dtype.value}{shape}, but it is {value.type}", dtype
