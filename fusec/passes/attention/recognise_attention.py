"""Recognise attention spelled as products and a softmax, in 16 bits, where cuDNN may have an engine for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fusec.ir import HALVES, Graph, Node, Value, positions
from fusec.ops import Attention, AttentionTrain
from fusec.passes.base import Options
from fusec.passes.rewriting.rewriter import Local, Rewriter, rewrite
from fusec.passes.rules.attention import RULES, attention


@dataclass(frozen=True)
class RecogniseAttention:
    """Replace products and a softmax by attention where they are, or will be, stored in 16 bits.

    In fp32 they stay, because their products then run on engines of true fp32.
    """

    name: ClassVar[str] = "attend"
    rules: ClassVar[tuple[Rewriter, ...]] = RULES

    def run(self, graph: Graph, options: Options) -> None:
        def apply(graph: Graph, node: Node) -> Value | None:
            halved = options.storage in HALVES or node.result.type.dtype in HALVES
            return attention.apply(graph, node) if halved else None

        rewrite(graph, [Local(attention.name, attention.equation, attention.roots, apply)], options.disable)
        _keep_sums(graph)


def _keep_sums(graph: Graph) -> None:
    """Merge the forward attention with the one that a gradient computes for its sums."""
    joined_already: set[Node] = set()
    for node in list(graph.nodes):
        op, operands = node.op, node.operands
        if not isinstance(op, AttentionTrain) or node in joined_already:
            continue
        same = [
            user
            for user in operands[0].users
            if user.operands == operands
            and (isinstance(user.op, Attention) or (user.op == op and user is not node))
            and (user.op.attributes["scale"], user.op.attributes["causal"]) == (op.scale, op.causal)
            and not (user.op.attributes.get("hides") or user.op.attributes.get("guarded"))
        ]
        if not same:
            continue
        place = positions(graph)
        first = min(same, key=place.__getitem__)
        if place[first] > place[node]:
            first = node
        joined = node
        if first is not node:
            joined = graph.insert(op, operands, before=first, origin=first.origin)
        for other in dict.fromkeys((*same, node)):
            if other is joined:
                continue
            for old, new in zip(other.results, joined.results, strict=False):
                graph.replace(old, new)
            graph.erase(other)
            joined_already.add(other)
