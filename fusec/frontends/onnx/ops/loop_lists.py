"""Import sequences to which each step of a loop appends one tensor: they become rows that the loop gives."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import GraphProto

from fusec.frontends.onnx.emission.emit import Emitter, ModelValue, TensorList
from fusec.frontends.onnx.model_file.functions import all_nodes
from fusec.frontends.onnx.model_file.structure import bodies
from fusec.frontends.onnx.ops.loop_as_scan import LoopForm, loop_as_scan
from fusec.ir import Value
from fusec.ops import Reshape, Slice

MAX_ITEMS = 4096  # of a sequence, each of which is a slice


def loop_with_lists(
    g: Emitter, body: GraphProto, steps: int, states: Sequence[ModelValue], counted: bool
) -> tuple[ModelValue, ...] | None:
    """Return the results of a Loop as a scan; None if it has to be unrolled. counted: see `LoopForm`."""
    lists = {index: v for index, v in enumerate(states) if isinstance(v, TensorList)}
    if lists and (steps > MAX_ITEMS or not all(v.present and _appends(body, index) for index, v in lists.items())):
        return None
    tensors = [v for v in states if isinstance(v, Value)]
    made = loop_as_scan(g, LoopForm(body, steps, tensors, is_loop=True, lists=tuple(lists), counted=counted))
    if made is None:
        return None
    last, rows, appended = iter(made), made[len(tensors) :], iter(made[len(made) - len(lists) :])
    results = [_list_of(g, lists[k], next(appended)) if k in lists else next(last) for k in range(len(states))]
    return (*results, *rows[: len(rows) - len(lists)])


def _list_of(g: Emitter, before: TensorList, stack: Value) -> TensorList:
    """Return a sequence to which a loop has appended rows."""
    row, rank = stack.type.shape[1:], stack.type.rank
    slices = (g(Slice((at, *[0] * (rank - 1)), (1, *row), (1,) * rank), stack) for at in range(stack.type.shape[0]))
    items = tuple(g(Reshape(row), one) for one in slices)
    return TensorList((*before.items, *items), before.dtype, stack=None if before.items else stack)


def _appends(body: GraphProto, index: int) -> bool:
    """Tell if a body appends one tensor to a carried sequence, and does nothing else with it."""
    if not index + 2 < len(body.input) or not index + 1 < len(body.output):
        return False
    name, after = body.input[index + 2].name, body.output[index + 1].name
    reads = [n for node in all_nodes(body.node) for n in node.input]
    reads += [v.name for node in all_nodes(body.node) for inner in bodies(node) for v in inner.output]
    reads += [v.name for v in body.output]
    while True:
        users = [node for node in body.node if name in node.input]
        if reads.count(name) != 1 or len(users) != 1 or users[0].input[0] != name:
            return False
        (user,) = users
        name = user.output[0]
        if user.op_type == "SequenceInsert":
            return len(list(filter(None, user.input))) == 2 and name == after and reads.count(name) == 1
        if user.op_type != "Identity":
            return False
