"""Make simpler graphs from a failing one: without an output or op, of smaller sizes, or of plainer types and numbers.

The steps that remove outputs and ops, and those that change sizes and types, are shared with `refusal_core`, which
shrinks refusals of cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, cast

import numpy as np

from fusec.diagnostics.refusal_core.rebuild import with_dtype, with_order, with_sizes
from fusec.diagnostics.refusal_core.reduce import Candidates, fewer_ops, fewer_outputs
from fusec.errors import FusecError, VerifyError
from fusec.ir import Constant, DType, Graph, Literal, Node, Op, TensorType, Value

SMALL = (1, 2, 3)  # sizes to try for each dim

Stage = Callable[[Graph], Iterator[Graph | None]]


def _graphs_of(candidates: Callable[[Graph], Candidates]) -> Stage:
    """Leave out the words that describe each candidate."""
    return lambda graph: (candidate for _, _, candidate in candidates(graph))


def _earlier_outputs(graph: Graph) -> Iterator[Graph | None]:
    """Remove one output; then return the operands of a node in place of each of its results."""
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    for name in outputs if len(outputs) > 1 else ():
        yield rebuilt(graph, {n: v for n, v in outputs.items() if n != name})
    for node in dict.fromkeys(v.node for v in graph.outputs):
        if node is not None and node.operands:
            earlier: dict[str, Value] = {}
            for name, value in outputs.items():
                operands = {f"{name}.{i}": v for i, v in enumerate(node.operands)}
                earlier |= operands if value.node is node else {name: value}
            yield rebuilt(graph, earlier)


def _fewer_leaves(graph: Graph) -> Iterator[Graph | None]:
    """Remove unused inputs; then replace an input or constant by an earlier one of the same type."""
    yield rebuilt(graph)
    leaves = _leaves(graph)
    for i, value in enumerate(leaves):
        for earlier in leaves[:i]:
            if value.type.same_value_type(earlier.type):
                yield rebuilt(graph, instead={value: earlier})


def _without_pairs(graph: Graph) -> Iterator[Graph | None]:
    """Remove two nodes in a row, such as a cast and the cast back, neither of which can be removed alone."""
    for value in (v for node in graph.nodes for v in node.results):
        earlier = [v.node for v in cast(Node, value.node).operands if v.node is not None]
        for source in (v for node in earlier for v in node.operands):
            if value.type.same_value_type(source.type):
                yield rebuilt(graph, instead={value: source})


def _leaves(graph: Graph) -> list[Value]:
    return [*graph.inputs, *(n.result for n in graph.nodes if isinstance(n.op, Constant))]


def _smaller_sizes(graph: Graph) -> Iterator[Graph | None]:
    sizes = sorted({d for v in graph.values() for d in v.type.shape}, reverse=True)
    if len(sizes) > 1:
        yield with_sizes(graph, {size: SMALL[1] for size in sizes if size > SMALL[1]})
        yield with_sizes(graph, {size: size // 2 for size in sizes if size > 1})
    for small in SMALL:
        for size in sizes:
            if small < size:
                yield with_sizes(graph, {size: small})


def _smaller_leaves(graph: Graph) -> Iterator[Graph | None]:
    """Reduce one dim of one input or constant, if no other value has to change with it."""
    for value in _leaves(graph):
        for dim, size in enumerate(value.type.shape):
            for small in SMALL:
                if small < size:
                    shape = (*value.type.shape[:dim], small, *value.type.shape[dim + 1 :])
                    try:
                        yield rebuilt(graph, types={value: TensorType(shape, value.type.dtype, value.type.order)})
                    except FusecError:
                        continue  # another value would have to change too


def _plain_types(graph: Graph) -> Iterator[Graph | None]:
    yield with_dtype(graph, DType.F32)
    yield with_order(graph, lambda _: ())
    for value in graph.values():
        if value.type.order:
            copy = graph.clone()
            twin = next(v for v in copy.values() if v.name == value.name)
            copy.set_type(twin, twin.type.with_order(()))
            yield copy


def _plain_attributes(graph: Graph) -> Iterator[Graph | None]:
    for node in graph.nodes:
        for name, plain in unusual(node.op):
            changed = replace(cast("Any", node.op), **{name: plain})
            try:
                yield rebuilt(graph, ops={node: changed})
            except FusecError:
                continue  # the op refuses this attribute here


def _plain_constants(graph: Graph) -> Iterator[Graph | None]:
    for node in graph.nodes:
        if isinstance(node.op, Constant):
            literal = node.op.literal
            for array in _simpler(literal.array):
                yield rebuilt(graph, ops={node: Constant(Literal.of(array, literal.label))})


STAGES: tuple[Stage, ...] = (
    _graphs_of(fewer_outputs),
    _graphs_of(fewer_ops),
    _earlier_outputs,
    _fewer_leaves,
    _without_pairs,
    _plain_attributes,
    _smaller_sizes,
    _smaller_leaves,
    _plain_types,
    _plain_constants,
)


def rebuilt(
    graph: Graph,
    outputs: Mapping[str, Value] | None = None,
    *,
    instead: Mapping[Value, Value] | None = None,
    ops: Mapping[Node, Op] | None = None,
    types: Mapping[Value, TensorType] | None = None,
) -> Graph:
    """Copy what some outputs of a graph need (by default all outputs), with changes.

    instead: values to replace by earlier ones.
    ops: nodes that get another op. All types are then inferred again.
    types: inputs and constants that get a smaller type. All other types are then inferred again.
    """
    instead, changed, retyped = instead or {}, dict(ops or {}), types or {}
    for value, type in retyped.items():
        if value.literal is not None and value.node is not None:
            part = value.literal.array[tuple(map(slice, type.shape))]
            changed[value.node] = Constant(Literal.of(part, value.literal.label))
    if outputs is None:
        outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    returned = [instead.get(v, v) for v in outputs.values()]
    needed: set[Value] = set()
    waiting = list(returned)
    while waiting:
        value = waiting.pop()
        if value not in needed:
            needed.add(value)
            waiting += [instead.get(v, v) for v in value.node.operands] if value.node is not None else []
    copy = Graph(graph.name)
    made = {v: copy.add_input(v.name, retyped.get(v, v.type)) for v in graph.inputs if v in needed}
    for node in graph.nodes:
        if needed.isdisjoint(node.results):
            continue
        twin = copy.insert(
            changed.get(node, node.op),
            [made[instead.get(v, v)] for v in node.operands],
            names=[v.name for v in node.results],
            types=None if changed or retyped else [v.type for v in node.results],
            origin=node.origin,
        )
        if len(twin.results) != len(node.results):
            raise VerifyError(f"{node!r} has {len(twin.results)} results with other attributes")
        made.update(zip(node.results, twin.results, strict=True))
        for old, new in zip(node.results, twin.results, strict=True):
            if new.type.same_value_type(old.type):
                copy.set_type(new, old.type)
    copy.set_outputs([made[v] for v in returned], list(outputs))
    return copy


def unusual(op: Op) -> list[tuple[str, Any]]:
    """List the attributes that have a simpler value, with that value: the default, or ones or zeros for windows."""
    found: list[tuple[str, Any]] = []
    ones, zeros = ("strides", "dilations", "steps"), ("pads", "output_padding", "starts")
    for item in fields(cast("Any", op)):
        value = getattr(op, item.name)
        if item.name in (*ones, *zeros) and isinstance(value, tuple):
            plain: Any = (int(item.name in ones),) * len(cast("tuple[Any, ...]", value))
        elif item.default is not MISSING:
            plain = item.default
        else:
            continue
        if value != plain:
            found.append((item.name, plain))
    return found


def complexity(literal: Literal) -> int:
    """Rate the complexity of a constant from 0 (zeros or empty) to 4 (any numbers)."""
    array = literal.array
    if array.size and np.all(array == array.reshape(-1)[0]):
        first = float(array.reshape(-1)[0])
        return 0 if first == 0 else 1 if first == 1 else 2
    return 3 if _is_small(array) else 4 if array.size else 0


def _is_small(array: np.ndarray[Any, Any]) -> bool:
    wide = array.astype(np.float64)
    return bool(np.all(np.abs(wide) <= 3) and np.all(wide == np.round(wide)))


def _simpler(array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    yield np.zeros_like(array)
    yield np.ones_like(array)
    if array.size and array.dtype != np.bool_:
        wide = array.astype(np.float64)
        yield np.full_like(array, 2)
        with np.errstate(invalid="ignore"):
            yield np.clip(np.nan_to_num(np.round(wide)), -3, 3).astype(array.dtype)
        yield (np.arange(array.size) % 4).reshape(array.shape).astype(array.dtype)
