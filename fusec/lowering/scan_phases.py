"""Order the values of a scan's body in phases: what is stored, and between which barriers it is computed."""

from __future__ import annotations

from fusec.ir import Constant, Value
from fusec.ops import Concat, Expand, Gather, MatMul, Pad, Reduce, Relayout, Reshape, Scan, Slice, Split, Transpose

MOVES = (Reshape, Transpose, Relayout, Expand, Concat, Split, Slice, Pad, Gather)
CHEAP = frozenset({"where", "identity", "neg", "abs", "max", "min", "relu", "add", "sub", "mul"})


def phases_of(op: Scan) -> tuple[tuple[Value, ...], ...]:
    """Return the values that threads compute between barriers: what is stored, and what the body gives."""
    graph = op.body.graph
    level: dict[Value, int] = dict.fromkeys(graph.inputs, 0)  # the barriers that a value waits for
    phases: list[list[Value]] = []
    outputs, stored = dict.fromkeys(graph.outputs), _stored_values(op)

    def computed(value: Value, at: int) -> None:
        phases.extend([] for _ in range(at + 1 - len(phases)))
        phases[at].append(value)

    for node in graph.nodes:
        at = max((level[v] for v in node.operands), default=0)
        for value in node.results:
            level[value] = at
            if value in stored or value in outputs:
                computed(value, at)
                level[value] = at + 1
    for value in outputs:
        if value.node is None or isinstance(value.node.op, Constant):
            computed(value, 0)
    return tuple(map(tuple, phases))


def _stored_values(op: Scan) -> set[Value]:
    """Return the values that are stored for the nodes that read them, rather than computed by each."""
    stored, in_memory, cheap = set[Value](), set[Value](), set[Value]()
    in_memory.update(op.body.graph.inputs)
    cheap.update(op.body.graph.inputs)
    for node in op.body.graph.nodes:
        moves, constant = isinstance(node.op, MOVES), isinstance(node.op, Constant)
        is_view = constant or (moves and in_memory.issuperset(node.operands))  # an element takes one load at most
        is_cheap = constant or ((moves or node.op.name in CHEAP) and cheap.issuperset(node.operands))
        for value in node.results:
            if not is_view and _is_read_often(value, is_cheap):
                stored.add(value)
            if is_view or value in stored:
                in_memory.add(value)
            if is_cheap or value in stored:
                cheap.add(value)
    return stored


def _is_read_often(value: Value, is_cheap: bool) -> bool:
    """Tell if it takes longer to compute a value wherever it is read than to store it, and to wait for that."""
    users = [user for user in value.users if user.results]
    sums = value.node is not None and isinstance(value.node.op, (Reduce, MatMul))
    many = any(isinstance(user.op, (MatMul, Expand)) for user in users)
    twice = any(isinstance(user.op, Reduce) and user.op.kind == "log_sum_exp" for user in users)
    return len(users) > 1 or (bool(users) and sums) or many or (twice and not is_cheap)
