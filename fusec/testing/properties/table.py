"""List the properties of every graph, by name, as `PROPERTIES`.

Each property takes a graph and a Case, and raises MismatchError if it does not hold. It does not change the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np

from fusec.ir import Constant, Graph, HostArray, Literal, print_graph, print_node
from fusec.passes import rules_by_pass
from fusec.passes.base import Pass, run
from fusec.passes.rewriting.rewriter import Rewriter, rewrite
from fusec.testing.case import Case, MismatchError, Property
from fusec.testing.error_bounds.bounds import Allowances, allowed, compare, meaning
from fusec.testing.example_codec import relabelled
from fusec.testing.properties.compiling import PROPERTIES_COMPILING
from fusec.testing.properties.finite_differences import GRADIENTS
from fusec.testing.properties.fixtures import CASE, in_float64, prepared, quiet
from fusec.testing.properties.kernels_on_device import kernels_agree
from fusec.testing.properties.on_device import device_agrees
from fusec.testing.properties.onnx_round_trip import PROPERTIES_ONNX
from fusec.testing.properties.plans_on_device import plans_agree
from fusec.testing.properties.running import PROPERTIES_RUNNING
from fusec.testing.properties.schedules import PROPERTIES_SCHEDULES
from fusec.text import parse

Transformation = Pass | Rewriter | Callable[[Graph], object]


def text_round_trip(graph: Graph, case: Case = CASE) -> None:
    """Check that parsing inverts printing, for the graph as it is and after the pipeline."""
    for each in (graph, prepared(graph, case).optimised):
        named = relabelled(each)
        weights = {n.op.literal.label: n.op.literal.array for n in named.nodes if isinstance(n.op, Constant)}
        text = print_graph(named, locations=True)
        again = parse(text, weights)
        if print_graph(again, locations=True) != text:
            raise MismatchError(f"parsed and printed again, the graph reads otherwise:\n{text}\n=>\n{again}")
        for one, other in zip(named.nodes, again.nodes, strict=True):
            if isinstance(one.op, Constant):
                assert isinstance(other.op, Constant)
                if one.op.literal.digest != other.op.literal.digest and not _holds_nan(one.op.literal):
                    raise MismatchError(f"a constant reads otherwise: {print_node(one)}")
            elif one.op != other.op:
                raise MismatchError(f"an op reads otherwise: {print_node(one)} => {print_node(other)}")


def _holds_nan(literal: Literal) -> bool:
    """Tell if a literal holds a NaN: NaNs differ in bits that text does not carry."""
    return literal.type.dtype.is_float and bool(np.isnan(literal.array.astype(np.float64)).any())


def passes_keep_meaning(graph: Graph, case: Case = CASE) -> None:
    """Check that each pass of the pipeline that changes the graph keeps the graph's interface and meaning."""
    shared = prepared(graph, case)
    for stage in shared.stages:
        right = shared.narrowed_meaning if stage.narrowed else shared.meaning
        _same(stage.graph, graph, right, shared.feeds, f"pass {stage.step.name}")


def pipeline_keeps_meaning(graph: Graph, case: Case = CASE) -> None:
    """Check that the whole pipeline keeps the graph's interface and meaning.

    It runs with the case's precision and without the disabled passes and rules.
    """
    shared = prepared(graph, case)
    _same(shared.optimised, graph, shared.narrowed_meaning, shared.feeds, "the pipeline")


def rules_keep_meaning(graph: Graph, case: Case = CASE) -> None:
    """Check that each rewrite rule that fires keeps interface and meaning when it runs alone.

    It runs on the graph as it is, and on the graph that its pass receives.
    """
    shared = prepared(graph, case)
    before = {stage.step.name: stage.before for stage in reversed(shared.stages)}
    for name, rules in rules_by_pass().items():
        for start in (graph, before[name]) if name in before else (graph,):
            ops = {node.op.name for node in start.nodes}
            spare: Graph | None = None  # the next rule reuses the copy if this one does not fire
            for rule in rules:
                if not ops.isdisjoint(rule.roots):
                    spare = _rule_keeps_meaning(start, spare or start.clone(), rule, graph, case)


def _rule_keeps_meaning(start: Graph, changed: Graph, rule: Rewriter, graph: Graph, case: Case) -> Graph | None:
    """Try the rule on `changed`, a copy of `start`; return the copy if it was not changed."""
    if not rewrite(changed, (rule,)):
        return changed
    changed.prune()
    changed.verify()
    shared = prepared(graph, case)
    right = shared.meaning if start is graph else shared.narrowed_meaning
    _same(changed, graph, right, shared.feeds, f"rule {rule.name} ({rule.equation})")
    return None


def keeps_meaning(graph: Graph, transformation: Transformation | Sequence[Transformation], case: Case = CASE) -> None:
    """Check that a pass, a rewrite rule, a function that changes a graph in place, or several of them keep meaning.

    The interface must stay the same, too. Meaning is what both graphs compute in float64, up to the rounding in either.
    """
    shared, changed = prepared(graph, case), graph.clone()
    steps = transformation if isinstance(transformation, Sequence) else [transformation]
    for step in steps:
        name = getattr(step, "name", getattr(step, "__name__", type(step).__name__))
        if isinstance(step, type):
            raise TypeError(f"{step.__name__} is a class: give an instance of the pass, {step.__name__}()")
        with quiet():
            if hasattr(step, "roots"):
                rewrite(changed, (cast(Rewriter, step),))
            elif hasattr(step, "run"):
                run((cast(Pass, step),), changed, case.options)
            elif isinstance(cast("Callable[[Graph], object]", step)(changed), Graph):
                raise TypeError(f"{name} returned a graph: a rewrite changes the graph that it gets, in place")
        changed.prune()
        changed.verify()
        own = allowed(changed, shared.feeds, meaning(case.options.storage))
        _same(changed, graph, shared.narrowed_meaning, shared.feeds, name, own)


def _same(
    got: Graph, source: Graph, right: Allowances, feeds: Mapping[str, HostArray], what: str, *more: Allowances
) -> None:
    """Raise MismatchError unless a graph has the source's interface and computes what `right` allows."""
    for kind, values, others in (("input", got.inputs, source.inputs), ("output", got.outputs, source.outputs)):
        names = got.output_names if kind == "output" else tuple(v.name for v in values)
        wanted = source.output_names if kind == "output" else tuple(v.name for v in others)
        if names != wanted:
            raise MismatchError(f"{what}: {kind}s {list(names)} instead of {list(wanted)}")
        for name, value, other in zip(names, values, others, strict=True):
            if not value.type.same_value_type(other.type):
                raise MismatchError(f"{what}: {kind} {name} is {value.type} instead of {other.type}")
    compare(in_float64(got, feeds), [right, *more], what)


_ALL: tuple[Property, ...] = (
    Property("text_round_trip", text_round_trip),
    Property("passes_keep_meaning", passes_keep_meaning),
    Property("pipeline_keeps_meaning", pipeline_keeps_meaning),
    Property("rules_keep_meaning", rules_keep_meaning),
    *PROPERTIES_COMPILING,
    *PROPERTIES_RUNNING,
    *PROPERTIES_SCHEDULES,
    *PROPERTIES_ONNX,
    GRADIENTS,
    Property("device_agrees", device_agrees, "gpu"),
    Property("plans_agree", plans_agree, "gpu"),
    Property("kernels_agree", kernels_agree, "gpu"),
)

PROPERTIES: Mapping[str, Property] = {p.name: p for p in _ALL}
