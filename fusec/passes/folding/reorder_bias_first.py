"""Order the terms of a sum as cuDNN fuses them: convolution, then bias, then residual.

Reassociating a sum is exact up to rounding; integers stay as they are.
"""

from __future__ import annotations

from fusec.ir import Graph, Node, Value
from fusec.ops import LINEAR_OPS, pw
from fusec.passes.base import RulePass
from fusec.passes.folding.fold_scales import merge_constants
from fusec.passes.rewriting.rewriter import NoMatch, local, made_by, single_use


def _is_linear(value: Value) -> bool:
    return made_by(value, *LINEAR_OPS) is not None and single_use(value)


def _is_biased(value: Value) -> bool:
    """Return True for a convolution or product plus a constant, used once."""
    node = value.node
    if node is None or node.op.name != "add" or not single_use(value):
        return False
    return node.operands[1].literal is not None and _is_linear(node.operands[0])


@local("add", equation="add(add(conv, z), b) = add(add(conv, b), z) for a constant b")
def _bias_before_residual(graph: Graph, node: Node) -> Value | None:
    total, b = node.operands
    inner = total.node
    if b.literal is None or inner is None or inner.op.name != "add" or not total.type.dtype.is_float:
        return None
    if not single_use(total) or inner.operands[1].literal is not None or total.type != node.result.type:
        raise NoMatch("the sum is used elsewhere too, or has no residual", total)
    for conv, z in (inner.operands, reversed(inner.operands)):
        if not (_is_linear(conv) or _is_biased(conv)) or conv.type != total.type:
            continue
        biased = graph.insert(node.op, [conv, b], before=node, types=[conv.type]).result
        return graph.add(node.op, biased, z, before=node)
    raise NoMatch("neither term is a convolution or matrix product", total)


@local("add", equation="add(z, conv) = add(conv, z)")
def _linear_first(graph: Graph, node: Node) -> Value | None:
    z, conv = node.operands
    if conv.literal is not None or _is_linear(z) or _is_biased(z) or not (_is_linear(conv) or _is_biased(conv)):
        return None
    return graph.add(pw("add"), conv, z, before=node)


class ReorderBiasFirst(RulePass):
    """Order the terms of a sum as cuDNN fuses them."""

    name = "reorder_bias_first"
    rules = (_bias_before_residual, merge_constants, _linear_first)
