"""Find updates of state that may overwrite the state they replace."""

from __future__ import annotations

from collections.abc import Mapping

from fusec.ir import Value
from fusec.ops import (
    BatchNormBackward,
    BatchNormBySums,
    BatchNormTrain,
    Cast,
    ChannelSums,
    Concat,
    Pointwise,
    Reshape,
    Scatter,
)
from fusec.schedule.aliasing import is_view
from fusec.schedule.multi_tensor import equal_members
from fusec.schedule.program import Kind, Partition, Program

CHANNELS = (BatchNormTrain, ChannelSums, BatchNormBySums, BatchNormBackward)


def in_place(program: Program, updates: Mapping[Value, Value]) -> dict[Value, Value]:
    """Return, for each new value that can use the memory of the old one, the old value.

    updates: for each old value, the new one. If that is a view of all elements of a value, the result names this value.
    No step after the one that computes the new value may read the old one. That step may read it directly, without a
    view, if it works element by element, as pointwise graphs do. It may also read it if it only writes rows into it.
    Any other step could write an element before it is read.
    """
    graph = program.graph
    views = [step.nodes[0] for step in program.steps if step.kind is Kind.VIEW]
    made = {v: index for index, step in enumerate(program.steps) for v in step.outputs}
    root = {v: reads(program, v) for node in views for v in node.results}
    whole = {new: _whole(new) for new in updates.values()}  # a view of all elements is as good as the value itself
    for new, value in whole.items():
        if value in made and value not in root:
            made[new] = made[value]
            root.pop(new, None)
    outputs = [root.get(v, v) for v in graph.outputs]
    last: dict[Value, int] = {}
    for index, step in enumerate(program.steps):
        for value in step.inputs:
            last[root.get(value, value)] = index
    found: dict[Value, Value] = {}
    for old, new in updates.items():
        index = made.get(new)
        if index is None or new in root or old in outputs or outputs.count(new) > 1:
            continue
        if new.type != old.type or last.get(old, -1) > index or new in found:
            continue
        step = program.steps[index]
        by_element = all(root.get(v) is not old for v in step.inputs) and _by_element(step, old, new)
        if last.get(old, -1) < index or (by_element and whole[new] is new) or _writes_rows(step, old, whole[new], root):
            found[whole[new] if whole[new] in made else new] = old
    return found


def _whole(value: Value) -> Value:
    """Return the value of which this is a reshape, in the same memory; else the value itself."""
    while value.node is not None and isinstance(value.node.op, Reshape) and is_view(value.node):
        value = value.node.operands[0]
    return value


def overwritten_input(value: Value) -> Value | None:
    """Return the operand whose memory a write of rows takes if that is state: an input, or a view of one; else None.

    value: the result of the write, or a reshape of it, which a kernel may store instead.

    A kernel that is timed alone does not know if its result replaces state. Where it does not, each other kernel of the
    same write copies the rows that stay, too.
    """
    scatter = _whole(value).node
    if scatter is None or not isinstance(scatter.op, Scatter) or scatter.op.reduction != "none":
        return None
    old = scatter.operands[0]
    return old if _whole(old) in scatter.graph.inputs and old.type == scatter.result.type else None


def _writes_rows(step: Partition, old: Value, new: Value, root: Mapping[Value, Value]) -> bool:
    """Tell if a step only writes rows into the old value: no element that stays is read, and no new row depends on it.

    `Steps` and the kernels of such writes then copy nothing but these rows. Later nodes of the step may read the
    result.
    """
    scatter = new.node
    if scatter is None or not isinstance(scatter.op, Scatter) or scatter.op.reduction != "none":
        return False
    reading = [(n, i) for n in step.nodes for i, v in enumerate(n.operands) if old in (root.get(v, v), _whole(v))]
    return reading == [(scatter, 0)] and _whole(scatter.operands[0]) is old


def reads(program: Program, value: Value) -> Value:
    """Return the value whose memory a value uses: itself, or the value of which it is a view.

    A part of a concat in place counts as itself.
    """
    while value.node is not None and value.literal is None and program.step_of[value.node].kind is Kind.VIEW:
        if isinstance(value.node.op, Concat):
            break
        value = value.node.operands[0]
    return value


def _by_element(step: Partition, old: Value, new: Value) -> bool:
    """Tell if the thread that reads an element of the old value also writes that element of the new one.

    A batch norm in training reads its values per channel just before it writes new ones. With given sums it may not
    overwrite them, because other thread blocks may start later. Other blocks also run the other members of a
    multi-tensor step, and compute results of other shapes. Two norms of one gradient hold it where a result will be.
    """
    if any(isinstance(n.op, BatchNormBySums) and old in n.operands for n in step.nodes):
        return False
    if not all(isinstance(n.op, (Pointwise, Cast, *CHANNELS)) for n in step.nodes):
        return False
    if sum(isinstance(n.op, BatchNormBackward) for n in step.nodes) > 1 and new.type.rank > 1:
        return False
    own = next((set(m.nodes) for m in equal_members(step.nodes) or () if new in m.writes), set(step.nodes))
    downstream = {old}
    for node in step.nodes:
        if downstream.isdisjoint(node.operands) or isinstance(node.op, CHANNELS):
            continue
        if node not in own or node.results[0].type.shape != old.type.shape:
            return False
        downstream.update(node.results)
    return True
