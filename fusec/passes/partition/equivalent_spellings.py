"""Rewrite a candidate into equivalent spellings, because a precompiled engine matches one order of operations only.

Each function maps a body to a new body, or to None where it does not apply. Inputs and outputs stay; meaning stays
up to rounding. Plans named here are those offered for 8x64x28x28, 3x3, 64 filters (P39: precompiled engine 39).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from fusec.ir import HALVES, Constant, DType, Graph, Literal, Node, TensorType, Value, channels_last
from fusec.ops import Cast, Conv, ConvTranspose, MatMul, Pointwise, Reshape, pw
from fusec.passes.partition.tanh_spelling import gelu_by_tanh, swish_by_tanh

Rewrite = Callable[[Graph], Graph | None]

# With a bias before them these reach P39 (relu) or P1 (the others); any other activation is P0 either way.
PRECOMPILED_ACTIVATIONS = frozenset({"relu", "clip", "sigmoid", "tanh", "elu"})


def residual_first(body: Graph) -> Graph | None:
    """conv + bias + z -> conv + z + bias: P39 instead of P0."""
    graph = body.clone()
    conv = _convolution(graph)
    biased = _only_add(conv.result) if conv else None
    if conv is None or biased is None or not _is_bias(bias := _other(biased, conv.result), conv.result):
        return None
    summed = _only_add(biased.result)
    if summed is None or not _finishes(summed.result):
        return None
    if not _is_residual(z := _other(summed, biased.result), conv.result):
        return None
    with_z = graph.insert(
        pw("add"), (conv.result, z), before=summed, names=("with_residual",), origin=summed.origin
    ).result
    last = graph.insert(pw("add"), (with_z, bias), before=summed, types=[summed.result.type], origin=biased.origin)
    return _swap(graph, summed, last.result)


def conv_operand_first(body: Graph) -> Graph | None:
    """add(z, conv) -> add(conv, z): P39 instead of P0 when a bias follows."""
    graph = body.clone()
    conv = _convolution(graph)
    add = _only_add(conv.result) if conv else None
    if conv is None or add is None or add.operands[0] is conv.result:
        return None
    if not _is_residual(z := add.operands[0], conv.result):
        return None
    biased = _only_add(add.result)
    if not _finishes(add.result if biased is None else biased.result):
        return None
    twin = graph.insert(pw("add"), (conv.result, z), before=add, types=[add.result.type], origin=add.origin)
    return _swap(graph, add, twin.result)


def zero_bias(body: Graph) -> Graph | None:
    """conv [+ z] [+ activation] without a bias gets one of zeros, after z: P39 instead of P0."""
    graph = body.clone()
    conv = _convolution(graph)
    if conv is None:
        return None
    at = conv.result
    add = _only_add(at)
    has_residual = add is not None and _is_residual(_other(add, at), at)
    if add is not None and has_residual:
        at = add.result
    elif add is not None:
        return None
    if _only_add(at) is not None:
        return None
    follower = _only_user(at)
    activated = follower is not None and not isinstance(follower.op, Reshape)
    if not _finishes(at) or not (activated or has_residual):
        return None
    following, index = at.uses[0]
    zeros = np.zeros((1, at.type.shape[1], *([1] * (at.type.rank - 2))), at.type.dtype.numpy)
    bias = graph.constant(zeros, "zero_bias", before=following)
    biased = graph.insert(pw("add"), (at, bias), before=following, types=[at.type]).result
    graph.set_input(following, index, biased)
    return graph


def io_dtype(body: Graph) -> Graph | None:
    """conv -> cast to f32 -> pointwise with f32 constants -> cast back: compute everything in the I/O dtype.

    A fused body computes in f32 all the same. With a bias in f32 next to 16-bit data, only P0 is offered.
    """
    graph = body.clone()
    conv = _convolution(graph)
    up = _only_user(conv.result) if conv else None
    if conv is None or up is None or not isinstance(up.op, Cast) or up.op.to is not DType.F32:
        return None
    narrow = conv.result.type.dtype
    if narrow not in HALVES:
        return None
    inside: dict[Node, None] = {up: None}
    downs: list[Node] = []
    for node in graph.nodes:
        if not any(v.node in inside for v in node.operands):
            continue
        if isinstance(node.op, Cast) and node.op.to is narrow:
            downs.append(node)
            continue
        wide = [v for v in node.operands if v.node not in inside]
        plain = isinstance(node.op, Pointwise) and node.result.type.dtype is DType.F32
        if not plain or any(v.literal is None or v.type.dtype is not DType.F32 for v in wide):
            return None
        inside[node] = None
    if not downs or any(v in graph.outputs for n in inside for v in n.results):
        return None
    mapped: dict[Value, Value] = {up.result: conv.result}
    for node in [n for n in inside if n is not up]:
        operands = [mapped.get(v) or _constant_as(graph, v, narrow, node) for v in node.operands]
        types = [node.result.type.with_dtype(narrow)]
        mapped[node.result] = graph.insert(node.op, operands, before=node, types=types, origin=node.origin).result
    for down in downs:
        graph.replace(down.result, mapped[down.operands[0]])
    graph.prune()
    return graph


def as_convolution(body: Graph) -> Graph | None:
    """x[…, K] @ constant w[K, N] as a 1x1 convolution over [rows, K, 1, 1]: P37 with bias and relu.

    It needs no compile time. It is the only true-fp32 product, because every matmul engine rounds fp32 to tf32.
    """
    graph = body.clone()
    products = [n for n in graph.nodes if isinstance(n.op, MatMul)]
    if len(products) != 1:
        return None
    product = products[0]
    x, w = product.operands
    if not x.type.dtype.is_float:
        return None
    columns = product.result.type.shape[-1]
    lead = product.result.type.shape[:-1]
    rows = math.prod(lead)
    if w.literal is None or w.type.size != w.type.shape[-1] * w.type.shape[-2] or x.type.shape[:-1] != lead:
        return None
    space = product.result.type.shape
    nodes = [n for n in graph.nodes if not isinstance(n.op, Constant)]
    if any(v.type.order for n in nodes for v in (*n.results, *n.operands)):
        return None  # rows of such a tensor are not one dim of its memory
    if any(v.type.shape not in (space, x.type.shape) for n in nodes for v in n.results):
        return None
    if any("axis" in n.op.attributes for n in nodes):
        return None
    prologue = _upstream(product)
    mapped: dict[Value, Value] = {}

    def place(value: Value, before: Node, wide: int) -> Value | None:
        """Reshape the value to [rows, columns, 1, 1]; None if it broadcasts along part of the rows."""
        if value in mapped:
            return mapped[value]
        if value.scalar() is not None and value.type.rank <= 4:
            return value
        padded = (1,) * (len(space) - value.type.rank) + value.type.shape
        if padded[:-1] not in (lead, (1,) * len(lead)) or padded[-1] not in (wide, 1):
            return None
        shape = (math.prod(padded[:-1]), padded[-1], 1, 1)
        mapped[value] = _reshaped(graph, value, shape, before)
        return mapped[value]

    for node in nodes:
        if node is product:
            image = place(x, node, x.type.shape[-1])
            if image is None:
                return None
            conv = Conv((1, 1), (0, 0, 0, 0), (1, 1))
            operands = [image, _as_filters(graph, w, node)]
            mapped[node.result] = graph.insert(conv, operands, before=node, origin=node.origin).result
            continue
        wide = x.type.shape[-1] if node in prologue else columns
        placed = [place(v, node, wide) for v in node.operands]
        if any(v is None for v in placed):
            return None
        type = TensorType((rows, wide, 1, 1), node.result.type.dtype, channels_last(4))
        operands = [v for v in placed if v is not None]
        mapped[node.result] = graph.insert(node.op, operands, before=node, types=[type], origin=node.origin).result
    for value in dict.fromkeys(graph.outputs):
        back = graph.insert(Reshape(value.type.shape), (mapped[value],), names=(value.name,)).result
        graph.replace(value, back)
    graph.prune()
    return graph


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
}
REWRITES: Mapping[str, Rewrite] = {**FOR_ENGINES, **FOR_SPEED}


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
    found: list[tuple[tuple[str, ...], Graph]] = []
    for names, other in spellings(body):
        for name in FOR_SPEED:
            changed = spelled(other, name)
            if changed is not None:
                found.append(((*names, name), changed))
    return found


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


def _convolution(graph: Graph) -> Node | None:
    found = [n for n in graph.nodes if isinstance(n.op, (Conv, ConvTranspose))]
    return found[0] if len(found) == 1 and isinstance(found[0].op, Conv) else None


def _only_user(value: Value) -> Node | None:
    """Return the one node that uses a value; None if the value is an output or used twice."""
    users = value.users
    return users[0] if len(value.uses) == 1 and users[0].results else None


def _finishes(value: Value) -> bool:
    """Return True if nothing follows but an activation that a precompiled engine knows."""
    user = _only_user(value)
    if user is not None and user.op.name in PRECOMPILED_ACTIVATIONS:
        value = user.result
    while (user := _only_user(value)) is not None and isinstance(user.op, Reshape):
        value = user.result  # from a convolution's dims back to those of the product it replaces
    return user is None and len(value.uses) == 1


def _only_add(value: Value) -> Node | None:
    user = _only_user(value)
    return user if user is not None and user.op.name == "add" else None


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


def _swap(graph: Graph, old: Node, new: Value) -> Graph:
    """Replace the old node's result by `new`, and remove dead nodes."""
    graph.replace(old.result, new)
    graph.prune()
    return graph


