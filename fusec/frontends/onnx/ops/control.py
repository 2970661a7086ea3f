"""Import control flow: choose the branch of If or select between both, and make Loop and Scan one op or unroll them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import GraphProto

from fusec.errors import VerifyError
from fusec.frontends.onnx.emission.emit import Emitter, ModelValue, Table, TensorList
from fusec.frontends.onnx.emission.host_values import HostValueError
from fusec.frontends.onnx.emission.loop_end import MAX_TRIPS, passes_condition, steps_until_end
from fusec.frontends.onnx.model_file.functions import all_nodes
from fusec.frontends.onnx.model_file.structure import draws
from fusec.frontends.onnx.ops.loop_as_scan import MAX_STEPS, LoopForm, loop_as_scan, reversed_rows
from fusec.frontends.onnx.ops.loop_lists import loop_with_lists
from fusec.frontends.onnx.ops.loop_rows import first_dim, last_place
from fusec.ir import Node, Value
from fusec.ops import Concat, Gather, Scatter, pw
from fusec.ops.spec import normalize_axis, require

_FOREVER = np.iinfo(np.int64).max


def if_(g: Emitter, condition: Value, /, *, then_branch: GraphProto, else_branch: GraphProto) -> tuple[ModelValue, ...]:
    """Import If: one branch if the condition is known at import, else both with a selection, if that is possible."""
    if condition.literal is None and condition.type.size == 1:
        selected = _selected(g, condition, then_branch, else_branch)
        if selected is not None:
            return selected
    chosen = then_branch if g.number(condition, "the condition") else else_branch
    return tuple(g.subgraph(chosen, ()))


def _selected(
    g: Emitter, condition: Value, then_branch: GraphProto, else_branch: GraphProto
) -> tuple[ModelValue, ...] | None:
    """Compute both branches and select each result by the condition.

    Returns None if results differ in type, or if a branch cannot be imported without knowing that it is taken. Also if
    a branch reads by computed indices, because those of the other branch may be out of range. What a failed attempt
    added to the graph has no reader.
    """
    before = g.graph.last
    try:
        with g.tentative():
            results = [g.subgraph(branch, ()) for branch in (then_branch, else_branch)]
            require(len(results[0]) == len(results[1]), "the branches give different numbers of results")
            if any(_reads_anywhere(node) for node in g.graph.since(before)):
                return None
            flag = g.reshape(condition, ())
            return tuple(_select(g, flag, a, b) for a, b in zip(*results, strict=True))
    except VerifyError:
        return None


def _select(g: Emitter, flag: Value, then: ModelValue, other: ModelValue) -> ModelValue:
    if isinstance(then, TensorList) and isinstance(other, TensorList):
        require(len(then.items) == len(other.items), "the branches give sequences of different lengths")
        pairs = zip(then.items, other.items, strict=True)
        return TensorList(tuple(tensor(_select(g, flag, a, b)) for a, b in pairs), then.dtype)
    a, b = tensor(then), tensor(other)
    require(a.type.same_value_type(b.type), f"the branches give {a.type} and {b.type}")
    return a if a is b else g(pw("where"), flag, a, b)


def _reads_anywhere(node: Node) -> bool:
    """Tell if a node fails for some values of its operands: an index out of range."""
    return isinstance(node.op, Gather | Scatter) and node.operands[1].literal is None


def loop(
    g: Emitter,
    trips: Value | None = None,
    condition: Value | None = None,
    /,
    *carried: ModelValue | None,
    body: GraphProto,
) -> tuple[ModelValue, ...]:
    """Import Loop: the body once for each trip. Its scan outputs are stacked."""
    on_host = _on_host(g, trips, condition, carried, body)
    if on_host is not None:
        return on_host
    count = None if trips is None else int(g.number(trips, "the number of trips"))
    running = condition is None or bool(g.number(condition, "the condition"))
    require(all(v is not None for v in carried), "a carried value is missing")
    state: list[ModelValue] = [v for v in carried if v is not None]
    counted = steps_until_end(g, body, count, state) if running and count != 0 else None
    steps = count if counted is None else counted
    if running and steps is not None and 0 < steps <= MAX_STEPS:
        made = loop_with_lists(g, body, steps, state, counted is not None)
        if made is not None:
            return made[: g.outputs]
    scanned: list[list[Value]] = [[] for _ in range(g.outputs - len(state))]
    trip = 0
    while running and (count is None or trip < count):
        require(trip < MAX_TRIPS, f"more than {MAX_TRIPS} trips")
        with g.unrolling():
            results = g.subgraph(body, [g.constant(np.array(trip, np.int64)), g.constant(np.array(True)), *state])
        state, outputs = results[1 : 1 + len(state)], results[1 + len(state) :]
        # the body's condition ends the loop, even if the node has no condition
        running = bool(g.number(tensor(results[0]), "the condition"))
        require(len(outputs) >= len(scanned), f"its body gives {len(outputs)} scan outputs, the node {len(scanned)}")
        for items, output in zip(scanned, outputs, strict=False):
            items.append(tensor(output))
        trip += 1
    if scanned and not trip:
        return (*state, *_of_no_trips(g, body, state, len(scanned)))
    return (*state, *(stacked(g, items, 0) for items in scanned))


def _of_no_trips(g: Emitter, body: GraphProto, state: Sequence[ModelValue], count: int) -> list[Value]:
    """Return scan outputs without rows. The body is imported for their shapes; nothing reads what that adds."""
    with g.tentative(), g.unrolling():
        try:
            results = g.subgraph(body, [g.constant(np.array(0, np.int64)), g.constant(np.array(True)), *state])
        except VerifyError as error:
            raise VerifyError(f"a loop of no trips has scan outputs of unknown shape: {error}") from error
    types = [tensor(each).type for each in results[1 + len(state) :][:count]]
    return [g.constant(np.empty((0, *type.shape), type.dtype.numpy)) for type in types]


def _on_host(
    g: Emitter, trips: Value | None, condition: Value | None, carried: Sequence[ModelValue | None], body: GraphProto
) -> tuple[ModelValue, ...] | None:
    """Let the host run a loop whose end is computed: its body is one program. None if the loop can be unrolled."""
    values = [v for v in carried if isinstance(v, Value)]
    computed = any(v is not None and v.literal is None for v in (trips, condition))
    names = [v.name for v in body.output]
    if len(values) < len(carried) or len(set(names)) < len(names) or len(body.input) != len(values) + 2:
        return None
    if not computed and not _ends_by_itself(g, values, body):
        return None
    drawing = [node.op_type for node in all_nodes(body.node) if draws(node)]
    require(not drawing, f"its end is computed, and its body draws random numbers: give {''.join(drawing[:1])} a seed")
    first = [g.constant(np.array(_FOREVER)) if trips is None else trips]
    first.append(g.constant(np.array(True)) if condition is None else condition)
    for value, what in zip(first, ("the number of trips", "the condition"), strict=True):
        require(value.type.size == 1, f"{what} must be one number, not of shape {list(value.type.shape)}")
    return tuple(g.on_host_loop("the end of its loop", body, first, values))


def _ends_by_itself(g: Emitter, carried: Sequence[Value], body: GraphProto) -> bool:
    """Tell if the body computes the condition, or needs values on the host to do so.

    The usual body passes the condition on, so that nothing has to be imported.
    """
    if passes_condition(body):
        return False
    try:
        with g.tentative():
            results = g.subgraph(body, [g.constant(np.array(0, np.int64)), g.constant(np.array(True)), *carried])
    except HostValueError:
        return True  # unrolled, each trip would be a host step
    except VerifyError:
        return False
    return isinstance(results[0], Value) and results[0].literal is None


def scan_8(
    g: Emitter,
    lengths: Value | None = None,
    /,
    *given: Value | None,
    body: GraphProto,
    num_scan_inputs: int,
    directions: Sequence[int] = (),
) -> tuple[ModelValue, ...]:
    """Import Scan of version 8, which has a batch dim first: scan each image of the batch and stack the results."""
    require(lengths is None, "sequence lengths are not supported")
    values = [v for v in given if v is not None]
    require(len(values) == len(given) > 0, "an input is missing")
    batch = values[0].type.shape[0]
    require(batch > 0, "an empty batch")
    rows: list[tuple[ModelValue, ...]] = []
    for i in range(batch):
        one = [row(g, v, 0, i) for v in values]
        rows.append(scan_9(g, *one, body=body, num_scan_inputs=num_scan_inputs, scan_input_directions=directions))
    return tuple(stacked(g, [tensor(r[k]) for r in rows], 0) for k in range(len(rows[0])))


def scan_9(
    g: Emitter,
    /,
    *given: Value,
    body: GraphProto,
    num_scan_inputs: int,
    scan_input_axes: Sequence[int] = (),
    scan_input_directions: Sequence[int] = (),
    scan_output_axes: Sequence[int] = (),
    scan_output_directions: Sequence[int] = (),
) -> tuple[ModelValue, ...]:
    require(1 <= num_scan_inputs <= len(given), f"num_scan_inputs is {num_scan_inputs}")
    states = len(given) - num_scan_inputs
    state: list[ModelValue] = list(given[:states])
    inputs = given[states:]
    axes = list(scan_input_axes) or [0] * len(inputs)
    backward = list(scan_input_directions) or [0] * len(inputs)
    require(len(axes) == len(backward) == len(inputs), "one axis and one direction for each scan input")
    axes = [normalize_axis(a, v.type.rank) for a, v in zip(axes, inputs, strict=True)]
    lengths = {v.type.shape[a] for v, a in zip(inputs, axes, strict=True)}
    require(len(lengths) == 1, f"scan inputs of different lengths {sorted(lengths)}")
    (count,) = lengths
    outputs = g.outputs - states
    out_axes = list(scan_output_axes) or [0] * outputs
    out_backward = list(scan_output_directions) or [0] * outputs
    if 0 < count <= MAX_STEPS:
        rows = [first_dim(g, v, a) for v, a in zip(inputs, axes, strict=True)]
        rows = [reversed_rows(g, v) if d else v for v, d in zip(rows, backward, strict=True)]
        made = loop_as_scan(g, LoopForm(body, count, [tensor(v) for v in state], rows))
        if made is not None:
            stacks = [reversed_rows(g, v) if d else v for v, d in zip(made[states:], out_backward, strict=False)]
            ranks = [v.type.rank for v in stacks]
            placed = [normalize_axis(a, rank) for a, rank in zip(out_axes, ranks, strict=False)]
            return (*made[:states], *(last_place(g, v, a) for v, a in zip(stacks, placed, strict=False)))
    require(0 < count <= MAX_TRIPS, f"{count} trips; from 1 to {MAX_TRIPS} are supported")
    scanned: list[list[Value]] = [[] for _ in range(outputs)]
    for trip in range(count):
        at = [count - 1 - trip if d else trip for d in backward]
        with g.unrolling():
            slices = [row(g, v, a, i) for v, a, i in zip(inputs, axes, at, strict=True)]
            results = g.subgraph(body, [*state, *slices])
        state = results[:states]
        require(len(results) - states >= outputs, f"its body gives {len(results) - states} scan outputs, not {outputs}")
        for items, output in zip(scanned, results[states:], strict=False):
            items.append(tensor(output))
    joined = [
        stacked(g, items[::-1] if d else items, normalize_axis(a, items[0].type.rank + 1))
        for items, a, d in zip(scanned, out_axes, out_backward, strict=False)
    ]
    return (*state, *joined)


def tensor(value: ModelValue) -> Value:
    """Return a value that is a tensor. Raises VerifyError if it is a sequence."""
    require(isinstance(value, Value), "a sequence where a tensor is needed")
    assert not isinstance(value, TensorList)
    return value


def row(g: Emitter, x: Value, axis: int, index: int) -> Value:
    """Return x[…, index, …] without the dim `axis`."""
    return g.reshape(g.window(x, axis, index, 1), (*x.type.shape[:axis], *x.type.shape[axis + 1 :]))


def stacked(g: Emitter, items: Sequence[Value], axis: int) -> Value:
    """Join tensors along a new dim."""
    shape = items[0].type.shape
    wide = [g.reshape(v, (*v.type.shape[:axis], 1, *v.type.shape[axis:])) for v in items]
    require(all(v.type.shape == shape for v in items), "tensors of different shapes do not stack")
    return wide[0] if len(wide) == 1 else g(Concat(axis), *wide)


TABLE: Table = {
    ("If", 1): if_,
    ("Loop", 1): loop,
    ("Scan", 8): scan_8,
    ("Scan", 9): scan_9,
}
