"""Count the steps of loops that end by a condition which the body computes from constants, such as a counter.

tf2onnx writes while loops so: the condition of the next step is `i + 1 < n`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import GraphProto

from fusec.errors import VerifyError
from fusec.frontends.onnx.emission.emit import Emitter, ModelValue
from fusec.frontends.onnx.model_file.functions import all_nodes
from fusec.frontends.onnx.model_file.structure import captured, draws
from fusec.ir import Value
from fusec.ops.spec import require

MAX_TRIPS = 4096  # of a loop that is unrolled, or whose condition is computed for each step


def passes_condition(body: GraphProto) -> bool:
    """Tell if a body gives the condition that it takes. Then only the number of trips ends the loop."""
    passed = {body.input[1].name}
    passed.update(o for n in body.node if n.op_type == "Identity" and n.input[0] in passed for o in n.output)
    return body.output[0].name in passed


def steps_until_end(g: Emitter, body: GraphProto, trips: int | None, states: Sequence[ModelValue]) -> int | None:
    """Return the number of steps of a loop that has at least one; None if its end depends on computed values.

    trips: the most steps; None: only the condition ends the loop.
    Raises VerifyError if the condition is still true after MAX_TRIPS steps.
    """
    count = len(states)
    if len(body.input) != count + 2 or len(body.output) <= count or any(map(draws, all_nodes(body.node))):
        return None
    if passes_condition(body):
        return trips
    places = _states_of_the_end(body)
    held: list[ModelValue] = list(states)
    if not all(isinstance(v, Value) and v.literal is not None for v in (held[k] for k in places)):
        return None
    part = GraphProto()
    part.CopyFrom(body)
    del part.output[:]
    part.output.extend([body.output[0], *(body.output[k + 1] for k in places)])
    changes = bool(places) or body.input[0].name in _read(body, {body.output[0].name})
    try:
        for step in range(MAX_TRIPS if trips is None else min(trips, MAX_TRIPS)):
            with g.tentative():
                flag, *following = g.subgraph(part, [g.constant(np.array(step)), g.constant(np.array(True)), *held])
            if not (isinstance(flag, Value) and flag.literal is not None and flag.literal.type.size == 1):
                return None
            if not flag.literal.array.all():
                return step + 1
            if not changes:
                return trips
            for k, value in zip(places, following, strict=True):
                held[k] = value
    except VerifyError:
        return None
    require(trips is not None and trips <= MAX_TRIPS, f"more than {MAX_TRIPS} trips")
    return trips


def _states_of_the_end(body: GraphProto) -> list[int]:
    """Return the places among what is carried that the condition depends on, also by way of earlier steps."""
    carried = [v.name for v in body.input[2:]]
    wanted, places = {body.output[0].name}, list[int]()
    while True:
        read = _read(body, wanted)
        found = [k for k, name in enumerate(carried) if name in read]
        if found == places:
            return places
        places = found
        wanted.update(body.output[k + 1].name for k in found)


def _read(body: GraphProto, wanted: set[str]) -> set[str]:
    """Return the names that values of a body depend on, with their own."""
    found, count = set(wanted), 0
    while len(found) > count:
        count = len(found)
        for node in body.node:
            if found.intersection(node.output):
                found.update(node.input, captured(node))
    return found
