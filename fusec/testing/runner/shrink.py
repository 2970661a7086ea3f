"""Shrink a graph that fails: remove outputs and ops, and simplify inputs, sizes, attributes and constants.

Shrinking is deterministic. It ends, because the weight of the graph decreases with each step.
`refusal_core` does the same for refusals of cuDNN, and shares the code that changes sizes and types.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, cast

import numpy as np

from fusec.diagnostics.refusal_core.rebuild import with_dtype, with_order, with_sizes
from fusec.errors import FusecError
from fusec.ir import Constant, DType, Graph, Literal, Node, Op, TensorType, Value, print_graph
from fusec.testing.case import Case

SECONDS = 20.0
SMALL = (1, 2, 3)  # sizes to try for each dim


def reduce(graph: Graph, fails: Callable[[Graph], bool], seconds: float = SECONDS) -> Graph:
    """Return the smallest graph found within the time for which `fails` is true. `graph`: one that fails."""
    end = time.monotonic() + seconds
    seen = {digest(graph)}
    least = weight(graph)
    shrunk = True
    while shrunk:
        shrunk = False
        for candidates in STAGES:
            found = True
            while found:
                found = False
                for candidate in _built(candidates, graph):
                    if time.monotonic() > end:
                        return graph
                    key, lighter = digest(candidate), weight(candidate)
                    if lighter < least and key not in seen and fails(candidate):
                        graph, least, found, shrunk = candidate, lighter, True, True
                    seen.add(key)
                    if found:
                        break
    plain = renamed(graph)
    return plain if digest(plain) != digest(graph) and fails(plain) else graph


def renamed(graph: Graph) -> Graph:
    """Copy a graph with short names, so that equal results print the same text."""
    copy = Graph("fuzz")
    made = {v: copy.add_input(f"x{i}", v.type) for i, v in enumerate(graph.inputs)}
    for number, node in enumerate(graph.nodes):
        op = Constant(Literal.of(node.op.literal.array, f"c{number}")) if isinstance(node.op, Constant) else node.op
        stem = "c" if isinstance(op, Constant) else "v"
        names = [f"{stem}{number}" + ("" if not i else f"_{i}") for i in range(len(node.results))]
        twin = copy.insert(op, [made[v] for v in node.operands], names=names, types=[v.type for v in node.results])
        made.update(zip(node.results, twin.results, strict=True))
    outputs = [made[v] for v in graph.outputs]
    copy.set_outputs(outputs, [f"y{i}" for i in range(len(outputs))])
    return copy


def reduce_case(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Set each option of a case to its simplest value, if the case still fails."""
    plain: dict[str, Any] = {
        "precision": "fp32",
        "judge": "lowers",
        "disable": frozenset[str](),
        "channels_last": False,
        "style": "integers",
        "seed": 0,
    }
    for name, value in plain.items():
        if getattr(case, name) != value and fails(simpler := replace(case, **{name: value})):
            case = simpler
    for name in sorted(case.disable):
        if fails(simpler := replace(case, disable=case.disable - {name})):
            case = simpler
    return case


def digest(graph: Graph) -> str:
    """Hash the text and the constants of a graph."""
    sha = hashlib.sha256(print_graph(graph).encode())
    for node in graph.nodes:
        if isinstance(node.op, Constant):
            sha.update(node.op.literal.digest.encode())
    return sha.hexdigest()


def weight(graph: Graph) -> tuple[int, ...]:
    """Return numbers that measure a graph's complexity, the most important first."""
    computed = [n for n in graph.nodes if not isinstance(n.op, Constant)]
    constants = [n.op.literal for n in graph.nodes if isinstance(n.op, Constant)]
    values = list(graph.values())
    return (
        len(computed),
        len(graph.outputs),
        len(graph.inputs) + len(constants),
        sum(len(_unusual(n.op)) for n in computed),  # before sizes: a stride of 1 makes them larger
        sum(d for v in values for d in v.type.shape),
        sum(v.type.dtype is not DType.F32 for v in values if v.type.dtype.is_float),
        sum(bool(v.type.order) for v in values),
        sum(map(_intricacy, constants)),
    )


def _built(candidates: Callable[[Graph], Iterator[Graph | None]], graph: Graph) -> Iterator[Graph]:
    """Iterate over the candidates that can be built."""
    made = candidates(graph)
    while True:
        try:
            candidate = next(made)
        except StopIteration:
            return
        except Exception:  # noqa: BLE001  # because the bug can be in the code that builds a candidate
            return
        if candidate is not None:
            yield candidate


# stages, those that remove most first -------------------------------------------------------------


def _fewer_outputs(graph: Graph) -> Iterator[Graph | None]:
    outputs, names = graph.outputs, graph.output_names
    if len(outputs) > 1:
        for output, name in zip(outputs, names, strict=True):
            yield rebuilt(graph, [output], [name])
        for i in range(len(outputs)):
            yield rebuilt(graph, outputs[:i] + outputs[i + 1 :], names[:i] + names[i + 1 :])


