"""Add gradients to a graph: `grad` of an output by inputs, `backward` of a tensor by other tensors.

RULES maps each op to its gradient rule. STOPS maps each op that passes no gradient to the reason.
A test checks that every op is in one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fusec.builder import Builder, Tensor
from fusec.errors import VerifyError
from fusec.gradients import attention, indexing, loops, norms, pointwise, products, recurrent, sampling, windows
from fusec.gradients.core import BackwardStep, Rule, reverse, total, zeros
from fusec.ir import Graph, quote

RULES: Mapping[str, Rule] = {
    **pointwise.RULES,
    **windows.RULES,
    **products.RULES,
    **norms.RULES,
    **indexing.RULES,
    **attention.RULES,
    **recurrent.RULES,
    **loops.RULES,
    **sampling.RULES,
}
STOPS: Mapping[str, str] = {**pointwise.STOPS, **indexing.STOPS}

__all__ = ["RULES", "STOPS", "BackwardStep", "Rule", "backward", "grad"]


def grad(graph: Graph, of: str, wrt: Sequence[str], seed: bool = False) -> Graph:
    """Return a copy of the graph that also outputs the gradients of output `of` by inputs `wrt`.

    An input that `of` does not depend on has a gradient of zeros.

    of: name of an output of one element; with `seed`, of any shape.
    wrt: names of floating-point inputs. The gradient of input `x` is output `x.grad`.
    seed: add an input `<of>.seed` of the shape of `of`; its elements weight those of `of`.

    Raises VerifyError if a name does not exist, an input is not floating-point, or an op has no rule.
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
    """Add the gradients of a tensor by other tensors of its graph.

    A gradient by a copy of a parameter (`Builder.copy`) is added to the gradient of the parameter.

    of: a tensor of one element; with a seed, of any shape.
    seed: a tensor of the shape of `of`. The gradients are those of the sum of `of * seed`.
    """
    builder = of.builder
    if builder.in_step:
        raise builder.error(f"the gradient of {of!r} within the step of a scan: differentiate the results of the scan")
    if not of.dtype.is_float:
        raise builder.error(f"the gradient of {of!r}, which is not a floating-point tensor")
    for tensor in wrt:
        owned = isinstance(tensor, Tensor) and tensor.builder is builder  # pyright: ignore[reportUnnecessaryIsInstance]
        if not owned or not tensor.dtype.is_float:
            raise builder.error(f"a gradient by {tensor!r}, which is not a floating-point tensor of this graph")
    if seed is None:
        if of.size != 1:
            raise builder.error(f"the gradient of {of!r}: it has {of.size} elements, give a seed of its shape")
        seed = builder.constant(np.ones(of.shape), of.dtype)
    elif seed.shape != of.shape:
        raise builder.error(f"the seed {seed!r} has another shape than {of!r}")
    copies = {t: builder.copies.get(t.name, []) for t in wrt}
    wanted = [each.value for t in wrt for each in (t, *copies[t])]
    found = reverse(builder, builder.nodes, {of.value: seed}, wanted, RULES, STOPS)
    parts = ([found[each.value].astype(t.dtype) for each in (t, *copies[t]) if each.value in found] for t in wrt)
    gradients = [zeros(t) if g is None else g for t, g in zip(wrt, map(total, parts), strict=True)]
    builder.gradients |= {t.name: g for t, g in zip(wrt, gradients, strict=True) if t.name in builder.parameters}
    return gradients
