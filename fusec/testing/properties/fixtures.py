"""Share results among the properties of one graph: inputs, right answers, pipeline stages and the compilation.

Each result is computed at its first use, once for all properties that run in sequence on the same graph and case.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from fusec.execution.compilation import Compiled
from fusec.ir import Constant, DType, Graph, HostArray, Literal, Value, print_graph
from fusec.lower_cudnn import Lowered
from fusec.passes import EARLY_PASSES, PIPELINE
from fusec.passes.base import Options, Pass, run
from fusec.passes.layout.io_layout import insert_interface_copies
from fusec.passes.partition import partition
from fusec.passes.partition.concat_in_place import concat_in_place
from fusec.passes.partition.refused_ops import expand_refused
from fusec.passes.partition.strict_rounding import StrictRounding
from fusec.reference import evaluate, evaluate_node
from fusec.schedule.program import Partition, Program
from fusec.system.dataclass import dataclass
from fusec.targets.target import load
from fusec.testing.case import Case
from fusec.testing.error_bounds.bounds import Allowances, allowed, execution, meaning
from fusec.testing.properties.judges import JUDGES

CASE = Case()  # the default case of properties


@dataclass(frozen=True, eq=False)
class Stage:
    """The graph before and after a pass that changed it."""

    step: Pass
    before: Graph
    graph: Graph
    narrowed: bool  # after the pass that stores constants in the case's precision


@dataclass(frozen=True, eq=False)
class LoweredStep:
    """A step with its cuDNN graph, its operands by name, and words that name it in messages."""

    what: str
    step: Partition
    lowered: Lowered
    operands: Mapping[str, HostArray]


class Prepared:
    """Shared results for one graph and case. The graph is not changed."""

    def __init__(self, graph: Graph, case: Case):
        self.graph = graph
        self.case = case
        self.fingerprint = fingerprint(graph)

    @cached_property
    def feeds(self) -> dict[str, HostArray]:
        """Return an array for each input."""
        return self.case.inputs(self.graph)

    @cached_property
    def meaning(self) -> Allowances:
        """Return the outputs in float64, and the error of constants rounded to their own dtypes."""
        return allowed(self.graph, self.feeds, meaning(DType.F32))

    @cached_property
    def narrowed_meaning(self) -> Allowances:
        """Return the outputs in float64, and the error of constants stored in the case's precision."""
        storage = self.case.options.storage
        return self.meaning if storage is DType.F32 else allowed(self.graph, self.feeds, meaning(storage))

    @cached_property
    def options(self) -> Options:
        """Return the options that the driver would use."""
        return self.case.options_of(self.graph)

    @cached_property
    def stages(self) -> list[Stage]:
        """Run the pipeline pass by pass, as `passes.base.run` does; leave out passes that changed nothing."""
        stages: list[Stage] = []
        current, known, narrowed = self.graph.clone(), self.fingerprint, False
        spare: Graph | None = None  # the next pass reuses the copy if this one does not edit it
        for step in PIPELINE:
            if step.name in self.case.disable:
                continue
            following = spare or current.clone()
            edits = following.edits
            with quiet():
                run((step,), following, self.options)
            narrowed = narrowed or step.name == "precision"
            spare = following if following.edits == edits else None
            if spare is not None:
                continue
            found = fingerprint(following)
            if found != known:
                stages.append(Stage(step, current, following, narrowed))
                current, known = following, found
        return stages

    @cached_property
    def optimised(self) -> Graph:
        """Return the graph after the pipeline."""
        with quiet():
            return run(PIPELINE, self.graph.clone(), self.options)

    @cached_property
    def compiled(self) -> Compiled:
        """Compile the graph as `driver.build` does, but with the case's judge."""
        return compile_once(self.graph, self.case, self.optimised.clone())

    @cached_property
    def execution(self) -> Allowances:
        """Return the compiled graph's outputs in float64, and the error that its execution may add."""
        return allowed(self.compiled.graph, self.feeds, execution(self.case.options.tensor_cores))

    @cached_property
    def optimised_meaning(self) -> Allowances:
        """Return the compiled graph's outputs in float64, and the error of constants that spellings narrow."""
        graph = self.compiled.graph
        floats = [v.type.dtype for v in graph.values() if v.type.dtype.is_float]
        return allowed(graph, self.feeds, meaning(max(floats, key=lambda d: d.epsilon, default=DType.F32)))

    @cached_property
    def values(self) -> dict[Value, HostArray]:
        """Return every value of the compiled graph, computed in float64 and rounded to its dtype."""
        return stored_values(self.compiled.graph, self.feeds)

    def operands(self, step: Partition) -> dict[str, HostArray]:
        """Return the operands of a step, by name, as they are stored."""
        return {v.name: self.values[v] for v in step.inputs}

    @cached_property
    def lowered_steps(self) -> list[LoweredStep]:
        """Return the steps that are cuDNN graphs."""
        steps = zip(self.compiled.program.steps, self.compiled.lowered, strict=True)
        return [
            LoweredStep(f"step {index} {step.signature}", step, lowered, self.operands(step))
            for index, (step, lowered) in enumerate(steps)
            if lowered is not None
        ]