def _fewer_ops(graph: Graph) -> Iterator[Graph | None]:
    """Make each value the only output; then remove each op that only outputs use."""
    for node in graph.nodes:
        if not isinstance(node.op, Constant):
            for value in node.results:
                yield rebuilt(graph, [value])
    outputs = graph.outputs
    for node in reversed(list(graph.nodes)):
        if all(user is graph.return_node for value in node.results for user in value.users):
            others = [v for v in outputs if v.node is not node]
            yield rebuilt(graph, list(dict.fromkeys((*others, *node.operands))))


def _as_inputs(graph: Graph) -> Iterator[Graph | None]:
    """Replace results of a node by inputs, late nodes first, because that removes most."""
    for node in reversed(list(graph.nodes)):
        if not isinstance(node.op, Constant):
            yield rebuilt(graph, inputs=node.results)
            if len(node.results) > 1:
                for value in node.results:
                    yield rebuilt(graph, inputs=[value])


def _bypass(graph: Graph) -> Iterator[Graph | None]:
    """Replace the result of a node by one of its operands."""
    for node in reversed(list(graph.nodes)):
        for value in node.results:
            for operand in dict.fromkeys(node.operands):
                if operand.type.same_value_type(value.type):
                    yield rebuilt(graph, instead={value: operand})


def _fewer_leaves(graph: Graph) -> Iterator[Graph | None]:
    """Remove unused inputs; then replace an input or constant by an earlier one of the same type."""
    yield rebuilt(graph)
    leaves = [*graph.inputs, *(n.result for n in graph.nodes if isinstance(n.op, Constant))]
    for i, value in enumerate(leaves):
        for earlier in leaves[:i]:
            if value.type.same_value_type(earlier.type):
                yield rebuilt(graph, instead={value: earlier})


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
    leaves = [*graph.inputs, *(n.result for n in graph.nodes if isinstance(n.op, Constant))]
    for value in leaves:
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
        for name, plain in _unusual(node.op):
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


STAGES: tuple[Callable[[Graph], Iterator[Graph | None]], ...] = (
    _fewer_outputs,
    _fewer_ops,
    _as_inputs,
    _bypass,
    _fewer_leaves,
    _plain_attributes,
    _smaller_sizes,
    _smaller_leaves,
    _plain_types,
    _plain_constants,
)


def rebuilt(
    graph: Graph,
    outputs: Sequence[Value] | None = None,
    names: Sequence[str] | None = None,
    *,
    inputs: Collection[Value] = (),
    instead: Mapping[Value, Value] | None = None,
    ops: Mapping[Node, Op] | None = None,
    types: Mapping[Value, TensorType] | None = None,
) -> Graph:
    """Copy the part of a graph that some outputs need (by default all outputs), with changes.

    inputs: values that become inputs.
    instead: values to replace by earlier ones.
    ops: nodes that get another op. All types are then inferred again.
    types: inputs and constants that get a smaller type. All other types are then inferred again.
    """
    if outputs is None:
        outputs, names = graph.outputs, graph.output_names
    swap, changed, retyped = instead or {}, dict(ops or {}), types or {}
    for value in retyped:
        if value.literal is not None and value.node is not None:
            part = value.literal.array[tuple(map(slice, retyped[value].shape))]
            changed[value.node] = Constant(Literal.of(part, value.literal.label))

    def source(value: Value) -> Value:
        return swap.get(value, value)

    needed: set[Node] = set()
    read: set[Value] = set()
    waiting = [source(v) for v in outputs]
    while waiting:
        value = waiting.pop()
        if value in inputs or value.node is None:
            read.add(value)
        elif value.node not in needed:
            needed.add(value.node)
            waiting += map(source, value.node.operands)
    copy = Graph(graph.name)
    leaves = [v for v in graph.values() if v in read]
    made = {v: copy.add_input(v.name, retyped.get(v, v.type)) for v in leaves}
    for node in graph.nodes:
        if node not in needed:
            continue
        twin = copy.insert(
            changed.get(node, node.op),
            [made[source(v)] for v in node.operands],
            names=[v.name for v in node.results],
            types=None if changed or retyped else [v.type for v in node.results],
            origin=node.origin,
        )
        for old, new in zip(node.results, twin.results, strict=True):
            made.setdefault(old, new)  # a value in `inputs` stays an input, even if other results need its node
            if new.type.same_value_type(old.type):
                copy.set_type(new, old.type)
    copy.set_outputs([made[source(v)] for v in outputs], names)
    return copy


# simple values ------------------------------------------------------------------------------------


def _unusual(op: Op) -> list[tuple[str, Any]]:
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


def _intricacy(literal: Literal) -> int:
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
