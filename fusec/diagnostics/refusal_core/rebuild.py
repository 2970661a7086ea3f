"""Copy bodies with other types or fewer ops. The copy is None if the change makes no valid graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from fusec.errors import VerifyError
from fusec.ir import Constant, DType, Graph, Literal, Node, Op, TensorType, Value
from fusec.ops import Cast

Retype = Callable[[Value], TensorType]


def retyped(body: Graph, retype: Retype, numbers: Mapping[int, int] | None = None) -> Graph | None:
    """Return the body with inputs and constants of other types, and all other types inferred from them.

    retype: returns the new type and layout of a value.
    numbers: new sizes inside attributes (the shape of a reshape), by old size.
    """
    copy = Graph(body.name)
    mapped: dict[Value, Value] = {v: copy.add_input(v.name, retype(v)) for v in body.inputs}
    try:
        for node in body.nodes:
            if isinstance(node.op, Constant):
                type = retype(node.result)
                if (type.size == 1) != (node.result.type.size == 1):
                    return None  # because a vector would become a number passed by value, which is another graph
                op, operands = Constant(_literal(node.op.literal, type)), []
            else:
                op, operands = _op(node, retype, numbers or {}), [mapped[v] for v in node.operands]
            twin = copy.insert(op, operands, names=[v.name for v in node.results], origin=node.origin)
            for old, new in zip(node.results, twin.results, strict=True):
                order = retype(old).order
                copy.set_type(new, new.type.with_order(order if len(order) == new.type.rank else ()))
                mapped[old] = new
        copy.set_outputs([mapped[v] for v in body.outputs], body.output_names)
        copy.verify()
    except VerifyError:
        return None
    return copy


def _op(node: Node, retype: Retype, numbers: Mapping[int, int]) -> Op:
    op = node.op
    if isinstance(op, Cast):
        return replace(op, to=retype(node.result).dtype)
    changed = {
        name: tuple(numbers.get(n, n) for n in cast("tuple[Any, ...]", value))
        for name, value in op.attributes.items()
        if name in ("shape", "sizes") and isinstance(value, tuple)
    }
    return replace(cast(Any, op), **changed) if changed else op


def _literal(literal: Literal, type: TensorType) -> Literal:
    """Return the constant in another type: its numbers if the shape stays, else ones, since cuDNN reads none."""
    if literal.type.shape != type.shape:
        return Literal(type, lambda: np.ones(type.shape, type.dtype.numpy), literal.label)
    if literal.type.dtype is type.dtype:
        return literal

    def converted() -> np.ndarray[Any, Any]:
        with np.errstate(over="ignore"):  # a mask's least number becomes -infinity
            return literal.array.astype(type.dtype.numpy)

    return Literal(type, converted, literal.label)


def with_dtype(body: Graph, dtype: DType) -> Graph | None:
    """Return the body with all floating-point tensors in one type."""
    return retyped(body, lambda v: v.type.with_dtype(dtype) if v.type.dtype.is_float else v.type)


def with_order(body: Graph, order: Callable[[TensorType], tuple[int, ...]]) -> Graph | None:
    """Return the body with every tensor in the layout chosen for its type."""
    return retyped(body, lambda v: v.type.with_order(order(v.type)))


def with_sizes(body: Graph, numbers: Mapping[int, int]) -> Graph | None:
    """Return the body with other sizes: `numbers` maps each old size to the new one, wherever it occurs."""

    def resized(value: Value) -> TensorType:
        t = value.type
        return TensorType(tuple(numbers.get(d, d) for d in t.shape), t.dtype, t.order)

    return retyped(body, resized, numbers)


def with_outputs(body: Graph, outputs: Sequence[Value], new_inputs: Sequence[Value] = ()) -> Graph | None:
    """Return the part of the body that makes `outputs`, with `new_inputs` given instead of computed."""
    given = set(new_inputs)
    needed: dict[Node, None] = {}
    stack = [v for v in outputs if v not in given]
    read: set[Value] = set()
    while stack:
        value = stack.pop()
        if value.node is None or value in given:
            read.add(value)
        elif value.node not in needed:
            needed[value.node] = None
            stack.extend(value.node.operands)
    nodes = [n for n in body.nodes if n in needed]
    outputs = [v for v in dict.fromkeys(outputs) if v.node in needed]
    if not outputs or all(isinstance(n.op, Constant) for n in nodes) or any(v.literal is not None for v in outputs):
        return None
    inputs = [v for v in dict.fromkeys((*body.inputs, *new_inputs)) if v in read]
    smaller = body.extract(inputs, nodes, outputs)
    for value in smaller.inputs[len(inputs) - sum(v in given for v in inputs) :]:
        # a virtual value has no layout; as an input it gets that of the next value, which cuDNN takes most likely
        like = value.users[0].results[0].type
        if like.shape == value.type.shape:
            smaller.set_type(value, value.type.with_order(like.order))
    return smaller


def bypassed(body: Graph, node: Node, operand: int) -> Graph | None:
    """Return the body without one op, whose users use an operand of the same type."""
    value = node.operands[operand]
    if len(node.results) != 1 or not value.type.same_value_type(node.result.type):
        return None
    copy = body.clone()
    twins = dict(zip(body.nodes, copy.nodes, strict=True))
    twin = twins[node]
    copy.replace(twin.result, twin.operands[operand])
    copy.prune()
    return with_outputs(copy, copy.outputs)
