"""Spell a product of 8-bit numbers as a product of fp16, because cuDNN's engines for 8 bits are often slower.

Numbers of 8 bits are exact in fp16, and so are their products in fp32. Sums of integers are exact below 2**24.
"""

from __future__ import annotations

from fusec.ir import DType, Graph, Node, Value
from fusec.ops import FORWARD_CONVOLUTIONS, Cast, MatMul
from fusec.ops.matmul import SUMMED_IN
from fusec.passes.partition.product_as_convolution import respelled_constant
from fusec.passes.rewriting.rewriter import NoMatch, on_copy, single_use


@on_copy
def in_halves(graph: Graph) -> None:
    """cast(product of i8, f32) -> cast(product of cast(i8, f16), f32), and f8e4m3. Weights are cast at compile time."""
    found = [node for node in graph.nodes if isinstance(node.op, (*FORWARD_CONVOLUTIONS, MatMul))]
    if len(found) != 1 or found[0].operands[0].type.dtype not in SUMMED_IN:
        raise NoMatch("not one product of 8-bit numbers")
    (product,) = found
    sums = product.result
    of_floats = sums.type.dtype is DType.F32
    if of_floats and sums in graph.outputs:
        raise NoMatch("its sums are stored", sums)
    if not of_floats and (not single_use(sums) or sums.users[0].op != Cast(DType.F32)):
        raise NoMatch("its sums are not scaled in fp32", sums)
    halves = [_halves(graph, value, product) for value in product.operands]
    types = [sums.type.with_dtype(DType.F16)]
    op = MatMul() if isinstance(product.op, MatMul) else product.op
    made = graph.insert(op, halves, before=product, types=types, origin=product.origin).result
    if of_floats:  # the sums in registers are in fp32 anyway
        made = graph.insert(Cast(DType.F32), [made], before=product, types=[sums.type], origin=product.origin).result
    graph.replace(sums, made)


def _halves(graph: Graph, value: Value, before: Node) -> Value:
    type = value.type.with_dtype(DType.F16)
    if value.literal is None:
        return graph.insert(Cast(DType.F16), [value], before=before, types=[type], origin=before.origin).result
    return respelled_constant(graph, value, "cast", type, lambda array: array.astype(type.dtype.numpy), before)
