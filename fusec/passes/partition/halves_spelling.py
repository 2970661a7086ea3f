"""Spell a product of 8-bit integers as a product of fp16, because cuDNN's integer engines are often slower.

Integers of 8 bits are exact in fp16, and so are their products in fp32. The sums are exact below 2**24.
"""

from __future__ import annotations

from fusec.ir import DType, Graph, Node, Value
from fusec.ops import Cast, Conv, MatMul
from fusec.passes.partition.product_as_convolution import respelled_constant
from fusec.passes.rewriting.rewriter import NoMatch, on_copy, single_use


@on_copy
def in_halves(graph: Graph) -> None:
    """cast(product of i8, f32) -> cast(product of cast(i8, f16), f32). Weights are converted at compile time."""
    found = [node for node in graph.nodes if isinstance(node.op, (Conv, MatMul))]
    if len(found) != 1 or found[0].operands[0].type.dtype is not DType.I8:
        raise NoMatch("not one product of 8-bit integers")
    (product,) = found
    sums = product.result
    if not single_use(sums) or sums.users[0].op != Cast(DType.F32):
        raise NoMatch("its sums are not scaled in fp32", sums)
    halves = [_halves(graph, value, product) for value in product.operands]
    types = [sums.type.with_dtype(DType.F16)]
    made = graph.insert(product.op, halves, before=product, types=types, origin=product.origin)
    graph.replace(sums, made.result)


def _halves(graph: Graph, value: Value, before: Node) -> Value:
    type = value.type.with_dtype(DType.F16)
    if value.literal is None:
        return graph.insert(Cast(DType.F16), [value], before=before, types=[type], origin=before.origin).result
    return respelled_constant(graph, value, "cast", type, lambda array: array.astype(type.dtype.numpy), before)
