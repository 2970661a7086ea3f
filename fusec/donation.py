"""Which updates of a program's state may be written over the state they replace."""

from __future__ import annotations

from collections.abc import Mapping

from fusec.ir import Value
from fusec.ops import BatchNormBackward, BatchNormTrain, Cast, Concat, Pointwise
from fusec.program import Kind, Partition, Program

CHANNELS = (BatchNormTrain, BatchNormBackward)


def in_place(program: Program, updates: Mapping[Value, Value]) -> dict[Value, Value]:
    """For each new value that can lie where the old one does: new to old.

    Nothing may read the old value after the step that makes the new one, and that step must read it element by
    element, as pointwise graphs do: others may be written in parts, while other parts are still to be read.
    """
    graph = program.graph
    views = [step.nodes[0] for step in program.steps if step.kind is Kind.VIEW]
    root = {v: reads(program, v) for node in views for v in node.results}
    outputs = [root.get(v, v) for v in graph.outputs]
    last: dict[Value, int] = {}
    for index, step in enumerate(program.steps):
        for value in step.inputs:
            last[root.get(value, value)] = index
    made = {v: index for index, step in enumerate(program.steps) for v in step.outputs}
    found: dict[Value, Value] = {}
    for old, new in updates.items():
        index = made.get(new)
        if index is None or new in root or old in outputs or outputs.count(new) > 1:
            continue
        if new.type != old.type or last.get(old, -1) > index or new in found:
            continue
        step = program.steps[index]
        if last.get(old, -1) < index or _by_element(step, old):
            found[new] = old
    return found


def reads(program: Program, value: Value) -> Value:
    """The value in whose memory it lies: itself, or what it is a view of. What is joined in place is itself, too."""
    while value.node is not None and value.literal is None and program.step_of[value.node].kind is Kind.VIEW:
        if isinstance(value.node.op, Concat):
            break
        value = value.node.operands[0]
    return value


def _by_element(step: Partition, old: Value) -> bool:
    """Batch norms in training read what they have one number of for each channel just before they make new ones."""
    readers = [n for n in step.nodes if old in n.operands and not isinstance(n.op, CHANNELS)]
    if not all(isinstance(n.op, (Pointwise, Cast, *CHANNELS)) for n in step.nodes):
        return False
    return all(n.results[0].type.shape == old.type.shape for n in readers)
