"""Spell a product with packed weights as a product of floats, so that cuDNN can compete with the kernel."""

from __future__ import annotations

from functools import partial

import numpy as np

from fusec.ir import Array, Graph, TensorType
from fusec.ops import MatMul, PackedMatMul
from fusec.passes.rewriting.computations import recorded
from fusec.passes.rewriting.derived_constants import derive
from fusec.passes.rewriting.rewriter import NoMatch, on_copy


@on_copy
def unpacked(graph: Graph) -> None:
    """packed_matmul(x, codes, scales) -> matmul(x, w). Weights are dequantised at compile time, to the type of x."""
    found = [node for node in graph.nodes if isinstance(node.op, PackedMatMul)]
    if len(found) != 1:
        raise NoMatch("not one product with packed weights")
    (product,) = found
    assert isinstance(product.op, PackedMatMul)
    x, *packed = product.operands
    sources = [v.literal for v in packed if v.literal is not None]
    if len(sources) < len(packed):
        raise NoMatch("its weights are not constant", packed[0])
    columns, depth = packed[0].type.shape
    weights = TensorType((depth, columns), x.type.dtype)
    w = derive(graph, product, weights, sources, partial(_weights, op=product.op), sources[0])
    made = graph.insert(MatMul(), [x, w], before=product, types=[product.result.type], origin=product.origin)
    graph.replace(product.result, made.result)


@recorded
def _weights(*packed: Array, op: PackedMatMul) -> Array:
    return op.weights(np, *packed).T
