"""Draw ops twice, equal or nearly equal: only equal ones may be computed once."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusec.ir import DType, Op
from fusec.ops import Gather, Scatter, Softmax, pw
from fusec.testing.generators.graph_builder import RandomGraph, Unfit
from fusec.testing.generators.motifs.layers import ACTIVATIONS
from fusec.testing.generators.operations.pointwise import draw_pointwise


def near_repeats(b: RandomGraph) -> None:
    """Draw a few ops twice that differ in a number, in an attribute, or in one more stored value."""
    x = b.float_value(1, 4)
    kind = b.pick([0, 1, 2, 2])
    op = pw(b.pick(("mul", "add", "max", "min")))
    first, second = b.pick([(0.5, 2.0), (-1.0, 3.0)])
    for number in (first, second):
        if kind == 0:
            x = b.add(op, x, b.graph.constant(np.asarray(number, x.type.dtype.numpy)))
        elif kind == 1:
            x = b.add(pw("elu", alpha=abs(number)), x)
        else:
            inner = b.add(pw("abs"), x)
            if number == second:
                b.add(Softmax(-1), inner)  # reads it from memory
            x = b.add(pw("sigmoid"), inner)
        x = b.add(Softmax(-1), x)


def repeated_op(b: RandomGraph) -> None:
    """Draw an existing op again: with the same operands, in another order, or with one attribute changed."""
    nodes = [n for n in b.graph.nodes if n.operands and n.op.name != "constant"]
    if not nodes:
        raise Unfit("no node yet")
    node = b.pick(nodes[-4:])
    kind = 0 if isinstance(node.op, (Gather, Scatter)) else b.below(3)  # their indices fit one operand and one axis
    operands = node.operands[::-1] if kind == 1 else node.operands
    if kind == 0 and all(v.type.dtype.is_float for v in operands) and b.chance(50):  # other numbers, other values
        operands = tuple(
            b.constant(v.type.shape, v.type.dtype, "number") if v.scalar() is not None else b.like(v) for v in operands
        )
    again = b.insert(_changed(b, node.op) if kind == 2 else node.op, *operands).results[0]
    if again.type.same_value_type(node.results[0].type) and again.type.dtype is not DType.BOOL and b.chance(60):
        b.pointwise("add", node.results[0], again)


def _changed(b: RandomGraph, op: Op) -> Op:
    """Change one attribute of an op. Raises Unfit if it has none that can change."""
    options: dict[str, Any] = {}
    for name, value in op.attributes.items():
        if isinstance(value, bool):
            options[name] = not value
        elif isinstance(value, float):
            options[name] = 0.5 if value != 0.5 else 0.25
        elif isinstance(value, int):
            options[name] = value - 1 if value > 0 else value + 1
        elif isinstance(value, tuple) and len(set(value)) > 1:
            options[name] = value[::-1]
    if not options:
        raise Unfit("no attribute to change")
    name = b.pick(sorted(options))
    return type(op)(**{**op.attributes, name: options[name]})


def constant_ops(b: RandomGraph) -> None:
    """Draw ops whose operands are all constant, which are folded at compile time."""
    shape = b.shape(0, 3)
    x = b.constant(shape, b.dtype)
    y = draw_pointwise(
        b, b.pick(ACTIVATIONS), b.pointwise(b.pick(["add", "mul"]), x, b.constant(b.broadcast_shape(shape), b.dtype))
    )
    z = b.some(lambda t: t.dtype is b.dtype)
    if b.chance(70):
        b.pointwise(b.pick(["add", "mul"]), z, y)
