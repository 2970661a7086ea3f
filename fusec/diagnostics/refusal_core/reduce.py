"""Remove one thing from a refused body: an output, an op, a dim, a dtype; the largest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fusec.diagnostics.refusal_core.rebuild import bypassed, with_dtype, with_outputs, with_sizes
from fusec.ir import Constant, DType, Graph, Node, Value
from fusec.ops import ANCHORS
from fusec.schedule.program import display_name

SMALL = (1, 2, 8)  # what a dim is reduced to; 8 where cuDNN wants 16-byte alignment


@dataclass(frozen=True)
class Smaller:
    """A body with one thing less, with words for what is removed, and where (two relus are two things)."""

    what: str
    where: str
    body: Graph


def smaller_bodies(body: Graph) -> Iterator[Smaller]:
    """Return every body with one thing less. Each is smaller than the original, so a search ends."""
    weight = _weight(body)
    for takes in (_fewer_outputs, _small_dims, _fewer_ops, _smaller_dims, _plain_dtype):
        for what, where, smaller in takes(body):
            if smaller is not None and _weight(smaller) < weight:
                yield Smaller(what, where, smaller)


def _weight(body: Graph) -> tuple[int, int, int, int]:
    nodes = [n for n in body.nodes if not isinstance(n.op, Constant)]
    dims = sum(sum(v.type.shape) for v in body.values())
    return len(nodes), len(body.outputs), dims, len(_floats(body))


_Taken = Iterator[tuple[str, str, Graph | None]]


def _fewer_outputs(body: Graph) -> _Taken:
    if len(body.outputs) > 1:
        for kept in reversed(body.outputs):
            yield "without the other outputs", kept.name, with_outputs(body, [kept])


def _fewer_ops(body: Graph) -> _Taken:
    nodes = [n for n in body.nodes if not isinstance(n.op, Constant)]
    for node in reversed(nodes):  # what is last was added last, and is likely what broke it
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


def _small_dims(body: Graph) -> _Taken:
    """Shrink all large dims in one step, because questions about a small body are answered quickly."""
    largest = SMALL[-1]
    numbers = {d: largest for v in body.values() for d in v.type.shape if d > largest}
    if len(numbers) > 1:
        yield f"with {largest} for every larger dim", "", with_sizes(body, numbers)


def _smaller_dims(body: Graph) -> _Taken:
    sizes = sorted({d for v in body.values() for d in v.type.shape}, reverse=True)
    for small in SMALL:
        for size in sizes:
            if small < size:
                yield f"with {small} for {size}", "", with_sizes(body, {size: small})


def _plain_dtype(body: Graph) -> _Taken:
    """Use one floating-point type for all tensors: a refusal that stays is not about the mixture."""
    floats = _floats(body)
    if len(floats) > 1:
        for dtype, _ in floats.most_common():
            yield f"in {dtype.value} throughout", "", with_dtype(body, dtype)


def _floats(body: Graph) -> Counter[DType]:
    return Counter(v.type.dtype for v in body.values() if v.type.dtype.is_float)
