"""What the properties of one graph share: its inputs, the right answers, each stage of the pipeline, the compilation.

Everything is computed when first asked for, once for all properties that run in a row on the same graph and case.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from fusec.execution.compilation import Compiled
from fusec.ir import Constant, DType, Graph, Literal, Value, print_graph
from fusec.passes import EARLY_PASSES, PIPELINE
from fusec.passes.base import Options, Pass, run
from fusec.passes.layout.io_layout import insert_edge_copies
from fusec.passes.partition import partition
from fusec.passes.partition.attention_fallback import expand_refused_attention
from fusec.passes.partition.concat_in_place import concat_in_place
from fusec.passes.partition.strict_rounding import StrictRounding
from fusec.reference import evaluate, evaluate_node
from fusec.schedule.program import Partition, Program
from fusec.targets.target import load
from fusec.testing.case import Case
from fusec.testing.error_bounds.bounds import Allowances, allowed, execution, meaning
from fusec.testing.properties.oracles import JUDGES

Array = np.ndarray[Any, Any]

CASE = Case()  # what properties take when they are given none


@dataclass(frozen=True, eq=False)
class Stage:
    """The graph after a pass that changed it, and before."""

    step: Pass
    before: Graph
    graph: Graph
    narrowed: bool  # after the pass that stores constants in the case's precision


class Prepared:
    """See the module. The graph is not changed."""

    def __init__(self, graph: Graph, case: Case):
        self.graph = graph
        self.case = case
        self.fingerprint = fingerprint(graph)

    @cached_property
    def feeds(self) -> dict[str, Array]:
        """An array for each input."""
        return self.case.inputs(self.graph)

    @cached_property
    def meaning(self) -> Allowances:
        """The outputs in float64, and what constants rounded to their own dtypes may do to them."""
        return allowed(self.graph, self.feeds, meaning(DType.F32))

    @cached_property
    def narrowed_meaning(self) -> Allowances:
        """The same with constants stored in the case's precision."""
        storage = self.case.options.storage
        return self.meaning if storage is DType.F32 else allowed(self.graph, self.feeds, meaning(storage))

    @cached_property
    def options(self) -> Options:
        """As the driver has them."""
        return self.case.options_of(self.graph)

    @cached_property
    def stages(self) -> list[Stage]:
        """The pipeline, pass by pass, as `passes.base.run` runs it; those that changed nothing are left out."""
        stages: list[Stage] = []
        current, known, narrowed = self.graph.clone(), self.fingerprint, False
        for step in PIPELINE:
            if step.name in self.case.disable:
                continue
            following = current.clone()
            with quiet():
                run((step,), following, self.options)
            narrowed = narrowed or step.name == "precision"
            found = fingerprint(following)
            if found != known:
                stages.append(Stage(step, current, following, narrowed))
                current, known = following, found
        return stages

    @cached_property
    def optimised(self) -> Graph:
        """The graph after the pipeline."""
        with quiet():
            return run(PIPELINE, self.graph.clone(), self.options)

    @cached_property
    def compiled(self) -> Compiled:
        """The graph compiled as `driver.build` does it, but for the case's judge."""
        return compile_once(self.graph, self.case, self.optimised.clone())

    @cached_property
    def execution(self) -> Allowances:
        """The graph that is executed in float64, and what executing it may add."""
        return allowed(self.compiled.graph, self.feeds, execution(self.case.options.tensor_cores))

    @cached_property
    def optimised_meaning(self) -> Allowances:
        """The same in float64, and what constants narrowed by spellings may do."""
        graph = self.compiled.graph
        floats = [v.type.dtype for v in graph.values() if v.type.dtype.is_float]
        return allowed(graph, self.feeds, meaning(max(floats, key=lambda d: d.epsilon, default=DType.F32)))

    @cached_property
    def values(self) -> dict[Value, Array]:
        """Every value of the graph that is executed in float64, rounded to its own dtype where it is made."""
        return stored_values(self.compiled.graph, self.feeds)

    def operands(self, step: Partition) -> dict[str, Array]:
        """What a step reads, by name, as it is stored."""
        return {v.name: self.values[v] for v in step.inputs}


def compile_once(graph: Graph, case: Case, optimised: Graph | None = None) -> Compiled:
    """Passes and partition with the case's judge, nothing remembered."""
    options = case.options_of(graph)
    if optimised is None:
        with quiet():
            optimised = run(PIPELINE, graph.clone(), options)
    target, asked = load(case.target), JUDGES[case.judge](case)
    judge = StrictRounding(asked) if options.as_source else asked

    def unlaid() -> Graph:
        with quiet():
            return run(EARLY_PASSES, graph.clone(), options)

    def cut(graph: Graph) -> Program:
        insert_edge_copies(graph, options)
        return partition(graph, judge, target)

    program = expand_refused_attention(cut(optimised), unlaid, cut, judge, options)
    program = concat_in_place(program, judge, options, min_row_bytes=1)  # graphs are small
    return Compiled(graph, program, target, options, judge)


_recent: deque[Prepared] = deque(maxlen=2)


def prepared(graph: Graph, case: Case) -> Prepared:
    """What is known of a graph and a case; a graph that was changed since is looked at anew."""
    for known in _recent:
        if known.graph is graph and known.case is case and known.fingerprint == fingerprint(graph):
            return known
    new = Prepared(graph, case)
    _recent.append(new)
    return new


def fingerprint(graph: Graph) -> tuple[str, tuple[Literal, ...]]:
    """Equal for graphs that print alike and hold the same literals."""
    literals = tuple(n.op.literal for n in graph.nodes if isinstance(n.op, Constant))
    return print_graph(graph), literals


def relabelled(graph: Graph) -> Graph:
    """The graph, or a copy in which every constant is labelled by its value's name, as a parsed one is."""
    constants = [n for n in graph.nodes if isinstance(n.op, Constant)]
    if all(cast(Constant, n.op).literal.label == n.result.name for n in constants):
        return graph
    copy = graph.clone()
    for node in copy.nodes:
        if isinstance(node.op, Constant):
            copy.set_op(node, Constant(_renamed(node.op.literal, node.result.name)))
    return copy


def _renamed(literal: Literal, label: str) -> Literal:
    return literal if literal.label == label else Literal(literal.type, lambda: literal.array, label)


def stored_values(graph: Graph, feeds: Mapping[str, Array]) -> dict[Value, Array]:
    """Every value of a graph: computed in float64 from operands as they are stored, then stored itself."""
    held: dict[Value, Array] = {v: np.asarray(feeds[v.name]) for v in graph.inputs}
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            wide = [held[v].astype(np.float64) if v.type.dtype.is_float else held[v] for v in node.operands]
            for value, array in zip(node.results, evaluate_node(node, wide), strict=True):
                held[value] = array.astype(value.type.dtype.numpy)
    return held


def in_float64(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """`evaluate` in float64, NumPy's warnings left out."""
    with np.errstate(all="ignore"):
        return evaluate(graph, feeds, precision=DType.F64)


@contextmanager
def quiet() -> Generator[None]:
    """Without the warning that a constant overflows the precision asked for: the bounds know of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="constant .* out of", category=UserWarning)
        yield
