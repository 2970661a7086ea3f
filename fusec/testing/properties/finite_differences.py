"""Check the gradient of a graph against finite differences in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import SkipTest

import numpy as np

from fusec.errors import ExecutionError
from fusec.gradients import grad
from fusec.ir import Body, Constant, DType, Graph, HostArray, TensorType, Value, quote
from fusec.lowering.unroll_scan import unrolled
from fusec.ops import Cast, RoiAlign, Scan
from fusec.reference import evaluate, evaluate_node
from fusec.testing.case import Case, MismatchError, Property
from fusec.testing.error_bounds.discontinuities import label_of

# Central differences of a smooth function have an error of h^2 (from the third derivative) and of eps/h (from rounding:
# 1e-10 of the terms at h = 1e-6). The function is not smooth at kinks, discontinuities and poles. Differences at two
# steps, one 8 times the other, and to either side show such places.
STEPS = (8e-6, 1e-6)
RELATIVE = 1e-6  # share of the terms of the inner product of gradient and direction
ROUNDING = 1e-15  # of the largest number, divided by the step
KINK = 1e-3  # differences that disagree by a larger share are not used
STEEP = 0.1  # relative change in a step, up to which a function counts as straight
DIRECTIONS = 2
NUDGE = 1e-3  # relative to a number's size; much larger than the steps


def gradients(graph: Graph, case: Case) -> None:
    """Check that gradients of the float outputs agree with finite differences.

    They are taken by the float inputs and, for odd seeds, by constants.
    """
    if case.style not in ("normal", "positive"):
        case = Case(case.seed, "normal")  # because ties, zeros and infinities are kinks
    if any(isinstance(n.op, RoiAlign) and not n.op.samples for n in graph.nodes):
        raise SkipTest("a roi_align whose number of samples depends on its regions has no gradient")
    source, constants = in_f64(graph, lift=case.seed % 2 == 1)
    wrt = [v.name for v in source.inputs if v.type.dtype.is_float and v.type.size]
    of = [n for n, v in zip(source.output_names, source.outputs, strict=True) if v.type.dtype.is_float and v.type.size]
    if not wrt or not of:
        raise SkipTest("no floats to differentiate")
    rng = np.random.default_rng(case.seed)
    given = case.inputs(graph) | constants
    if not all(np.isfinite(a.astype(np.float64)).all() for a in given.values() if DType.of(a.dtype).is_float):
        raise SkipTest("a constant holds infinities, which have no slope")
    feeds = {n: _apart(a, rng) if DType.of(a.dtype).is_float else a for n, a in given.items()}
    try:
        with np.errstate(all="ignore"):
            evaluate(source, feeds)
    except ExecutionError as error:  # an index out of range, which other properties report
        raise SkipTest(f"the graph has no meaning: {error}") from error
    for name in of:
        _check(source, name, wrt, feeds, rng)


def _apart(array: HostArray, rng: np.random.Generator) -> HostArray:
    """Convert numbers to float64 and move each a little.

    Numbers of few bits may be equal to a bound of a clip, or several may share one maximum. The slopes to the two sides
    differ there, and neither is the gradient.
    """
    wide = array.astype(np.float64)
    return wide + NUDGE * (np.abs(wide) + NUDGE) * rng.uniform(-1.0, 1.0, wide.shape)


def _check(graph: Graph, of: str, wrt: list[str], feeds: Mapping[str, HostArray], rng: np.random.Generator) -> None:
    shape = dict(zip(graph.output_names, graph.outputs, strict=True))[of].type.shape
    weight = rng.uniform(0.5, 1.5, shape)
    differentiated = grad(graph, of, wrt, seed=True)
    differentiated.set_outputs(differentiated.outputs[-len(wrt) :], [f"{n}.grad" for n in wrt])
    differentiated.prune()
    differentiated.verify()
    with np.errstate(all="ignore"):
        found = evaluate(differentiated, {**feeds, f"{of}.seed": weight})
        for _ in range(DIRECTIONS):
            along = {n: rng.standard_normal(feeds[n].shape) * (1.0 + np.abs(feeds[n])) for n in wrt}
            _compare(graph, of, weight, feeds, along, found)


def _compare(
    graph: Graph, of: str, weight: HostArray, feeds: Mapping[str, HostArray], along: Mapping[str, HostArray], found: Any
) -> None:
    """Compare the slope of an output along a direction with the slope that the gradients give.

    along: the direction, by input. Raises MismatchError.
    """
    slopes: list[HostArray] = []
    here = evaluate(graph, feeds)[of]
    largest = float(np.abs(here * weight).sum())
    for h in STEPS:
        for sign in (h, -h):
            moved = {n: a + sign * along[n] if n in along else a for n, a in feeds.items()}
            slopes.append((evaluate(graph, moved)[of] - here) * weight / sign)
    coarse, right = (float((a + b).sum() / 2) for a, b in (slopes[:2], slopes[2:]))
    terms = np.concatenate([(found[f"{n}.grad"] * u).reshape(-1) for n, u in along.items()])
    got, scale = float(terms.sum()), float(np.abs(terms).sum())
    bound = RELATIVE * scale + ROUNDING * max(largest, 1.0) / STEPS[1] * 100
    bend = float(np.abs(slopes[2] - slopes[3]).sum())
    if not np.isfinite([coarse, right, bend, largest]).all():
        return
    unsure = abs(coarse - right)
    if max(unsure, bend) > bound + KINK * abs(right) or scale * STEPS[0] > STEEP * max(largest, 1.0):
        return
    if np.isnan(got) and not _finite_inside(graph, feeds):
        return
    bound += 4 * unsure + 2 * bend
    if not abs(got - right) <= bound and not _jumps(graph, feeds, along):
        raise MismatchError(
            f"the gradient of {quote(of)} by {', '.join(map(quote, along))} is {got:.9g} along a direction in which "
            f"differences are {right:.9g}; {bound:.2g} allowed",
            {n: np.asarray(a) for n, a in found.items()},
        )


def _jumps(graph: Graph, feeds: Mapping[str, HostArray], along: Mapping[str, HostArray]) -> bool:
    """Tell if an op has a discontinuity within a step.

    Differences to both sides may then agree, although they are no slope.
    """
    graph = unrolled(graph)
    steps = [{n: a + s * h * along[n] if n in along else a for n, a in feeds.items()} for h in STEPS for s in (1, -1)]
    here, *moved = (_labels(graph, arrays) for arrays in (feeds, *steps))
    return any(not np.array_equal(a, b) for labels in moved for a, b in zip(here, labels, strict=True))


def _labels(graph: Graph, feeds: Mapping[str, HostArray]) -> list[HostArray]:
    """Compute, for each op with discontinuities, the side of each element."""
    values: dict[Value, HostArray] = {v: feeds[v.name] for v in graph.inputs}
    labels: list[HostArray] = []
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            operands = [values[v] for v in node.operands]
            values.update(zip(node.results, evaluate_node(node, operands), strict=True))
            if (label := label_of(node.op)) is not None and node.operands[0].type.dtype.is_float:
                labels.append(label(node.op, operands))
    return labels


def _finite_inside(graph: Graph, feeds: Mapping[str, HostArray]) -> bool:
    """Tell if every intermediate value, and every slope of a single op, is finite.

    Zero times infinity is NaN, even if the final result is a number.
    """
    for node in graph.nodes:
        floats = [v for v in node.results if v.type.dtype.is_float and v.type.size]
        operands = list(dict.fromkeys(v for v in node.operands if v.literal is None))
        if not floats or not operands:
            continue
        constants = [v.node for v in node.operands if v.literal is not None and v.node is not None]
        alone = graph.extract(operands, [*dict.fromkeys(constants), node], floats)
        inputs = graph.clone()
        inputs.set_outputs([inputs.value(v.name) for v in operands], [v.name for v in operands])
        arrays = evaluate(inputs, feeds)
        wrt = [v.name for v in operands if v.type.dtype.is_float]
        for value in floats:
            seed = {f"{value.name}.seed": np.ones(value.type.shape)}
            found = evaluate(grad(alone, value.name, wrt, seed=True), {**arrays, **seed})
            if not all(np.isfinite(a).all() for a in found.values()):
                return False
    return True


def in_f64(graph: Graph, lift: bool) -> tuple[Graph, dict[str, HostArray]]:
    """Copy a graph with every floating-point tensor in f64.

    lift: make inputs of the constants that have several elements.
    Returns the copy, and the arrays of the lifted constants by name.
    """
    copy, lifted = Graph(graph.name), dict[str, HostArray]()
    values: dict[Value, Value] = {}
    for value in graph.inputs:
        dtype = DType.F64 if value.type.dtype.is_float else value.type.dtype
        values[value] = copy.add_input(value.name, value.type.with_dtype(dtype))
    for node in graph.nodes:
        op = node.op
        if isinstance(op, Constant) and op.literal.type.dtype.is_float:
            array, name = op.literal.array.astype(np.float64), node.result.name
            if lift and array.size > 1:
                values[node.result] = copy.add_input(name, TensorType(array.shape, DType.F64))
                lifted[name] = array
            else:
                values[node.result] = copy.constant(array, name)
            continue
        if isinstance(op, Cast) and op.to.is_float:
            op = Cast(DType.F64)
        elif isinstance(op, Scan):
            op = replace(op, body=Body(in_f64(op.body.graph, lift=False)[0]))
        twin = copy.insert(op, [values[v] for v in node.operands], names=[v.name for v in node.results])
        values.update(zip(node.results, twin.results, strict=True))
    copy.set_outputs([values[v] for v in graph.outputs], graph.output_names)
    return copy, lifted


GRADIENTS = Property("gradients", gradients)
