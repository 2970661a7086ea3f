"""Recognise attention spelled as products and a softmax, in 16 bits, where cuDNN may have an engine for it."""

from __future__ import annotations

from fusec.ir import HALVES, Graph, Node, Value, positions
from fusec.ops import Attention, AttentionTrain
from fusec.passes.base import Options, RulePass
from fusec.passes.rewriting.rewriter import Local, rewrite
from fusec.passes.rules.attention import attention


class RecogniseAttention(RulePass):
    """Replace products and a softmax by attention where they are, or will be, stored in 16 bits.

    In fp32 they stay, because their products then run on engines of true fp32.
    """

    name = "recognise_attention"
    rules = (attention,)

    def run(self, graph: Graph, options: Options) -> None:
        def apply(graph: Graph, node: Node) -> Value | None:
            halved = options.storage in HALVES or node.result.type.dtype in HALVES
            return attention.apply(graph, node) if halved else None

        rewrite(graph, [Local(attention.name, attention.equation, attention.roots, apply)], options.disable)
        _merge_with_training(graph)


def _merge_with_training(graph: Graph) -> None:
    """Merge equal attentions where one is for training: a gradient needs its sums of exponentials.

    The forward half has the op without sums, and the gradient's rule adds the op with sums.
    """
    erased: set[Node] = set()
    for node in list(graph.nodes):
        op, operands = node.op, node.operands
        if not isinstance(op, AttentionTrain) or node in erased:
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
        first = min((*same, node), key=positions(graph).__getitem__)
        joined = node if first is node else graph.insert(op, operands, before=first, origin=first.origin)
        for other in (*same, node):
            if other is joined:
                continue
            for old, new in zip(other.results, joined.results, strict=False):
                graph.replace(old, new)
            graph.erase(other)
            erased.add(other)
