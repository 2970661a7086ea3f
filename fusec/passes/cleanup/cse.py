"""Merge equal nodes: the same op with the same attributes on the same values."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from fusec.ir import Constant, Graph, Node, Op
from fusec.passes.base import Options
from fusec.passes.rewriting.derived_constants import EAGER_BYTES


@dataclass(frozen=True)
class EliminateCommonSubexpressions:
    """Compute equal things once (common subexpression elimination)."""

    name: ClassVar[str] = "cse"

    def run(self, graph: Graph, options: Options) -> None:
        first: dict[Hashable, Node] = {}
        for node in list(graph.nodes):
            earlier = first.setdefault(_key(node), node)
            if earlier is node:
                continue
            for old, new in zip(node.results, earlier.results, strict=True):
                graph.replace(old, new)
            graph.erase(node)


def _key(node: Node) -> Hashable:
    types = tuple(v.type for v in node.results)
    if isinstance(node.op, Constant):
        literal = node.op.literal
        # comparing bytes, not numbers, keeps 0.0 and -0.0 apart; large payloads are not read for it
        small = literal.type.nbytes <= EAGER_BYTES
        return (types, literal.digest) if small else (types, literal)
    operands = [id(v) for v in node.operands]
    return (_attributes(node.op), tuple(sorted(operands) if node.op.commutative else operands), types)


def _attributes(op: Op) -> Hashable:
    """Return a key of the op that tells zeros apart by sign: clip(min=0.0) is not clip(min=-0.0)."""
    signs = tuple(str(v) for v in op.attributes.values() if isinstance(v, float) and v == 0.0)
    return (op, signs)
