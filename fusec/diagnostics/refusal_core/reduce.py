"""Remove one thing from a refused body: an output, an op, a dim or a dtype. The largest comes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fusec.diagnostics.refusal_core.rebuild import bypassed, with_dtype, with_outputs, with_sizes
from fusec.ir import Constant, DType, Graph, Node, Value
from fusec.ops import ANCHORS
from fusec.schedule.program import display_name
from fusec.system.dataclass import dataclass

SMALL = (1, 2, 8)  # sizes that a dim is reduced to; 8 because cuDNN may require 16-byte alignment


@dataclass(frozen=True)
class Smaller:
    """A body with one thing less.

    what, where: description and place of what is removed, because two relus are two things.
    """

    what: str
    where: str
    body: Graph


def smaller_bodies(body: Graph) -> Iterator[Smaller]:
    """Return every body with one thing less. Each is smaller than the original, so a search ends."""
    weight = _weight(body)
    for stage in (fewer_outputs, small_dims, fewer_ops, smaller_dims, plain_dtype):
        for what, where, smaller in stage(body):
            if smaller is not None and _weight(smaller) < weight:
                yield Smaller(what, where, smaller)


def _weight(body: Graph) -> tuple[int, int, int, int]:
    nodes = [n for n in body.nodes if not isinstance(n.op, Constant)]
    dims = sum(sum(v.type.shape) for v in body.values())
    return len(nodes), len(body.outputs), dims, len(_floats(body))


Candidates = Iterator[tuple[str, str, Graph | None]]  # what, where, the smaller body


def fewer_outputs(body: Graph) -> Candidates:
    if len(body.outputs) > 1:
        for output in reversed(body.outputs):
            yield "without the other outputs", output.name, with_outputs(body, [output])


def fewer_ops(body: Graph) -> Candidates:
    nodes = [n for n in body.nodes if not isinstance(n.op, Constant)]
    for node in reversed(nodes):  # because the partitioner added the last op last, it is the likely reason
        name, at = display_name(node), node.results[0].name
        if len(nodes) > 2:
            yield f"{name} alone", at, with_outputs(body, node.results, _computed(node))
            yield f"up to {name}", at, with_outputs(body, node.results)
    for node in reversed(nodes):
        name, at = f"without {display_name(node)}", node.results[0].name
        for index, value in enumerate(node.operands if not isinstance(node.op, ANCHORS) else ()):
            if value.literal is None:
                yield name, f"{at}, {index}", bypassed(body, node, index)
        if any(v in body.outputs for v in node.results):
            others = [v for v in body.outputs if v.node is not node]
            yield name, at, with_outputs(body, [*others, *_computed(node)])
        else:
            yield name, at, with_outputs(body, body.outputs, node.results)


def _computed(node: Node) -> list[Value]:
    return [v for v in node.operands if v.node is not None and v.literal is None]


def small_dims(body: Graph) -> Candidates:
    """Shrink all large dims in one step, because questions about a small body are answered quickly."""
    largest = SMALL[-1]
    numbers = {d: largest for v in body.values() for d in v.type.shape if d > largest}
    if len(numbers) > 1:
        yield f"with {largest} for every larger dim", "", with_sizes(body, numbers)


def smaller_dims(body: Graph) -> Candidates:
    sizes = sorted({d for v in body.values() for d in v.type.shape}, reverse=True)
    for small in SMALL:
        for size in sizes:
            if small < size:
                yield f"with {small} for {size}", "", with_sizes(body, {size: small})


def plain_dtype(body: Graph) -> Candidates:
    """Use one floating-point type for all tensors. If the refusal stays, mixed types are not its reason."""
    floats = _floats(body)
    if len(floats) > 1:
        for dtype, _ in floats.most_common():
            yield f"in {dtype.value} throughout", "", with_dtype(body, dtype)


def _floats(body: Graph) -> Counter[DType]:
    return Counter(v.type.dtype for v in body.values() if v.type.dtype.is_float)
