"""Reverse mode over a graph: from the last node to the first, each node's rule says what its operands get."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusec.builder import Builder, Tensor
from fusec.errors import VerifyError
from fusec.ir import Constant, DType, Node, Value

HALVES = (DType.F16, DType.BF16)


@dataclass(frozen=True)
class Step:
    """One node on the way back: `x` and `y` are its operands and results, `dys` the gradients of the results
    (None where there is none), `active` says which operands need one."""

    b: Builder
    node: Node
    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]
    dys: tuple[Tensor | None, ...]
    active: tuple[bool, ...]

    @property
    def op(self) -> Any:
        return self.node.op

    @property
    def dy(self) -> Tensor:
        """The gradient of the only result."""
        (dy,) = self.dys
        assert dy is not None
        return dy


Gradients = Tensor | None | Sequence[Tensor | None]
Rule = Callable[[Step], Gradients]
Rules = Mapping[str, Rule]


def reverse(
    b: Builder, nodes: Sequence[Node], seeds: Mapping[Value, Tensor], wrt: Iterable[Value], rules: Rules, stops: Any
) -> dict[Value, Tensor]:
    """Gradients with respect to `wrt` of what the seeds are gradients of; a value nothing depends on has none.

    Nodes are in graph order. VerifyError names an op that has neither a rule nor a reason to stop.
    """
    wanted = set(wrt)
    active = set(wanted)
    for node in nodes:
        if any(v in active for v in node.operands) and node.op.name not in stops:
            active.update(v for v in node.results if v.type.dtype.is_float)
    found: dict[Value, list[Tensor]] = {v: [g] for v, g in seeds.items() if v in active}
    result: dict[Value, Tensor] = {}
    for node in reversed(nodes):
        got = [_total(found.pop(v, [])) for v in node.results]
        result.update({v: g for v, g in zip(node.results, got, strict=True) if g is not None and v in wanted})
        if isinstance(node.op, Constant) or not any(g is not None for g in got):
            continue
        needs = tuple(v in active and v.type.dtype.is_float for v in node.operands)
        if not any(needs):
            continue
        if node.op.name not in rules:
            raise VerifyError(f"{node!r}: {node.op.name} has no gradient rule")
        x, y = (tuple(Tensor(b, v) for v in side) for side in (node.operands, node.results))
        with b.standing_for(node):
            given = rules[node.op.name](Step(b, node, x, y, tuple(got), needs))
            parts = (given,) if given is None or isinstance(given, Tensor) else tuple(given)
            if len(parts) != len(x):
                raise VerifyError(f"{node!r}: its rule gave {len(parts)} gradients for {len(x)} operands")
            for operand, need, part in zip(x, needs, parts, strict=True):
                if need and part is not None:
                    found.setdefault(operand.value, []).append(fitted(part, operand))
    for value in wanted:
        total = _total(found.get(value, []))
        if total is not None:
            result[value] = total
    return result


def _total(parts: Sequence[Tensor]) -> Tensor | None:
    if not parts:
        return None
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def fitted(gradient: Tensor, operand: Tensor) -> Tensor:
    """A gradient summed over the dims along which its operand was broadcast, in the operand's dtype."""
    return sum_to(gradient, operand.shape).astype(operand.dtype)


def sum_to(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Summed to a shape that broadcasts to the tensor's (or expanded to one that it broadcasts to)."""
    if x.shape == shape:
        return x
    lead = x.rank - len(shape)
    if lead < 0 or any(d == 1 != s for d, s in zip(x.shape[lead:], shape, strict=True)):
        return x.expand(np.broadcast_shapes(x.shape, shape)) if lead <= 0 else sum_to(x.sum(tuple(range(lead))), shape)
    axes = [*range(lead), *(i + lead for i, s in enumerate(shape) if s == 1 and x.shape[i + lead] != 1)]
    return x.sum(axes).reshape(shape)


def wide(x: Tensor) -> Tensor:
    """16-bit floats as f32, in which statistics are taken."""
    return x.astype(DType.F32) if x.dtype in HALVES else x


def zeros(x: Tensor) -> Tensor:
    return x.builder.constant(np.zeros((), x.dtype.numpy)).expand(x.shape)


def by_formula(formula: Callable[..., Tensor | Sequence[Tensor]], rules: Callable[[], Rules]) -> Rule:
    """The rule of an op that other ops spell out: the formula, given the step and its operands, is put into the
    graph and differentiated in turn; what is not needed of it is removed as dead code."""

    def rule(step: Step) -> Gradients:
        b = step.b
        operands = [b.pointwise("identity", x) for x in step.x]  # two operands may be one value
        before = b.last
        made = formula(step, *operands)
        results = [made] if isinstance(made, Tensor) else list(made)
        seeds: dict[Value, Tensor] = {}
        for y, dy in zip(results, step.dys, strict=True):
            if dy is not None:
                seeds[y.value] = dy
        nodes = b.since(before)
        found = reverse(b, nodes, seeds, [x.value for x in operands], rules(), ())
        return [found.get(x.value) for x in operands]

    return rule
