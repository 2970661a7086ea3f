"""Rewrite a candidate into equivalent spellings, because a precompiled engine matches one order of operations only.

Each function maps a body to a new body, or to None where it does not apply. Inputs and outputs stay; meaning stays
up to rounding. Plans named here are those offered for 8x64x28x28, 3x3, 64 filters (P39: precompiled engine 39).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from fusec.ir import HALVES, DType, Graph, Node, Value
from fusec.ops import FORWARD_CONVOLUTIONS, IMAGE_CONVOLUTIONS, Cast, Pointwise, Reshape, pw
from fusec.passes.partition.halves_spelling import in_halves
from fusec.passes.partition.product_as_convolution import as_convolution, respelled_constant
from fusec.passes.partition.tanh_spelling import gelu_by_tanh, swish_by_tanh
from fusec.passes.partition.unpacked_spelling import unpacked
from fusec.passes.rewriting.rewriter import NoMatch, on_copy

Rewrite = Callable[[Graph], Graph | None]
IN_HALVES = "in_halves"

# With a bias before them these reach P39 (relu) or P1 (the others); any other activation is P0 either way.
PRECOMPILED_ACTIVATIONS = frozenset({"relu", "clip", "sigmoid", "tanh", "elu"})


@on_copy
def residual_first(graph: Graph) -> None:
    """conv + bias + z -> conv + z + bias: P39 instead of P0."""
    conv = _convolution(graph)
    biased = _sum_of(conv.result)
    bias, summed = _other(biased, conv.result), _sum_of(biased.result)
    z = _other(summed, biased.result)
    if not (_is_bias(bias, conv.result) and _is_residual(z, conv.result) and _finishes(summed.result)):
        raise NoMatch("no bias and residual, or more than an activation follows", summed.result)
    with_z = graph.insert(
        pw("add"), (conv.result, z), before=summed, names=("with_residual",), origin=summed.origin
    ).result
    last = graph.insert(pw("add"), (with_z, bias), before=summed, types=[summed.result.type], origin=biased.origin)
    graph.replace(summed.result, last.result)


@on_copy
def conv_operand_first(graph: Graph) -> None:
    """add(z, conv) -> add(conv, z): P39 instead of P0 when a bias follows."""
    conv = _convolution(graph)
    add = _sum_of(conv.result)
    z, biased = add.operands[0], _only_add(add.result)
    if z is conv.result or not _is_residual(z, conv.result) or not _finishes((biased or add).result):
        raise NoMatch("no residual first, or more than an activation follows", add.result)
    twin = graph.insert(pw("add"), (conv.result, z), before=add, types=[add.result.type], origin=add.origin)
    graph.replace(add.result, twin.result)


@on_copy
def zero_bias(graph: Graph) -> None:
    """conv [+ z] [+ activation] without a bias gets one of zeros, after z: P39 instead of P0."""
    at = _convolution(graph).result
    residual = _only_add(at)
    if residual is not None:
        if not _is_residual(_other(residual, at), at):
            raise NoMatch("has a bias", at)
        at = residual.result
    follower = _only_user(at)
    activated = follower is not None and not isinstance(follower.op, Reshape)
    if _only_add(at) is not None or not _finishes(at) or not (activated or residual is not None):
        raise NoMatch("has a bias, or neither a residual nor one activation", at)
    following, index = at.uses[0]
    zeros = np.zeros((1, at.type.shape[1], *([1] * (at.type.rank - 2))), at.type.dtype.numpy)
    bias = graph.constant(zeros, "zero_bias", before=following)
    biased = graph.insert(pw("add"), (at, bias), before=following, types=[at.type]).result
    graph.set_input(following, index, biased)


@on_copy
def io_dtype(graph: Graph) -> None:
    """conv -> cast to f32 -> pointwise with f32 constants -> cast back: compute everything in the I/O dtype.

    A fused body computes in f32 all the same. With a bias in f32 next to 16-bit data, only P0 is offered.
    """
    conv = _convolution(graph)
    up, narrow = _only_user(conv.result), conv.result.type.dtype
    if up is None or up.op != Cast(DType.F32) or narrow not in HALVES:
        raise NoMatch("not cast from 16 bits to f32", conv.result)
    inside: dict[Node, None] = {up: None}
    downs: list[Node] = []
    for node in graph.nodes:
        if not any(v.node in inside for v in node.operands):
            continue
        if isinstance(node.op, Cast) and node.op.to is narrow:
            downs.append(node)
            continue
        others = [v for v in node.operands if v.node not in inside]
        plain = isinstance(node.op, Pointwise) and node.result.type.dtype is DType.F32
        if not plain or any(v.literal is None or v.type.dtype is not DType.F32 for v in others):
            raise NoMatch("not pointwise with f32 constants", node.results[0])
        inside[node] = None
    if not downs or any(v in graph.outputs for n in inside for v in n.results):
        raise NoMatch("not cast back, or also an output in f32", up.result)
    mapped: dict[Value, Value] = {up.result: conv.result}
    for node in [n for n in inside if n is not up]:
        operands = [mapped.get(v) or _narrowed(graph, v, narrow, node) for v in node.operands]
        types = [node.result.type.with_dtype(narrow)]
        mapped[node.result] = graph.insert(node.op, operands, before=node, types=types, origin=node.origin).result
    for down in downs:
        graph.replace(down.result, mapped[down.operands[0]])


FOR_ENGINES: Mapping[str, Rewrite] = {
    "as_convolution": as_convolution,
    "io_dtype": io_dtype,
    "residual_first": residual_first,
    "conv_operand_first": conv_operand_first,
    "zero_bias": zero_bias,
}
FOR_SPEED: Mapping[str, Rewrite] = {  # tried where times are measured
    "gelu_by_tanh": gelu_by_tanh,
    "swish_by_tanh": swish_by_tanh,
    IN_HALVES: in_halves,
}
UNPACKED = "unpacked"  # for steps of fusec's kernel, which cuDNN cannot run as they are
REWRITES: Mapping[str, Rewrite] = {**FOR_ENGINES, **FOR_SPEED, UNPACKED: unpacked}


def spellings(body: Graph) -> list[tuple[tuple[str, ...], Graph]]:
    """List the spellings to ask cuDNN for: the one for precompiled engines first, the body as it is last."""
    names: list[str] = []
    current = body
    for name in FOR_ENGINES:  # in this order, because each makes the pattern that the next looks for
        changed = spelled(current, name)
        if changed is not None:
            names.append(name)
            current = changed
    return [(tuple(names), current), ((), body)] if names else [((), body)]


def faster_spellings(body: Graph) -> list[tuple[tuple[str, ...], Graph]]:
    """List spellings that engines do not need but may run faster, derived from each of the others."""
    each = (((*names, name), spelled(other, name)) for names, other in spellings(body) for name in FOR_SPEED)
    return [(names, changed) for names, changed in each if changed is not None]


def respell(body: Graph, names: tuple[str, ...]) -> Graph:
    """Rewrite the body by the named spellings, which must apply to it."""
    for name in names:
        changed = spelled(body, name)
        assert changed is not None, f"spelling {name} does not apply"
        body = changed
    return body


def spelled(body: Graph, name: str) -> Graph | None:
    """Rewrite the body by one more spelling; None if it does not apply, or there is none of that name.

    Outputs keep the larger tensors they are part of.
    """
    changed = REWRITES[name](body) if name in REWRITES else None
    if changed is not None:
        for before, after in zip(body.outputs, changed.outputs, strict=True):
            if before.type.within:
                changed.set_type(after, before.type)
    return changed


def _convolution(graph: Graph) -> Node:
    found = [n for n in graph.nodes if isinstance(n.op, IMAGE_CONVOLUTIONS)]
    if len(found) != 1 or not isinstance(found[0].op, FORWARD_CONVOLUTIONS):
        raise NoMatch("not one convolution")
    return found[0]


def _only_user(value: Value) -> Node | None:
    """Return the one node that uses a value; None if the value is an output or used twice."""
    users = value.users
    return users[0] if len(value.uses) == 1 and users[0].results else None


def _finishes(value: Value) -> bool:
    """Tell if nothing follows but an activation that a precompiled engine knows."""
    user = _only_user(value)
    if user is not None and user.op.name in PRECOMPILED_ACTIVATIONS:
        value = user.result
    while (user := _only_user(value)) is not None and isinstance(user.op, Reshape):
        value = user.result  # from a convolution's dims back to those of the product it replaces
    return user is None and len(value.uses) == 1


def _only_add(value: Value) -> Node | None:
    user = _only_user(value)
    return user if user is not None and user.op.name == "add" else None


def _sum_of(value: Value) -> Node:
    user = _only_add(value)
    if user is None:
        raise NoMatch("not added to a value", value)
    return user


def _other(add: Node, value: Value) -> Value:
    first, second = add.operands
    return second if first is value else first


def _is_bias(value: Value, result: Value) -> bool:
    """Return True for a constant with one number per channel."""
    rank, shape = result.type.rank, value.type.shape
    padded = (1,) * (rank - len(shape)) + shape
    wanted = tuple(d if i == 1 else 1 for i, d in enumerate(result.type.shape))
    return value.literal is not None and padded == wanted


def _is_residual(value: Value, result: Value) -> bool:
    return value.literal is None and value.type.same_value_type(result.type)


def _narrowed(graph: Graph, value: Value, dtype: DType, before: Node) -> Value:
    type = value.type.with_dtype(dtype)
    return respelled_constant(graph, value, "cast", type, lambda array: array.astype(dtype.numpy), before)
