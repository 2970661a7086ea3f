"""Apply the batch norm of a residual where the residual is added, by a factor and a term for each channel.

The norm of a branch that makes an image smaller would write its result for the addition alone. The step that adds it
reads the norm's operand instead, which has as many bytes, and the norm computes statistics only.
"""

from __future__ import annotations

from fusec.ir import HALVES, DType, Graph, Node, Op, Value
from fusec.ops import BatchNormTrain, Cast, Pointwise, Reshape, pw
from fusec.passes.base import Options, Pass


class NormWhereAdded(Pass):
    """Replace the result of a norm that only a sum with another norm's result reads.

    batch_norm_train(x, scale, bias) = x * factor + (bias - mean * factor), factor = scale / deviation
    """

    name = "norm_where_added"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if isinstance(node.op, Pointwise) and node.op.name == "add":
                _apply_here(graph, node)


def _apply_here(graph: Graph, add: Node) -> None:
    """Apply the norm of the second operand by pointwise ops before an addition."""
    main, residual = add.operands
    if main is residual or not (_is_norm(main) and _is_norm(residual)):
        return
    norm = residual.node
    assert norm is not None
    (x, scale, bias), (_, mean, inverse) = norm.operands, norm.results
    if scale.type.dtype is not DType.F32 or bias.type.dtype is not DType.F32:
        return

    def made(op: Op, *operands: Value) -> Value:
        return graph.insert(op, operands, before=add, origin=norm.origin).result

    numbers = Reshape((1, scale.type.size, *(1,) * (x.type.rank - 2)))
    factor = made(pw("mul"), inverse, scale)
    term = made(pw("sub"), bias, made(pw("mul"), mean, factor))
    scaled = made(pw("mul"), made(Cast(DType.F32), x), made(numbers, factor))
    result = made(Cast(x.type.dtype), made(pw("add"), scaled, made(numbers, term)))
    graph.set_input(add, 1, result)


def _is_norm(value: Value) -> bool:
    """Tell if a value is the result of a norm over images in 16 bits, and nothing but a sum reads it."""
    node = value.node
    if node is None or not isinstance(node.op, BatchNormTrain) or value is not node.results[0]:
        return False
    return value.type.dtype in HALVES and value.type.rank > 2 and len(value.uses) == 1