def _constant_as(graph: Graph, value: Value, dtype: DType, before: Node) -> Value:
    literal = value.literal
    assert literal is not None
    type = literal.type.with_dtype(dtype)
    cast = Literal(type, lambda: literal.array.astype(dtype.numpy), literal.label, ("cast", type, literal.key))
    return graph.insert(Constant(cast), before=before, names=(value.name,), types=[value.type.with_dtype(dtype)]).result


def _reshaped(graph: Graph, value: Value, shape: tuple[int, ...], before: Node) -> Value:
    type = TensorType(shape, value.type.dtype, channels_last(4))
    literal = value.literal
    if literal is None:
        return graph.insert(Reshape(shape), (value,), before=before, types=[type]).result
    kept = TensorType(shape, literal.type.dtype)
    view = Literal(kept, lambda: literal.array.reshape(shape), literal.label, ("view", kept, literal.key))
    return graph.insert(Constant(view), before=before, names=(value.name,), types=[type]).result


def _as_filters(graph: Graph, w: Value, before: Node) -> Value:
    """Reshape w[…, K, N] to filters [N, K, 1, 1]."""
    literal = w.literal
    assert literal is not None
    k, n = w.type.shape[-2:]
    type = TensorType((n, k, 1, 1), w.type.dtype)
    filters = Literal(
        type,
        lambda: np.ascontiguousarray(literal.array.reshape(k, n).T).reshape(n, k, 1, 1),
        literal.label,
        ("filters", type, literal.key),
    )
    types = [type.with_order(channels_last(4))]
    return graph.insert(Constant(filters), before=before, names=(w.name,), types=types).result


def _upstream(product: Node) -> set[Node]:
    """Collect the computing nodes that a product depends on."""
    found: set[Node] = set()
    stack = [product]
    while stack:
        for value in stack.pop().operands:
            if value.node is not None and value.literal is None and value.node not in found:
                found.add(value.node)
                stack.append(value.node)
    return found
