"""Move pointwise ops before the views of a product's result, where they can become its epilogue.

f(view(x), y) = view(f(x, unview(y))), where the views copy nothing in either direction: a residual stored channels
last next to rows of features, for example. The pass runs after the layout, because that decides the memory orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.ir import Graph, Node, TensorType, Value
from fusec.ops import LINEAR_OPS, Pointwise, Reshape, Transpose
from fusec.passes.base import Options, Pass
from fusec.passes.layout.io_layout import normal_order
from fusec.passes.rewriting.rewriter import single_use, substitute
from fusec.schedule.aliasing import is_view, operand_order, same_storage


class EpilogueBeforeViews(Pass):
    """Move pointwise ops before views of a product."""

    name = "epilogue_before_views"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if isinstance(node.op, Pointwise) and len(node.operands) > 1:
                for value in dict.fromkeys(node.operands):
                    if _moved(graph, node, value):
                        break


def _moved(graph: Graph, node: Node, value: Value) -> bool:
    """Move the op before the views of one of its operands; return False if that cannot be done."""
    views = _views(value)
    if not views or node.operands.count(value) > 1:
        return False
    source, result = views[-1].operands[0], node.result.type
    if not (single_use(source) and _is_product(source)) or value.type != result or source.type.within:
        return False
    others = {v: _unviewed(v, views) for v in node.operands if v is not value and not _is_number(v, source)}
    if not others or any(types is None or (single_use(v) and _is_product(v)) for v, types in others.items()):
        return False
    before = {value: source}
    for other, types in others.items():
        before[other] = other
        for view, type in zip(views, types or (), strict=True):
            before[other] = graph.insert(_inverse(view), [before[other]], before=node, types=[type]).result
    operands = [before.get(v, v) for v in node.operands]
    found = graph.insert(node.op, operands, before=node, types=[source.type], origin=node.origin).result
    for view in reversed(views):
        found = graph.insert(view.op, [found], before=node, types=[view.result.type]).result
    substitute(graph, node.result, found, fresh=True)
    return True


def _views(value: Value) -> list[Node]:
    """List the reshapes and transposes that make a value, the last first, if none copies or has another reader."""
    views: list[Node] = []
    while (node := value.node) is not None and isinstance(node.op, (Reshape, Transpose)):
        if not single_use(value) or not is_view(node):
            break
        views.append(node)
        value = node.operands[0]
    return views


def _is_product(value: Value) -> bool:
    """Return True for a product, or for pointwise ops on one that nothing else reads."""
    node = value.node
    if node is None or isinstance(node.op, LINEAR_OPS):
        return node is not None
    return isinstance(node.op, Pointwise) and any(single_use(v) and _is_product(v) for v in node.operands)


def _is_number(value: Value, operand: Value) -> bool:
    return value.type.size == 1 and value.type.rank <= operand.type.rank


def _unviewed(value: Value, views: Sequence[Node]) -> list[TensorType] | None:
    """Return the types of a value by the inverse views, if these are free and end in the source's memory order."""
    type, source = value.type, views[-1].operands[0].type
    if type.shape != views[0].result.type.shape or type.within:
        return None
    found: list[TensorType] = []
    for view in views:
        order = operand_order(view, type)
        if order is None:
            return None
        shape = view.operands[0].type.shape
        type = replace(type, shape=shape, order=())
        type = type.with_order(normal_order(type, order))
        found.append(type)
    return found if same_storage(type.shape, type.order, source.order) else None


def _inverse(view: Node) -> Reshape | Transpose:
    if isinstance(view.op, Transpose):
        perm = view.op.perm
        return Transpose(tuple(sorted(range(len(perm)), key=perm.__getitem__)))
    return Reshape(view.operands[0].type.shape)