def compile_once(graph: Graph, case: Case, optimised: Graph | None = None) -> Compiled:
    """Run passes and partition the graph with the case's judge, without any cache."""
    options = case.options_of(graph)
    if optimised is None:
        with quiet():
            optimised = run(PIPELINE, graph.clone(), options)
    target, asked = load(case.target), JUDGES[case.judge](case)
    judge = StrictRounding(asked) if options.as_source else asked

    def before_layout() -> Graph:
        with quiet():
            return run(EARLY_PASSES, graph.clone(), options)

    def partition_graph(graph: Graph) -> Program:
        insert_interface_copies(graph, options)
        return partition(graph, judge, target)

    program = expand_refused(partition_graph(optimised), before_layout, partition_graph, judge, options)
    program = concat_in_place(program, judge, options, min_row_bytes=1)  # because the graphs are small
    return Compiled(graph, program, target, options, judge)


_recent: deque[Prepared] = deque(maxlen=2)


def prepared(graph: Graph, case: Case) -> Prepared:
    """Return the shared results of a graph and a case; compute them again if the graph was changed since."""
    for known in _recent:
        if known.graph is graph and known.case is case and known.fingerprint == fingerprint(graph):
            return known
    new = Prepared(graph, case)
    _recent.append(new)
    return new


def fingerprint(graph: Graph) -> tuple[str, tuple[Literal, ...]]:
    """Return a value that is equal for graphs with the same text and the same literals."""
    literals = tuple(n.op.literal for n in graph.nodes if isinstance(n.op, Constant))
    return print_graph(graph), literals


def stored_values(graph: Graph, feeds: Mapping[str, HostArray]) -> dict[Value, HostArray]:
    """Compute every value of a graph in float64 from stored operands, and round it to its dtype."""
    values: dict[Value, HostArray] = {v: np.asarray(feeds[v.name]) for v in graph.inputs}
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            wide = [values[v].astype(np.float64) if v.type.dtype.is_float else values[v] for v in node.operands]
            for value, array in zip(node.results, evaluate_node(node, wide), strict=True):
                values[value] = array.astype(value.type.dtype.numpy)
    return values


def in_float64(graph: Graph, feeds: Mapping[str, HostArray]) -> dict[str, HostArray]:
    """Evaluate a graph in float64, without NumPy's warnings."""
    with np.errstate(all="ignore"):
        return evaluate(graph, feeds, precision=DType.F64)


@contextmanager
def quiet() -> Generator[None]:
    """Suppress the warning that a constant overflows the requested precision.

    The bounds account for that overflow.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="constant .* out of", category=UserWarning)
        yield
