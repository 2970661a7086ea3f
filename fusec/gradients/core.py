"""Differentiate a graph in reverse mode: apply the gradient rule of each node, from the last to the first."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from fusec.builder import Builder, Tensor
from fusec.errors import VerifyError
from fusec.ir import HALVES, Constant, DType, Node, Value
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class BackwardStep:
    """The arguments of a gradient rule: one node and the gradients of its results.

    b: builder that adds ops to the graph.
    x, y: operands and results of the node.
    dys: gradient of each result, None for a result that has none.
    active: True for each operand that needs a gradient.
    rules, stops: gradient rules by op name, and names of ops that pass no gradient, to differentiate a formula.
    """

    b: Builder
    node: Node
    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]
    dys: tuple[Tensor | None, ...]
    active: tuple[bool, ...]
    rules: Rules
    stops: Any = ()

    @property
    def op(self) -> Any:
        return self.node.op

    @property
    def dy(self) -> Tensor:
        """Return the gradient of the only result."""
        (dy,) = self.dys
        assert dy is not None
        return dy


Gradients = Tensor | None | Sequence[Tensor | None]
Rule = Callable[[BackwardStep], Gradients]
Rules = Mapping[str, Rule]


def reverse(
    b: Builder, nodes: Sequence[Node], seeds: Mapping[Value, Tensor], wrt: Iterable[Value], rules: Rules, stops: Any
) -> dict[Value, Tensor]:
    """Compute gradients with respect to the values in `wrt`.

    Values that no seeded value depends on are missing from the result.

    nodes: in graph order.
    seeds: gradients of some values, to start from.
    rules, stops: gradient rules by op name, and names of ops that pass no gradient.

    Raises VerifyError if an op is in neither `rules` nor `stops`.
    """
    wanted = set(wrt)
    active = set(wanted)
    for node in nodes:
        if any(v in active for v in node.operands) and node.op.name not in stops:
            active.update(v for v in node.results if v.type.dtype.is_float)
    found: dict[Value, list[Tensor]] = {v: [g] for v, g in seeds.items() if v in active}
    result: dict[Value, Tensor] = {}
    for node in reversed(nodes):
        got = [total(found.pop(v, [])) for v in node.results]
        result.update({v: g for v, g in zip(node.results, got, strict=True) if g is not None and v in wanted})
        if isinstance(node.op, Constant) or not any(g is not None for g in got):
            continue
        needs = tuple(v in active and v.type.dtype.is_float for v in node.operands)
        if not any(needs):
            continue
        if node.op.name not in rules:
            raise VerifyError(f"{node!r}: {node.op.name} has no gradient rule")
        x, y = (tuple(Tensor(b, v) for v in side) for side in (node.operands, node.results))
        with b.with_origin_of(node):
            given = rules[node.op.name](BackwardStep(b, node, x, y, tuple(got), needs, rules, stops))
            parts = (given,) if given is None or isinstance(given, Tensor) else tuple(given)
            if len(parts) != len(x):
                raise VerifyError(f"{node!r}: its rule gave {len(parts)} gradients for {len(x)} operands")
            for operand, need, part in zip(x, needs, parts, strict=True):
                if need and part is not None:
                    found.setdefault(operand.value, []).append(fitted(part, operand))
    for value in wanted:
        gradient = total(found.get(value, []))
        if gradient is not None:
            result[value] = gradient
    return result


def total(parts: Sequence[Tensor]) -> Tensor | None:
    """Add tensors up. Returns None if there are none."""
    return reduce(operator.add, parts) if parts else None


def fitted(gradient: Tensor, operand: Tensor) -> Tensor:
    """Sum a gradient over the dims along which its operand was broadcast, and cast it to the operand's dtype."""
    return sum_to(gradient, operand.shape).astype(operand.dtype)


def sum_to(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sum a tensor to a shape that broadcasts to its own, or expand it to a shape that it broadcasts to."""
    if x.shape == shape:
        return x
    lead = x.rank - len(shape)
    if lead < 0 or any(d == 1 != s for d, s in zip(x.shape[lead:], shape, strict=True)):
        return x.expand(np.broadcast_shapes(x.shape, shape)) if lead <= 0 else sum_to(x.sum(tuple(range(lead))), shape)
    axes = [*range(lead), *(i + lead for i, s in enumerate(shape) if s == 1 and x.shape[i + lead] != 1)]
    return x.sum(axes).reshape(shape)


def wide(x: Tensor) -> Tensor:
    """Cast 16-bit floats to f32, because sums and statistics of 16-bit floats lose precision."""
    return x.astype(DType.F32) if x.dtype in HALVES else x


def zeros(like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Make zeros of the dtype of a tensor, and of its shape unless another is given."""
    return like.builder.constant(np.zeros((), like.dtype.numpy)).expand(like.shape if shape is None else shape)


def by_formula(formula: Callable[..., Tensor | Sequence[Tensor]]) -> Rule:
    """Make the gradient rule of an op that other ops can express.

    The rule adds the formula to the graph and differentiates it. The pass for dead code later removes unused ops.

    formula: called with the step and its operands; returns the results of the op.
    """

    def rule(step: BackwardStep) -> Gradients:
        b = step.b
        operands = [b.pointwise("identity", x) for x in step.x]  # copies, because two operands may be one value
        before = b.last
        made = formula(step, *operands)
        results = [made] if isinstance(made, Tensor) else list(made)
        seeds = {y.value: dy for y, dy in zip(results, step.dys, strict=True) if dy is not None}
        found = reverse(b, b.since(before), seeds, [x.value for x in operands], step.rules, step.stops)
        return [found.get(x.value) for x in operands]

    return rule
