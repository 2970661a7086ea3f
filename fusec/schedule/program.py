"""Hold a graph partitioned into steps: which nodes run together, what is stored and what stays virtual.

A value is virtual if it is made and used only inside one cuDNN partition: it never reaches memory and is not rounded
to its storage type. That follows from the wiring and is computed here; nobody sets a flag.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fusec.errors import VerifyError
from fusec.ir import Constant, Graph, Node, Op, Value, print_node, quote
from fusec.plans.verdict import Legal, Refused
from fusec.schedule.aliasing import is_view
from fusec.schedule.multi_tensor import alike

STRIDES = frozenset({"reshape", "transpose", "relayout", "slice", "split"})  # in a cuDNN step, they are no work


class Kind(enum.Enum):
    """Ways to run a step."""

    CUDNN = "cudnn"  # one cuDNN execution plan
    KERNEL = "kernel"  # a CuPy kernel, or the op's reference
    VIEW = "view"  # no work: the result shares the operand's memory


@dataclass(frozen=True, eq=False)
class Partition:
    """One step: nodes of the program's graph, in graph order.

    `body` is what is lowered: the nodes as a graph of their own, rewritten by the `spelling`s named.
    Constants are nodes of it, so its inputs are the computed values the step reads, under their names in the graph.
    `verdict` is cuDNN's answer for a CUDNN step.
    """

    nodes: tuple[Node, ...]
    kind: Kind
    body: Graph
    spelling: tuple[str, ...] = ()
    verdict: Legal | None = None

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """Return the values made elsewhere that the nodes read, without constants, each once."""
        return tuple(v for v in inputs_of(self.nodes) if v.literal is None)

    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        """Return the results used outside the partition: these are stored."""
        return outputs_of(self.nodes)

    @cached_property
    def virtual(self) -> tuple[Value, ...]:
        """Return the results used only inside; empty unless cuDNN runs the step.

        A result that nothing uses does not count.
        """
        stored = set(self.outputs)
        inside = [n for n in self.nodes if self.kind is not Kind.CUDNN or n.op.name not in STRIDES]
        return tuple(v for n in inside for v in n.results if v not in stored and v.uses)

    @property
    def signature(self) -> str:
        """Return the ops joined by `+`, in order: `conv+bias+add+relu` (a per-channel constant addend is a bias).

        Views before a computation are strides of its operands and left out.
        The same ops over several tensors appear once, with their number.
        """
        computing = [n for n in self.nodes if self.kind is not Kind.CUDNN or n.op.name not in STRIDES]
        same = alike(self.nodes) if self.kind is Kind.KERNEL and len(self.nodes) > 1 else None
        if same is not None:
            return f"{len(same)} x " + "+".join(map(display_name, same[0].nodes))
        return "+".join(display_name(n) for n in computing or self.nodes)

    @property
    def virtual_bytes(self) -> int:
        """Return how many bytes are neither written nor read back, because they stay virtual."""
        return sum(2 * v.type.nbytes for v in self.virtual)


@dataclass(frozen=True, eq=False)
class Refusal:
    """A candidate that was refused: by cuDNN, by lowering, or by the cost model."""

    nodes: tuple[Node, ...]
    body: Graph
    reason: Refused | str


@dataclass(frozen=True, eq=False)
class Program:
    """Steps in an order that respects dependencies. Every node but constants is in exactly one step."""

    graph: Graph
    steps: tuple[Partition, ...]
    refusals: tuple[Refusal, ...] = ()

    @cached_property
    def step_of(self) -> dict[Node, Partition]:
        """Return the step that runs each node."""
        return {node: step for step in self.steps for node in step.nodes}

    @property
    def launches(self) -> int:
        """Return the number of steps that do work: all but views."""
        return sum(step.kind is not Kind.VIEW for step in self.steps)

    def is_virtual(self, value: Value) -> bool:
        """Tell if a value never reaches memory."""
        if value.node is None or value.node not in self.step_of:
            return False
        return value not in self.step_of[value.node].outputs

    def verify(self) -> None:
        """Raise VerifyError unless the steps cover every node once, in an order that respects dependencies.

        Each body must read and return what its nodes do.
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


def inputs_of(nodes: Sequence[Node]) -> tuple[Value, ...]:
    """Return the values the nodes read and do not make, each once, in order of first use."""
    made = {v for n in nodes for v in n.results}
    return tuple(dict.fromkeys(v for n in nodes for v in n.operands if v not in made))


def outputs_of(nodes: Sequence[Node]) -> tuple[Value, ...]:
    """Return the results that something outside the nodes (the return node too) uses."""
    inside = set(nodes)
    return tuple(v for n in nodes for v in n.results if any(user not in inside for user in v.users))


def body_of(graph: Graph, nodes: Sequence[Node]) -> Graph:
    """Return the nodes (in graph order) as a graph of their own, under their names in `graph`.

    Computed operands are inputs, constant ones are copied in, results used outside are outputs.
    """
    operands = inputs_of(nodes)
    constants = [v.node for v in operands if v.literal is not None and v.node is not None]
    inputs = [v for v in operands if v.literal is None]
    return graph.extract(inputs, [*constants, *nodes], outputs_of(nodes))


def alone(graph: Graph, node: Node) -> Partition:
    """Return a step of one node that cuDNN does not run."""
    return Partition((node,), Kind.VIEW if is_view(node) else Kind.KERNEL, body_of(graph, [node]))


def display_name(node: Node) -> str:
    """Return the op's name as reports show it: adding a constant vector along one dim is a `bias`."""
    op: Op = node.op
    if op.name == "add" and any(map(_is_constant_vector, node.operands)):
        return "bias"
    return op.name


def _is_constant_vector(value: Value) -> bool:
    return value.literal is not None and sum(d != 1 for d in value.type.shape) == 1
