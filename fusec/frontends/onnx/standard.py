"""Read the function body that the ONNX standard defines for an op."""

# The stubs of onnx lack the members of schemas that are about function bodies.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping, Sequence

from google.protobuf.message import DecodeError
from onnx import AttributeProto, FunctionProto, NodeProto, TypeProto, defs

from fusec.errors import VerifyError
from fusec.system.printable import printable


def has_body(schema: defs.OpSchema) -> bool:
    """Tell if the standard defines the op by other ops."""
    return bool(schema.has_function or schema.has_context_dependent_function)


def body_of(node: NodeProto, schema: defs.OpSchema, opset: int, types: Sequence[TypeProto]) -> FunctionProto | None:
    """Return the op's body with the attributes of the node filled in; None if the standard has no body."""
    text = _static(schema, opset) or _dependent(node, schema, opset, types)
    if not text:
        return None
    try:
        body = FunctionProto.FromString(text)
    except DecodeError as error:
        raise VerifyError(f"the body of op {printable(node.op_type)} in the installed onnx cannot be read") from error
    given = {a.name: a for a in node.attribute}
    for name, declared in schema.attributes.items():
        if name not in given and declared.default_value.type:
            given[name] = declared.default_value
    filled = FunctionProto()
    filled.CopyFrom(body)
    for inner in filled.node:
        _fill(inner, given)
    return filled


def _newest(versions: Sequence[int], opset: int) -> int:
    return max((v for v in versions if v <= opset), default=0)


def _static(schema: defs.OpSchema, opset: int) -> bytes:
    version = _newest(schema.function_opset_versions, opset) if schema.has_function else 0
    return schema.get_function_with_opset_version(version) if version else b""


def _dependent(node: NodeProto, schema: defs.OpSchema, opset: int, types: Sequence[TypeProto]) -> bytes:
    if not schema.has_context_dependent_function:
        return b""
    version = _newest(schema.context_dependent_function_opset_versions, opset)
    if not version:
        return b""
    try:
        return schema.get_context_dependent_function_with_opset_version(
            version, node.SerializeToString(), [t.SerializeToString() for t in types]
        )
    except RuntimeError as error:
        raise VerifyError(f"the standard has no body for this use of op {printable(node.op_type)}: {error}") from error


def _fill(node: NodeProto, given: Mapping[str, AttributeProto]) -> None:
    """Replace references to attributes of the call by their values, and remove references to attributes not given."""
    filled: list[AttributeProto] = []
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            for graph in (attribute.g, *attribute.graphs):
                for inner in graph.node:
                    _fill(inner, given)
            filled.append(attribute)
        elif attribute.ref_attr_name in given:
            copy = AttributeProto()
            copy.CopyFrom(given[attribute.ref_attr_name])
            copy.name = attribute.name
            filled.append(copy)
    copies = [AttributeProto.FromString(a.SerializeToString()) for a in filled]
    del node.attribute[:]
    node.attribute.extend(copies)
