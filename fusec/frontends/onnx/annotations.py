"""Compare the values of a graph with what the model declares of their names.

Exporters leave stale annotations in models, so a wrong one of a computed value is no reason to refuse the model.
"""

from __future__ import annotations

from onnx import ValueInfoProto

from fusec.errors import VerifyError
from fusec.frontends.onnx.emit import Emitter, Held, TensorList
from fusec.frontends.onnx.inputs import tensor_type
from fusec.frontends.onnx.scope import Scope
from fusec.ir import DType, Value
from fusec.ops.spec import require

STALE = "fusec goes by the types it infers, not by stale annotations"


def check(scope: Scope, name: str, value: Held, emit: Emitter) -> None:
    """Compare a value with the declarations of its name; note an annotation that is wrong.

    Callers rely on the type of an input and on the element type of an output: VerifyError if one of these is wrong.
    """
    given = scope.inputs.get(name)
    if given is not None:
        said, _ = _difference(given, value)
        require(not said, said)
    annotation = scope.annotations.get(name)
    if annotation is None:
        return
    strict = name in scope.outputs
    try:
        said, dtype = _difference(annotation, value)
    except VerifyError as error:
        if strict or isinstance(value, TensorList):
            raise
        said, dtype = f"{name!r}: {error}", None
    else:
        wrong = isinstance(value, Value) and dtype is not None and dtype is not value.type.dtype
        require(not (strict and wrong), said)
    if said:
        emit.note(STALE, said)


def _difference(declared: ValueInfoProto, value: Held) -> tuple[str, DType | None]:
    """What differs ("" for nothing) and the element type declared; symbolic dims agree with all sizes."""
    kind, name = declared.type.WhichOneof("value"), declared.name
    if not kind:
        return "", None
    if isinstance(value, TensorList):
        require(kind == "sequence_type", f"the model declares {name!r} as {kind}, but it is a sequence")
        return "", None
    dtype, dims = tensor_type(declared, negative=True)
    agrees = dims is None or (
        len(dims) == value.type.rank
        and all(isinstance(d, str) or d == size for d, size in zip(dims, value.type.shape, strict=True))
    )
    if agrees and dtype is value.type.dtype:
        return "", dtype
    shape = "" if dims is None else "[" + ",".join(str(d) if d != "" else "?" for d in dims) + "]"
    return f"the model declares {name!r} as {dtype.value}{shape}, but it is {value.type}", dtype
