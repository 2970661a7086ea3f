"""Pointwise ops over views of what a product makes, before the views: there they are its epilogue.

f(view(x), y) = view(f(x, unview(y))), where the views are free both ways as tensors lie: a residual that lies channels
last beside rows of features. Behind the layout, which says how they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from fusec.ir import Graph, Node, TensorType, Value
from fusec.ops import Conv, ConvTranspose, MatMul, Pointwise, Reshape, Transpose
from fusec.passes.base import Options
from fusec.passes.layout.io_layout import settled
from fusec.passes.rewriting.affine_ops import single_use
from fusec.passes.rewriting.rewriter import substitute
from fusec.schedule.aliasing import is_view, operand_order, same_storage

PRODUCTS = (Conv, ConvTranspose, MatMul)


@dataclass(frozen=True)
class ViewsBehind:
    """See the module."""

    name: ClassVar[str] = "views_behind"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if isinstance(node.op, Pointwise) and len(node.operands) > 1:
                for value in dict.fromkeys(node.operands):
                    if _moved(graph, node, value):
                        break


def _moved(graph: Graph, node: Node, value: Value) -> bool:
    """Whether the op came before the views that one of its operands is."""
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
    """The reshapes and transposes that a value is by, the last first, if nothing else reads them and none copies."""
    views: list[Node] = []
    while (node := value.node) is not None and isinstance(node.op, (Reshape, Transpose)):
        if not single_use(value) or not is_view(node):
            break
        views.append(node)
        value = node.operands[0]
    return views


def _is_product(value: Value) -> bool:
    """Whether a value is a product, or what pointwise ops make of one that nothing else reads."""
    node = value.node
    if node is None or isinstance(node.op, PRODUCTS):
        return node is not None
    return isinstance(node.op, Pointwise) and any(single_use(v) and _is_product(v) for v in node.operands)


def _is_number(value: Value, beside: Value) -> bool:
    return value.type.size == 1 and value.type.rank <= beside.type.rank


def _unviewed(value: Value, views: Sequence[Node]) -> list[TensorType] | None:
    """The types of a value by the inverses of views, if these are free and it then lies as what was viewed does."""
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
        type = type.with_order(settled(type, order))
        found.append(type)
    return found if same_storage(type.shape, type.order, source.order) else None


def _inverse(view: Node) -> Reshape | Transpose:
    if isinstance(view.op, Transpose):
        perm = view.op.perm
        return Transpose(tuple(sorted(range(len(perm)), key=perm.__getitem__)))
    return Reshape(view.operands[0].type.shape)
