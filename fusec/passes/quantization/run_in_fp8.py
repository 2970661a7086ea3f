"""Multiply quantised operands as floats of 8 bits (E4M3), on GPUs whose tensor cores do.

The float product of q * s and p * t is that of q and p, times s * t. cuBLASLt runs it with the scale, a bias, an
activation, a residual and the next rounding as one call (fusec.gpu.cublaslt).
"""

from __future__ import annotations

from dataclasses import replace

from fusec.ir import DType, Graph, Node, Value, quote
from fusec.ops import MatMul, pw
from fusec.passes.base import Options, RulePass
from fusec.passes.quantization.affine_values import dequantise, dequantised
from fusec.passes.quantization.move_scales import moved
from fusec.passes.rewriting.rewriter import NoMatch, local

FLOATS = (DType.F8E4M3,)
CAPABILITY = 90  # of the first GPUs for which fusec multiplies them
MULTIPLE = 16  # of columns and of the inner dim: cuBLASLt reads rows of such numbers of bytes


@local("expand", "reshape", "slice", "transpose", equation="f(q*s) = f(q)*s for q of f8e4m3 and f that moves elements")
def float8_after(graph: Graph, node: Node) -> Value | None:
    """Move floats of 8 bits instead of wider ones, so that they meet their product."""
    found = dequantised(node.operands[0], FLOATS)
    if found is None:
        raise NoMatch("not dequantised from f8e4m3", node.operands[0])
    return dequantise(graph, moved(graph, node, found), node)


@local("matmul", equation="matmul(q*s, p*t) = matmul(q, p)*(s*t) for q and a constant p of f8e4m3, sums in f32")
def float8_matmul(graph: Graph, node: Node) -> Value | None:
    """Multiply by a constant matrix, which has one scale or a scale for each column.

    Exact up to the rounding of fp32, as the float product is. The sums are fp32 on a GPU too, but its tensor cores
    add up numbers of fewer bits (docs/hazards.md).
    """
    x, w = (dequantised(v, FLOATS) for v in node.operands)
    if x is None or w is None:
        raise NoMatch("its operands are not both quantised to f8e4m3", node.operands[0 if x is None else 1])
    if w.q.literal is None or w.q.type.rank != 2 or x.q.literal is not None:
        raise NoMatch(f"{quote(w.q.name)} is no constant matrix", w.q)
    if x.scale.number is None or w.scale.axis not in (None, 1) or not (x.symmetric and w.symmetric):
        raise NoMatch("a scale for each row, or a zero point", node.result)
    if any(d % MULTIPLE or not d for d in w.q.type.shape) or not node.result.type.size:
        raise NoMatch(f"{w.q.type.shape[0]} rows and {w.q.type.shape[1]} columns: not multiples of {MULTIPLE}", w.q)
    rank = node.result.type.rank
    sums = graph.add(MatMul(), x.q, w.q, before=node)
    along = replace(w.scale, axis=None if w.scale.axis is None else rank - 1)
    scale = graph.constant(x.scale.times(along).array(rank), "scale", node)
    return graph.add(pw("mul"), sums, scale, before=node)


class RunInFp8(RulePass):
    """Multiply operands that are quantised to E4M3 as such, on Hopper and newer GPUs."""

    name = "run_in_fp8"
    rules = (float8_after, float8_matmul)

    def run(self, graph: Graph, options: Options) -> None:
        if options.target.sm >= CAPABILITY:
            super().run(graph, options)
