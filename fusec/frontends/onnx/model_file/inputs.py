"""Compute concrete types of the model's inputs from declared dims and from the shapes that the caller gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import GraphProto, TypeProto, ValueInfoProto

from fusec.errors import VerifyError
from fusec.frontends.onnx.model_file.structure import constants, report
from fusec.frontends.onnx.model_file.tensors import dtype_of
from fusec.ir import DType, TensorType
from fusec.system.printable import printable

Dims = list[int | str]  # a size, or the name of a symbolic dim ("" if it has none)


def input_types(
    graph: GraphProto, shapes: Mapping[str, Sequence[int]], file: str, given: frozenset[str]
) -> dict[str, TensorType]:
    """Return the type of each input that the caller passes at run time.

    Initializers, and the inputs in `given`, have values already and are left out.

    Raises ModelError: one error that lists everything wrong with the inputs and the shapes.
    """
    valued = {*constants(graph), *given}
    problems: list[str] = []
    dtypes: dict[str, DType] = {}
    declared: dict[str, Dims | None] = {}
    for value in graph.input:
        if value.name in valued:
            continue
        try:
            dtypes[value.name], declared[value.name] = tensor_type(value)
        except VerifyError as error:
            problems.append(f"input {value.name!r}: {error}")
    known = printable(", ".join(declared)) or "none"
    symbols = sorted({d for dims in declared.values() for d in dims or () if isinstance(d, str) and d})
    if symbols:  # a name that is misspelt may be meant for one of them
        known += f"; dims: {printable(', '.join(symbols))}"
    problems += [f"there is no input {name!r}; inputs: {known}" for name in shapes if name not in declared]
    if problems:
        raise report(file, problems)
    bound = _bind(declared, shapes, problems)
    types: dict[str, TensorType] = {}
    for name, dims in declared.items():
        known = _known(shapes.get(name, dims), bound)
        sizes = [d for d in known or () if isinstance(d, int)]
        if known is None or len(sizes) < len(known):
            problems.append(_unbound(name, known))
            continue
        try:
            types[name] = TensorType(tuple(sizes), dtypes[name])
        except VerifyError as error:
            problems.append(f"input {name!r}: {error}")
    if problems:
        raise report(file, problems)
    return types


def _known(dims: Sequence[int | str] | None, bound: Mapping[str, int]) -> Dims | None:
    return None if dims is None else [bound.get(d, d) if isinstance(d, str) else d for d in dims]


def element_type(type: TypeProto) -> TypeProto:
    """Return the type of an optional value's element, because such a value is its element; else the type itself."""
    return type.optional_type.elem_type if type.WhichOneof("value") == "optional_type" else type


def tensor_type(value: ValueInfoProto) -> tuple[DType, Dims | None]:
    """Return the dtype and the dims that a value declares; dims are None if it declares no shape.

    A dim below 0 is unknown, because exporters write such dims: PaddlePaddle for batches, others for results.

    Raises VerifyError if the value is not a tensor or fusec lacks its element type.
    """
    declared = element_type(value.type)
    kind = declared.WhichOneof("value")
    if kind != "tensor_type":
        raise VerifyError(f"has type {kind.removesuffix('_type') if kind else 'none'}, not tensor")
    tensor = declared.tensor_type
    dtype = dtype_of(tensor.elem_type)
    return dtype, (_dims(tensor) if tensor.HasField("shape") else None)


def _dims(tensor: TypeProto.Tensor) -> Dims:
    known = (dim.HasField("dim_value") and dim.dim_value >= 0 for dim in tensor.shape.dim)
    return [dim.dim_value if each else dim.dim_param for dim, each in zip(tensor.shape.dim, known, strict=True)]


def _bind(
    declared: Mapping[str, Dims | None], shapes: Mapping[str, Sequence[int]], problems: list[str]
) -> dict[str, int]:
    """Return the sizes of the named symbolic dims, and append contradictions to `problems`."""
    bound: dict[str, tuple[int, str]] = {}
    for name, shape in shapes.items():
        dims = declared[name]
        if dims is None:
            continue
        if len(dims) != len(shape):
            problems.append(f"input {name!r}: has {len(dims)} dims {_shown(dims)}, the shape given is {list(shape)}")
            continue
        for dim, size in zip(dims, shape, strict=True):
            if isinstance(dim, int) and dim != size:
                problems.append(f"input {name!r}: has shape {_shown(dims)}, the shape given is {list(shape)}")
                break
            if isinstance(dim, str) and dim:
                first = bound.setdefault(dim, (size, name))
                if first[0] != size:
                    problems.append(
                        f"dim {dim!r} is {first[0]} in the shape given for {first[1]!r}, {size} in that for {name!r}"
                    )
    return {dim: size for dim, (size, _) in bound.items()}


def _shown(dims: Dims) -> str:
    return "[" + ", ".join(printable(str(d)) if d != "" else "?" for d in dims) + "]"


def _unbound(name: str, dims: Dims | None) -> str:
    if dims is None:
        return f"input {name!r} declares no shape: give one, say --shape {printable(name)}=1,3,224,224"
    image = len(dims) == 4
    example = [
        d if isinstance(d, int) else 224 if image and i >= 2 else 3 if image and i == 1 else 1
        for i, d in enumerate(dims)
    ]
    text = ",".join(map(str, example))
    return (
        f"input {name!r} has symbolic dims {_shown(dims)}: give its shape, say --shape {printable(name)}={text} "
        f"(in Python shapes={{{name!r}: {tuple(example)}}})"
    )
