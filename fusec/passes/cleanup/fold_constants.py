"""Compute what depends on constants alone: small results immediately, large ones when first needed.

Memory stays in proportion to the model's own constants. A result that would grow beyond that stays in the graph.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from fusec.errors import ExecutionError
from fusec.graph.types import MAX_CONSTANT_BYTES
from fusec.ir import Array, Constant, Graph, Node, Op, quote
from fusec.ops import Scan
from fusec.ops.scan import HOST_STEPS
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.computations import recorded
from fusec.passes.rewriting.derived_constants import EAGER_BYTES, derive
from fusec.passes.rewriting.rewriter import erase_unused, use_count
from fusec.system.dataclass import dataclass

GROWTH = 4  # a result may be this many times its operands (int8 to f32), and all of them that many times the model
SLACK_BYTES = 1 << 24
OUTER_SHARE = (
    64  # a result of small operands, as a mask of window numbers is, may be this part of the model's constants
)


class FoldConstants(Pass):
    """Compute what depends on constants alone."""

    name = "fold_constants"

    def run(self, graph: Graph, options: Options) -> None:
        nodes = list(graph.nodes)
        held = sum(n.result.type.nbytes for n in nodes if isinstance(n.op, Constant))
        left = SLACK_BYTES + GROWTH * held
        erased = set[Node]()
        for node in nodes:
            if node in erased or not _foldable(node, held // OUTER_SHARE):
                continue
            added = sum(v.type.nbytes for v in node.results)
            if added > left:
                continue
            left -= added
            gone = _fold(graph, node)
            left += sum(v.type.nbytes for n in gone if isinstance(n.op, Constant) for v in n.results)
            erased |= set(gone)


def _foldable(node: Node, outer_bytes: int) -> bool:
    """Tell if a node's results may become constants.

    outer_bytes: allowed for results that are much larger than their operands.
    """
    if isinstance(node.op, Constant) or not node.operands or any(v.literal is None for v in node.operands):
        return False
    if isinstance(node.op, Scan) and node.op.steps > HOST_STEPS:
        return False
    result, given = sum(v.type.nbytes for v in node.results), sum(v.type.nbytes for v in node.operands)
    largest = max(v.type.nbytes for v in node.operands)  # a weight may exceed the limit, but is transposed nevertheless
    return result <= min(max(largest, MAX_CONSTANT_BYTES), max(EAGER_BYTES, outer_bytes, GROWTH * given))


def _fold(graph: Graph, node: Node) -> list[Node]:
    sources = [v.literal for v in node.operands if v.literal is not None]
    for index, result in enumerate(node.results):
        if use_count(result):
            name = sources[0] if len(sources) == 1 else result.name
            new = derive(graph, node, result.type, sources, _OneResult(node.op, index, result.name), name)
            graph.replace(result, new)
    return erase_unused(graph, node)


@recorded
@dataclass(frozen=True, eq=False)
class _OneResult:
    """Computes one result of an op from its operands' arrays. name: that of the result, for messages."""

    op: Op
    index: int
    name: str

    @property
    def key(self) -> Hashable:
        """Return what equal computations share."""
        return repr(self.op), self.index  # repr: 0.0 is not -0.0

    def __call__(self, *arrays: Array) -> Array:
        try:
            return self.op.reference(np, *arrays)[self.index]
        except (ValueError, TypeError, IndexError) as error:
            raise ExecutionError(f"constant {quote(self.name)} ({self.op.name}): {error}") from error
