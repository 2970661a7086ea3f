"""Draw the patterns of rewrite rules, so that every rule finds matches."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusec.errors import VerifyError
from fusec.ir import DType, TensorType, Value
from fusec.passes import rules_by_pass
from fusec.passes.rewriting.pattern import Rule, instantiate
from fusec.testing.generators.graph_builder import MAX_ELEMENTS, RandomGraph, Unfit

EQUATIONS: tuple[Rule, ...] = tuple(r for known in rules_by_pass().values() for r in known if isinstance(r, Rule))


def equation(b: RandomGraph) -> None:
    """Draw the pattern of a rewrite rule, with random values for its parameters."""
    rule = b.pick(EQUATIONS)
    leaves: dict[str, Value] = {}
    for name, kind in rule.parameters.items():
        if kind in ("TracedTensor", "Weight"):
            leaves[name] = _leaf(b, rule, name, kind == "Weight")
    known: dict[str, Any] = {
        name: rule.sample.get(name, b.pick([0.5, 2.0, 0.1]))
        for name, kind in rule.parameters.items()
        if kind in ("Scalar", "Attribute")
    }
    known = {k: v for k, v in known.items() if rule.parameters[k] == "Scalar" or k in rule.sample}
    existing = set(b.graph.values())
    stand_in = next(iter(leaves.values()))
    try:
        if leaves and stand_in.type.dtype is not DType.F32:  # numbers get the dtype of the node at the root
            before = b.pointwise("identity", stand_in).node
            instantiate(b.graph, rule.pattern, leaves, known, before)
        else:
            instantiate(b.graph, rule.pattern, leaves, known)
    except VerifyError as error:
        raise Unfit(str(error)) from error
    made = [v for v in b.graph.values() if v not in existing and v.literal is None and v.node is not None]
    if any(v.type.size > MAX_ELEMENTS for v in made):
        raise Unfit("too large")
    known_values = set(b.values)
    b.values += [v for v in made if v not in known_values]


def _leaf(b: RandomGraph, rule: Rule, name: str, constant: bool) -> Value:
    """Draw a value or a constant as the rule's sample asks: a shape, `positive`, or a length and a fill value."""
    sample: Any = rule.sample.get(name)
    shape: tuple[int, ...] | None = sample if isinstance(sample, tuple) else None
    if shape and isinstance(shape[-1], float):
        filled = np.full(shape[0], shape[-1] if b.chance(80) else 0.5)
        return b.graph.constant(filled.astype(b.dtype.numpy))
    if constant:
        return b.constant(shape if shape is not None else b.pick([(), (4,), (3, 1)]), b.dtype)
    if shape is None or b.chance(50):
        rank = len(shape) if shape else 0
        x = b.float_value(rank, rank or 5)
        if shape is None or x.type.shape == shape:
            return b.bounded(x, 0.5, 4.0) if sample == "positive" else x
    return b.constant(shape, b.dtype) if len(shape) == 1 else b.fresh(TensorType(shape, b.dtype))
