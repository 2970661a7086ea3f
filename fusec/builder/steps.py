"""Turn what a Python function adds to a graph into the body of a loop.

The function gets stand-ins: values that are in no step, and whose users become the body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from fusec.builder.tensor import Tensor
from fusec.ir import Body, Graph, Node, Value
from fusec.ops.scan import body_of, dependents, is_number

if TYPE_CHECKING:
    from fusec.builder.builder import Builder

Step = Callable[[list[Tensor], list[Tensor]], tuple[Sequence[Tensor], Sequence[Tensor]]]


def count_steps(b: Builder, sequences: Sequence[Tensor], steps: int | None) -> int:
    """Return the number of steps. Sequences have one row for each."""
    for sequence in sequences:
        if sequence.rank == 0:
            raise b.error(f"{sequence!r} has no rows to scan")
    lengths = {len(sequence) for sequence in sequences} | ({steps} if steps is not None else set())
    if not lengths:
        raise b.error("a scan without sequences needs the number of its steps")
    if len(lengths) > 1:
        raise b.error(f"a scan of {' and '.join(map(str, sorted(lengths)))} steps: sequences have one row for each")
    return lengths.pop()


def call_step(b: Builder, step: Step, states: list[Tensor], rows: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Call the function of a step, and check what it returns."""
    made: Any = step(states, rows)
    if not isinstance(made, tuple) or len(cast("tuple[Any, ...]", made)) != 2:
        raise b.error(f"a step returned {made!r}: return the list of next states and that of rows")
    after, results = map(list, cast("tuple[list[Tensor], list[Tensor]]", made))
    if len(after) != len(states):
        raise b.error(f"a step of {len(states)} states returned {len(after)}")
    if not after and not results:
        raise b.error("a step returned no tensors")
    return after, results


def trace_body(nodes: Sequence[Node], first: Sequence[Value], outputs: Sequence[Value]) -> tuple[Body, list[Value]]:
    """Return the body of a loop, and the values that all its steps read.

    nodes: those that depend on `first`.
    """
    inside = {*first, *(v for node in nodes for v in node.results)}
    read = [*(v for node in nodes for v in node.operands), *outputs]
    shared = list(dict.fromkeys(v for v in read if v not in inside and not is_number(v)))
    return body_of([*first, *shared], outputs), shared


def erase_step(graph: Graph, nodes: Sequence[Node], stand_ins: Sequence[Value]) -> set[Value]:
    """Erase what depends on stand-ins, and these. Returns the values that were erased."""
    erased = set[Value]()
    for node in [*reversed(dependents(nodes, stand_ins)), *dict.fromkeys(v.node for v in stand_ins)]:
        assert node is not None
        erased.update(node.results)
        graph.erase(node)
    return erased
