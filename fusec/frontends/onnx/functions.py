"""Model-local functions are inlined before anything else looks at the model, unless that could not end well."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from onnx import FunctionProto, ModelProto, NodeProto, checker, inliner, shape_inference

from fusec.errors import ModelError
from fusec.frontends.onnx.structure import bodies as graphs_of
from fusec.system.printable import printable

_MAX_NODES = 1_000_000

Key = tuple[str, str, str]


def inlined(model: ModelProto, file: str) -> ModelProto:
    """The model with every call replaced by the function's nodes; ModelError for recursion or an explosion."""
    bodies: dict[Key, list[NodeProto]] = {}
    for function in model.functions:
        key = _key_of(function)
        if key in bodies:
            raise ModelError(f"{file}: two functions are named {'.'.join(filter(None, key))}")
        bodies[key] = list(all_nodes(function.node))
    called = [key for node in all_nodes(model.graph.node) if (key := _key(node)) in bodies]
    if not called:
        return model
    sizes: dict[Key, int] = {}
    for key in called:
        _measure(key, bodies, sizes, file)
    _check_opsets(model, sizes, file)
    total = len(model.graph.node) + sum(sizes[key] for key in called)
    if total > _MAX_NODES:
        raise ModelError(f"{file}: inlining its functions would make {total} nodes; the limit is {_MAX_NODES}")
    try:
        return inliner.inline_local_functions(model)
    except (RuntimeError, ValueError, TypeError, checker.ValidationError, shape_inference.InferenceError) as error:
        raise ModelError(f"{file}: its functions cannot be inlined: {error}") from error


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes, and those of the bodies among their attributes."""
    for node in nodes:
        yield node
        for body in graphs_of(node):
            yield from all_nodes(body.node)


def _check_opsets(model: ModelProto, called: Container[Key], file: str) -> None:
    """onnx leaves a function alone that is written in another opset than the model: say so instead."""
    versions = {entry.domain: entry.version for entry in model.opset_import}
    for function in model.functions:
        name = printable(f"{function.domain}.{function.name}")
        for entry in function.opset_import if _key_of(function) in called else ():
            ours = versions.get(entry.domain, entry.version)
            if ours != entry.version:
                raise ModelError(
                    f"{file}: function {name} is written in opset {entry.version} of domain {entry.domain!r}, "
                    f"the model in {ours}: convert one of them with onnx.version_converter"
                )


def _key_of(function: FunctionProto) -> Key:
    return (function.domain, function.name, getattr(function, "overload", ""))


def _key(node: NodeProto) -> Key:
    return (node.domain, node.op_type, getattr(node, "overload", ""))


def _measure(root: Key, bodies: dict[Key, list[NodeProto]], sizes: dict[Key, int], file: str) -> None:
    """Nodes each function comes to when all it calls is inlined; depth first without Python's recursion."""
    stack, open_ = [root], set[Key]()
    while stack:
        key = stack[-1]
        if key in sizes:
            stack.pop()
            continue
        calls = [k for node in bodies[key] if (k := _key(node)) in bodies]
        missing = [k for k in calls if k not in sizes]
        if not missing:
            sizes[key] = len(bodies[key]) + sum(sizes[k] for k in calls)
            open_.discard(key)
            stack.pop()
            continue
        open_.add(key)
        if recursive := next((k for k in missing if k in open_), None):
            raise ModelError(f"{file}: function {'.'.join(filter(None, recursive))} calls itself")
        stack.extend(missing)
