"""Read the attributes of a node as Python values, and check them against the op's schema in the installed onnx."""

from __future__ import annotations

from typing import Any

from onnx import AttributeProto, NodeProto, defs

from fusec.errors import VerifyError
from fusec.frontends.onnx.model_file.tensors import Tensors
from fusec.ops.spec import require

_KINDS = AttributeProto.AttributeType


def attributes(node: NodeProto, schema: defs.OpSchema | None, tensors: Tensors) -> dict[str, Any]:
    """Return the values of a node's attributes by name: int, float, str, tuples of these, Literal or GraphProto.

    schema: None for an op that onnx does not know.

    Raises VerifyError if the op lacks an attribute, or its type is wrong, or a required one is missing.
    """
    values: dict[str, Any] = {}
    for attribute in node.attribute:
        name = attribute.name
        require(name not in values, f"attribute {name!r} is given twice")
        require(not attribute.ref_attr_name, f"attribute {name!r} refers to a function's, but the node is in none")
        if schema is not None:
            _check(attribute, schema)
        values[name] = _value(attribute, tensors)
    for name, declared in schema.attributes.items() if schema is not None else ():
        require(not declared.required or name in values, f"needs an attribute {name!r}")
    return values


def _check(attribute: AttributeProto, schema: defs.OpSchema) -> None:
    name = attribute.name
    require(name in schema.attributes, f"has no attribute {name!r} (version {schema.since_version} of the op)")
    wanted = str(schema.attributes[name].type).rpartition(".")[2]  # AttrType.INTS
    given = _KINDS.Name(attribute.type)
    require(given == wanted, f"attribute {name!r} is of type {given.lower()}, not {wanted.lower()}")


def _value(attribute: AttributeProto, tensors: Tensors) -> Any:
    """Return an attribute as a Python value. Raises VerifyError for a kind that is not supported."""
    kind = attribute.type
    try:
        if kind == AttributeProto.INT:
            return attribute.i
        if kind == AttributeProto.FLOAT:
            return attribute.f
        if kind == AttributeProto.STRING:
            return attribute.s.decode("utf-8")
        if kind == AttributeProto.INTS:
            return tuple(attribute.ints)
        if kind == AttributeProto.FLOATS:
            return tuple(attribute.floats)
        if kind == AttributeProto.STRINGS:
            return tuple(s.decode("utf-8") for s in attribute.strings)
    except UnicodeDecodeError as error:
        raise VerifyError(f"attribute {attribute.name!r} is not UTF-8") from error
    if kind == AttributeProto.TENSOR:
        return tensors.literal(attribute.t)
    if kind == AttributeProto.SPARSE_TENSOR:
        return tensors.sparse(attribute.sparse_tensor)
    if kind == AttributeProto.GRAPH:
        return attribute.g
    if kind == AttributeProto.TYPE_PROTO:
        return attribute.tp
    raise VerifyError(f"attribute {attribute.name!r} of type {_KINDS.Name(kind).lower()} is not supported")
