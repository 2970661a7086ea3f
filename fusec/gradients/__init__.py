"""Gradients, graph to graph: `grad` of a graph's output by its inputs, `backward` of a tensor by others.

RULES is the one table of rules; STOPS names the ops through which no gradient passes, and why; a test holds that
every op is in one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fusec.builder import Builder, Tensor
from fusec.errors import VerifyError
from fusec.gradients import attention, indexing, norms, pointwise, products, windows
from fusec.gradients.core import Rule, Step, reverse, zeros
from fusec.ir import Graph, quote

RULES: Mapping[str, Rule] = {
    **pointwise.RULES,
    **windows.RULES,
    **products.RULES,
    **norms.RULES,
    **indexing.RULES,
    **attention.RULES,
}
STOPS: Mapping[str, str] = {**pointwise.STOPS, **indexing.STOPS}

__all__ = ["RULES", "STOPS", "Rule", "Step", "backward", "grad"]


def grad(graph: Graph, of: str, wrt: Sequence[str], seed: bool = False) -> Graph:
    """A copy of the graph with the gradients of output `of` by inputs `wrt` as further outputs, `<input>.grad`.

    The output has one element; with `seed` it may have any shape, and a further input, `<of>.seed`, is what its
    elements are weighted by. An input that it does not depend on has a gradient of zeros. Raises VerifyError for
    names that are not there, inputs that are no floats, and ops that have no rule.
    """
    copy = graph.clone()
    names = dict(zip(copy.output_names, copy.outputs, strict=True))
    inputs = {v.name: v for v in copy.inputs}
    if of not in names:
        raise VerifyError(f"no output {quote(of)}; outputs are {', '.join(map(quote, names))}")
    for name in wrt:
        if name not in inputs:
            raise VerifyError(f"no input {quote(name)}; inputs are {', '.join(map(quote, inputs))}")
    builder = Builder.on(copy)
    target = Tensor(builder, names[of])
    weight = builder.input(f"{of}.seed", target.shape, target.dtype) if seed else None
    found = backward(target, [Tensor(builder, inputs[name]) for name in wrt], weight)
    builder.output({f"{name}.grad": g for name, g in zip(wrt, found, strict=True)})
    return builder.graph(prune=False)


def backward(of: Tensor, wrt: Sequence[Tensor], seed: Tensor | None = None) -> list[Tensor]:
    """The gradients of a tensor of one element (or, with a seed, of the sum of its elements weighted by it); those by
    what is a copy of a parameter (`Builder.copy`) are part of the parameter's."""
    builder = of.builder
    if not of.dtype.is_float:
        raise builder.error(f"the gradient of {of!r}, which is no floating-point tensor")
    for tensor in wrt:
        if tensor.builder is not builder or not tensor.dtype.is_float:
            raise builder.error(f"a gradient by {tensor!r}: no floating-point tensor of this graph")
    if seed is None:
        if of.size != 1:
            raise builder.error(f"the gradient of {of!r}: it has {of.size} elements, give a seed of its shape")
        seed = builder.constant(np.ones(of.shape), of.dtype)
    elif seed.shape != of.shape:
        raise builder.error(f"a seed {seed!r} for {of!r}")
    copies = {t: builder.copies.get(t.name, []) for t in wrt}
    wanted = [each.value for t in wrt for each in (t, *copies[t])]
    found = reverse(builder, builder.nodes, {of.value: seed}, wanted, RULES, STOPS)
    return [_total(t, [found[each.value] for each in (t, *copies[t]) if each.value in found]) for t in wrt]


def _total(tensor: Tensor, parts: Sequence[Tensor]) -> Tensor:
    if not parts:
        return zeros(tensor)
    first, *rest = (part.astype(tensor.dtype) for part in parts)
    for part in rest:
        first = first + part
    return first
