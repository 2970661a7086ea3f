"""Define a program: a graph that is partitioned into steps.

A value is virtual if only one cuDNN step computes and uses it. It never reaches memory, and is not rounded to its
storage type. That is computed from the uses of the value.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import cached_property

from fusec.errors import VerifyError
from fusec.ir import Constant, Graph, Node, Op, Value, print_node, quote
from fusec.ops import STRIDED_VIEWS
from fusec.plans.verdict import Legal, Refused
from fusec.schedule.aliasing import is_view
from fusec.schedule.multi_tensor import equal_members
from fusec.system.dataclass import dataclass


class Kind(enum.Enum):
    """The kinds of steps."""

    CUDNN = "cudnn"  # one cuDNN execution plan
    KERNEL = "kernel"  # a kernel of fusec, or the references of the ops
    VIEW = "view"  # no work, because the result shares the memory of the operand


@dataclass(frozen=True, eq=False)
class Partition:
    """One step: nodes of the program's graph, in graph order.

    body: the nodes as a separate graph, which is lowered. Constants are nodes of it, and its inputs are the computed
        values that the step reads, under their names in the program's graph.
    spelling: names of the rewrites that were applied to the body.
    verdict: the answer of cuDNN, for a CUDNN step.
    """

    nodes: tuple[Node, ...]
    kind: Kind
    body: Graph
    spelling: tuple[str, ...] = ()
    verdict: Legal | None = None

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """Return the values that the step reads, without constants, each once."""
        return tuple(v for v in inputs_of(self.nodes) if v.literal is None)

    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        """Return the results that are used outside the step; these are stored."""
        return outputs_of(self.nodes)

    @cached_property
    def virtual(self) -> tuple[Value, ...]:
        """Return the results that are used only inside the step; results without uses do not count."""
        stored = set(self.outputs)
        return tuple(v for n in self._computing for v in n.results if v not in stored and v.uses)

    @property
    def _computing(self) -> list[Node]:
        """Return the nodes without the views of a cuDNN step, which become strides of tensors."""
        return [n for n in self.nodes if self.kind is not Kind.CUDNN or not isinstance(n.op, STRIDED_VIEWS)]

    @property
    def signature(self) -> str:
        """Return the ops joined by `+`, in order: `conv+bias+add+relu`.

        The views of a cuDNN step are left out. Ops over several tensors appear once, with the number of tensors.
        """
        same = equal_members(self.nodes) if self.kind is Kind.KERNEL and len(self.nodes) > 1 else None
        if same is not None:
            return f"{len(same)} x " + "+".join(map(display_name, same[0].nodes))
        return "+".join(map(display_name, self._computing or self.nodes))

    @property
    def virtual_bytes(self) -> int:
        """Count the bytes that are neither written nor read, because values are virtual."""
        return sum(2 * v.type.nbytes for v in self.virtual)


@dataclass(frozen=True, eq=False)
class Refusal:
    """A candidate that was refused: by cuDNN, by lowering, or by the cost model."""

    nodes: tuple[Node, ...]
    body: Graph
    reason: Refused | str


@dataclass(frozen=True, eq=False)
class Program:
    """A graph partitioned into steps, in topological order. Every node except constants is in exactly one step."""

    graph: Graph
    steps: tuple[Partition, ...]
    refusals: tuple[Refusal, ...] = ()

    @cached_property
    def step_of(self) -> dict[Node, Partition]:
        """Return the step that runs each node."""
        return {node: step for step in self.steps for node in step.nodes}

    @property
    def launches(self) -> int:
        """Count the steps that do work: all except views."""
        return sum(step.kind is not Kind.VIEW for step in self.steps)

    @property
    def counts(self) -> str:
        """Return the number of steps in words: `58 steps (57 launches, 1 view)`."""
        return counts(len(self.steps), self.launches)

    def verify(self) -> None:
        """Raise VerifyError unless the steps cover every node once, in topological order.

        Each body must read and return the same values as its nodes.
        """
        covered: set[Node] = set()
        made: set[Value] = set(self.graph.inputs)
        for step in self.steps:
            for value in step.inputs:
                if value not in made:
                    raise VerifyError(f"step {step.signature}: reads {quote(value.name)} before it is made")
            for node in step.nodes:
                if node in covered:
                    raise VerifyError(f"{node!r} is in two steps")
                covered.add(node)
                made.update(node.results)
            if [v.name for v in step.body.inputs] != [v.name for v in step.inputs]:
                raise VerifyError(f"step {step.signature}: its body reads other values than its nodes")
            if list(step.body.output_names) != [v.name for v in step.outputs]:
                raise VerifyError(f"step {step.signature}: its body returns other values than its nodes")
            for value, same in zip((*step.inputs, *step.outputs), (*step.body.inputs, *step.body.outputs), strict=True):
                if value.type.within != same.type.within:
                    raise VerifyError(f"step {step.signature}: {quote(value.name)} is {value.type}, not {same.type}")
            step.body.verify_changes()
        for node in self.graph.nodes:
            if not isinstance(node.op, Constant) and node not in covered:
                raise VerifyError(f"{node!r} is in no step")

    def __str__(self) -> str:
        """Return the steps with their nodes; virtual values are marked with a tilde."""
        lines: list[str] = []
        for index, step in enumerate(self.steps):
            note = f" spelled {', '.join(step.spelling)}" if step.spelling else ""
            lines.append(f"step {index} {step.kind.value} {step.signature}{note} {{")
            for node in step.nodes:
                mark = "~" if node.results[0] in step.virtual else " "
                lines.append(f" {mark}{print_node(node)}")
            lines.append("}")
        return "\n".join(lines)


def counts(steps: int, launches: int) -> str:
    """Return the number of steps in words, so that every report counts a program the same way.

    steps: all of them, views included. launches: those that do work.
    """
    views = steps - launches
    parts = [f"{launches} launch{'es' * (launches != 1)}", f"{views} view{'s' * (views != 1)}"][: 1 + bool(views)]
    return f"{steps} step{'s' * (steps != 1)} ({', '.join(parts)})"


def inputs_of(nodes: Sequence[Node]) -> tuple[Value, ...]:
    """Return the values that the nodes read and do not compute, each once, in order of first use."""
    made = {v for n in nodes for v in n.results}
    return tuple(dict.fromkeys(v for n in nodes for v in n.operands if v not in made))


def outputs_of(nodes: Sequence[Node]) -> tuple[Value, ...]:
    """Return the results that are used outside the nodes; the return node is outside, too."""
    inside = set(nodes)
    return tuple(v for n in nodes for v in n.results if any(user not in inside for user in v.users))


def body_of(graph: Graph, nodes: Sequence[Node]) -> Graph:
    """Copy nodes (in graph order) into a graph of their own, in which values keep their names.

    Computed operands become inputs, constant operands are copied, and results that are used outside become outputs.
    """
    operands = inputs_of(nodes)
    constants = [v.node for v in operands if v.literal is not None and v.node is not None]
    inputs = [v for v in operands if v.literal is None]
    return graph.extract(inputs, [*constants, *nodes], outputs_of(nodes))


def single_step(graph: Graph, node: Node) -> Partition:
    """Return a step of one node that cuDNN does not run."""
    return Partition((node,), Kind.VIEW if is_view(node) else Kind.KERNEL, body_of(graph, [node]))


def display_name(node: Node) -> str:
    """Return the name of an op as reports show it: an add of a constant vector along one dim is a `bias`."""
    op: Op = node.op
    if op.name == "add" and any(map(_is_constant_vector, node.operands)):
        return "bias"
    return op.name


def _is_constant_vector(value: Value) -> bool:
    return value.literal is not None and sum(d != 1 for d in value.type.shape) == 1
