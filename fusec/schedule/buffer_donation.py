"""Find updates of state that may overwrite the state they replace."""

from __future__ import annotations

from collections.abc import Mapping

from fusec.ir import Value
from fusec.ops import BatchNormBackward, BatchNormBySums, BatchNormTrain, Cast, ChannelSums, Concat, Pointwise
from fusec.schedule.multi_tensor import alike
from fusec.schedule.program import Kind, Partition, Program

CHANNELS = (BatchNormTrain, ChannelSums, BatchNormBySums, BatchNormBackward)


def in_place(program: Program, updates: Mapping[Value, Value]) -> dict[Value, Value]:
    """Return, for each new value that can use the old one's memory, the old value.

    Nothing may read the old value after the step that makes the new one. That step must read it element by element,
    as pointwise graphs do, and not through a view. Other steps may write a part while another part is still to be read.
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
        if last.get(old, -1) < index or (
            all(root.get(v) is not old for v in step.inputs) and _by_element(step, old, new)
        ):
            found[new] = old
    return found


def reads(program: Program, value: Value) -> Value:
    """Return the value whose memory a value uses: itself, or what it is a view of.

    A value that a concat joins in place counts as itself.
    """
    while value.node is not None and value.literal is None and program.step_of[value.node].kind is Kind.VIEW:
        if isinstance(value.node.op, Concat):
            break
        value = value.node.operands[0]
    return value


def _by_element(step: Partition, old: Value, new: Value) -> bool:
    """Tell if the thread that reads an element of the old value also writes that element of the new one.

    A batch norm in training reads its values per channel just before it writes new ones. With given sums it may not
    overwrite them, because other blocks may not have begun. Other blocks also run the other members of a multi-tensor
    step, and results of other shapes.
    """
    if any(isinstance(n.op, BatchNormBySums) and old in n.operands for n in step.nodes):
        return False
    if not all(isinstance(n.op, (Pointwise, Cast, *CHANNELS)) for n in step.nodes):
        return False
    own = next((set(m.nodes) for m in alike(step.nodes) or () if new in m.writes), set(step.nodes))
    downstream = {old}
    for node in step.nodes:
        if downstream.isdisjoint(node.operands) or isinstance(node.op, CHANNELS):
            continue
        if node not in own or node.results[0].type.shape != old.type.shape:
            return False
        downstream.update(node.results)
    return True
