"""Shrink an example that fails: simplify its case, then its graph, then the case again.

Shrinking is deterministic. It ends, because the weight of the graph decreases with each step. `refusal_core` shares the
steps that make smaller graphs (see `simpler_graphs`). Its docstring says why it has a loop of its own.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fusec.ir import Constant, DType, Graph, Literal, print_graph
from fusec.testing.case import Case
from fusec.testing.failure import Failure
from fusec.testing.finding_folder import Finding
from fusec.testing.runner.simpler_graphs import STAGES, Stage, complexity, unusual

SECONDS = 20.0
SEEDS = (0, 1, 2)  # seeds of inputs for smaller graphs, in addition to the seed of the failure


def shrink(finding: Finding, attempt: Callable[[Graph, Case], Failure | None], seconds: float = SECONDS) -> Finding:
    """Return the smallest finding, found within the time, that fails like the given one.

    attempt: runs the property on a graph and a case, and returns its failure.
    """
    best, end = finding, time.monotonic() + seconds

    def fails(graph: Graph, case: Case) -> bool:
        nonlocal best
        failure = attempt(graph, case) if time.monotonic() < end else None
        if failure is None or not failure.like(finding.failure):
            return False
        best = replace(finding, graph=graph, case=case, failure=failure)
        return True

    def fails_with_some_seed(graph: Graph) -> bool:
        """Try several seeds, because a smaller graph draws other inputs, and some failures depend on them."""
        return any(fails(graph, replace(best.case, seed=seed)) for seed in dict.fromkeys((best.case.seed, *SEEDS)))

    shrink_case(best.case, lambda case: fails(best.graph, case))
    shrink_graph(best.graph, fails_with_some_seed, seconds)
    shrink_case(best.case, lambda case: fails(best.graph, case))
    return best


def shrink_graph(graph: Graph, fails: Callable[[Graph], bool], seconds: float = SECONDS) -> Graph:
    """Return the smallest graph found within the time for which `fails` is true. `graph`: one that fails."""
    end = time.monotonic() + seconds
    seen = {digest(graph)}

    def smaller(stage: Stage) -> Graph | None:
        least = weight(graph)
        for candidate in _built(stage, graph):
            if time.monotonic() > end:
                return None
            key = digest(candidate)
            if key not in seen and weight(candidate) < least and fails(candidate):
                return candidate
            seen.add(key)
        return None

    shrunk = True
    while shrunk:
        shrunk = False
        for stage in STAGES:
            while (found := smaller(stage)) is not None:
                graph, shrunk = found, True
    plain = renamed(graph)
    return plain if digest(plain) != digest(graph) and fails(plain) else graph


def renamed(graph: Graph) -> Graph:
    """Copy a graph with short names, so that equal results print the same text."""
    copy = Graph("fuzz")
    made = {v: copy.add_input(f"x{i}", v.type) for i, v in enumerate(graph.inputs)}
    for number, node in enumerate(graph.nodes):
        op = Constant(Literal.of(node.op.literal.array, f"c{number}")) if isinstance(node.op, Constant) else node.op
        stem = "c" if isinstance(op, Constant) else "v"
        names = [f"{stem}{number}" + ("" if not i else f"_{i}") for i in range(len(node.results))]
        twin = copy.insert(op, [made[v] for v in node.operands], names=names, types=[v.type for v in node.results])
        made.update(zip(node.results, twin.results, strict=True))
    outputs = [made[v] for v in graph.outputs]
    copy.set_outputs(outputs, [f"y{i}" for i in range(len(outputs))])
    return copy


def shrink_case(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Set each option of a case to its simplest value, if the case still fails."""
    plain: dict[str, Any] = {
        "precision": "fp32",
        "judge": "lowers",
        "disable": frozenset[str](),
        "channels_last": False,
        "style": "integers",
        "seed": 0,
    }
    for name, value in plain.items():
        if getattr(case, name) != value and fails(simpler := replace(case, **{name: value})):
            case = simpler
    for name in sorted(case.disable):
        if fails(simpler := replace(case, disable=case.disable - {name})):
            case = simpler
    return case


def digest(graph: Graph) -> str:
    """Hash the text and the constants of a graph."""
    sha = hashlib.sha256(print_graph(graph).encode())
    for node in graph.nodes:
        if isinstance(node.op, Constant):
            sha.update(node.op.literal.digest.encode())
    return sha.hexdigest()


def weight(graph: Graph) -> tuple[int, ...]:
    """Return numbers that measure a graph's complexity, the most important first."""
    computed = [n for n in graph.nodes if not isinstance(n.op, Constant)]
    constants = [n.op.literal for n in graph.nodes if isinstance(n.op, Constant)]
    values = list(graph.values())
    return (
        len(computed),
        len(graph.outputs),
        len(graph.inputs) + len(constants),
        sum(len(unusual(n.op)) for n in computed),  # before sizes: a stride of 1 makes them larger
        sum(d for v in values for d in v.type.shape),
        sum(v.type.dtype is not DType.F32 for v in values if v.type.dtype.is_float),
        sum(bool(v.type.order) for v in values),
        sum(map(complexity, constants)),
    )


def _built(stage: Stage, graph: Graph) -> Iterator[Graph]:
    """Iterate over the candidates that can be built."""
    made = stage(graph)
    while True:
        try:
            candidate = next(made)
        except StopIteration:
            return
        except Exception:  # noqa: BLE001  # because the bug can be in the code that builds a candidate
            return
        if candidate is not None:
            yield candidate
