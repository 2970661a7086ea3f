"""Fold inference BatchNorm into the weights of the convolution or matmul before it, plus a bias.

Elsewhere it becomes a multiplication and an addition of per-channel constants, which later passes can move. The factor
scale/sqrt(var + epsilon) is computed in float64; weights are rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fusec.ir import Graph, Node, Value
from fusec.ops import LINEAR_OPS, BatchNorm, pw
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.affine_ops import scale_outputs
from fusec.passes.rewriting.derived_constants import channel_constant, per_channel, wide
from fusec.passes.rewriting.rewriter import single_use, substitute

Vector = np.ndarray[Any, Any]


class FoldBatchNorm(Pass):
    """Fold BatchNorm into convolutions, transposed convolutions and matmuls, else into mul and add."""

    name = "fold_batchnorm"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if isinstance(node.op, BatchNorm) and (line := _line(node.op, node)) is not None:
                substitute(graph, node.result, _fold(graph, node, *line), fresh=True)


def _line(op: BatchNorm, node: Node) -> tuple[Vector, Vector] | None:
    """Return (factor, shift) of y = x * factor + shift, per channel; None if not constant or not finite."""
    known = [v.literal for v in node.operands[1:] if v.literal is not None]
    if len(known) < 4:
        return None
    scale, bias, mean, var = map(wide, known)
    if not (var + op.epsilon > 0).all():
        return None
    factor = scale / np.sqrt(var + op.epsilon)
    shift = bias - mean * factor
    return (factor, shift) if np.isfinite(factor).all() and np.isfinite(shift).all() else None


def _fold(graph: Graph, node: Node, factor: Vector, shift: Vector) -> Value:
    """Build the value that replaces the BatchNorm `node`."""
    x = node.operands[0]
    linear, bias = x, None
    if x.node is not None and x.node.op.name == "add" and single_use(x):
        bias = per_channel(x.node.operands[1], x.type.shape, 1)
        linear = x.node.operands[0] if bias is not None else x
    producer = linear.node
    scaled = None
    if producer is not None and isinstance(producer.op, LINEAR_OPS) and single_use(linear):
        scaled = scale_outputs(graph, producer, factor, axis=1, before=node)
    if scaled is None:
        factors = channel_constant(graph, node, factor, x.type, "factor")
        product = graph.add(pw("mul"), x, factors, before=node)
    else:
        product, shift = scaled, shift if bias is None else shift + bias * factor
    shifts = channel_constant(graph, node, shift, x.type, "bias")
    return graph.add(pw("add"), product, shifts, before=node)
