"""Inline the functions of a model, after checks for recursion and size, in the opsets of the model."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from onnx import FunctionProto, ModelProto, NodeProto, checker, defs, inliner, shape_inference

from fusec.errors import ModelError
from fusec.frontends.onnx.model_file.structure import bodies as graphs_of
from fusec.system.printable import printable

_MAX_NODES = 1_000_000

Key = tuple[str, str, str]


def inlined(model: ModelProto, file: str) -> ModelProto:
    """Replace every call of a function by the function's nodes.

    Raises ModelError if a function calls itself, or the result would have more than _MAX_NODES nodes.
    """
    bodies: dict[Key, list[NodeProto]] = {}
    for function in model.functions:
        key = _key_of(function)
        if key in bodies:
            raise ModelError(f"{file}: two functions are named {'.'.join(filter(None, key))}")
        bodies[key] = list(all_nodes(function.node))
    called = [key for node in all_nodes(model.graph.node) if (key := _key(node)) in bodies]
    if not called:
        return model
    sizes = _sizes(called, bodies, file)
    model = _with_opsets_of(model, bodies, sizes, file)
    total = len(model.graph.node) + sum(sizes[key] for key in called)
    if total > _MAX_NODES:
        raise ModelError(f"{file}: inlining its functions would make {total} nodes; the limit is {_MAX_NODES}")
    try:
        return inliner.inline_local_functions(model)
    except (RuntimeError, ValueError, TypeError, checker.ValidationError, shape_inference.InferenceError) as error:
        raise ModelError(f"{file}: its functions cannot be inlined: {error}") from error


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Iterate over nodes and the nodes of their bodies."""
    for node in nodes:
        yield node
        for body in graphs_of(node):
            yield from all_nodes(body.node)


def _with_opsets_of(
    model: ModelProto, bodies: Mapping[Key, Sequence[NodeProto]], called: Container[Key], file: str
) -> ModelProto:
    """Give called functions the opsets of the model, because onnx silently inlines no others.

    Raises ModelError if an op of a function means something else in the opset of the model.
    """
    versions = {entry.domain: entry.version for entry in model.opset_import}
    changed: list[tuple[int, int, int]] = []
    for number, function in enumerate(model.functions):
        key = _key_of(function)
        for place, entry in enumerate(function.opset_import if key in called else ()):
            own = versions.get(entry.domain, entry.version)
            if own == entry.version:
                continue
            for node in bodies[key]:
                if node.domain == entry.domain and _since(node, own) != _since(node, entry.version):
                    name = printable(f"{function.domain}.{function.name}")
                    raise ModelError(
                        f"{file}: function {name} is written in opset {entry.version} of domain {entry.domain!r}, "
                        f"the model in {own}, where {printable(node.op_type)} is another op: convert one of them "
                        "with onnx.version_converter"
                    )
            changed.append((number, place, own))
    if not changed:
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    for number, place, own in changed:
        copy.functions[number].opset_import[place].version = own
    return copy


def _since(node: NodeProto, version: int) -> int:
    """Return the opset that defined what an op means in an opset; 0 for an op that ONNX does not define."""
    try:
        return defs.get_schema(node.op_type, version, node.domain).since_version
    except defs.SchemaError:
        return 0


def _key_of(function: FunctionProto) -> Key:
    return (function.domain, function.name, getattr(function, "overload", ""))


def _key(node: NodeProto) -> Key:
    return (node.domain, node.op_type, getattr(node, "overload", ""))


def _sizes(called: Iterable[Key], bodies: Mapping[Key, Sequence[NodeProto]], file: str) -> dict[Key, int]:
    """Count the nodes of each called function after inlining its calls."""
    calls: dict[Key, list[Key]] = {}
    stack = list(called)
    while stack:
        if (key := stack.pop()) not in calls:
            calls[key] = [k for node in bodies[key] if (k := _key(node)) in bodies]
            stack += calls[key]
    sizes: dict[Key, int] = {}
    try:
        for key in TopologicalSorter(calls).static_order():
            sizes[key] = len(bodies[key]) + sum(sizes[k] for k in calls[key])
    except CycleError as error:
        name = ".".join(filter(None, error.args[1][0]))
        raise ModelError(f"{file}: function {name} calls itself") from error
    return sizes
