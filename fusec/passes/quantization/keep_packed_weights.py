"""Keep integer weights of 4 and 8 bits packed in memory where a product has few rows, because memory bounds it.

x @ ((q - z) * s) becomes packed_matmul(x, q, s, z), before constants are folded. A product of more rows reads weights
of 16 bits, which are computed at compile time, because tensor cores bound it.
"""

from __future__ import annotations

from fusec.ir import HALVES, DType, Graph, Node, TensorType
from fusec.ops import MatMul, PackedMatMul
from fusec.ops.matmul import MAX_ROWS, fits_kernel
from fusec.passes.base import Options, Pass
from fusec.passes.quantization.packed_weights import PackedWeights, packed_weights
from fusec.passes.rewriting.rewriter import substitute

TENSOR_CORES = 80  # the first compute capability whose tensor cores multiply as the kernel does


class KeepPackedWeights(Pass):
    """Multiply by integer weights that a kernel of fusec unpacks, where the model is computed in 16 bits."""

    name = "keep_packed_weights"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if not isinstance(node.op, MatMul) or node.operands[0].literal is not None:
                continue
            found = packed_weights(node.operands[1])
            if found is None or refusal(node, found, options):
                continue
            operands = found.operands(graph, node)
            if operands is not None:
                made = graph.add(PackedMatMul(found.size), node.operands[0], *operands, before=node)
                substitute(graph, node.result, made, fresh=True)


def refusal(node: Node, found: PackedWeights, options: Options) -> str:
    """Tell why a product does not read packed weights; "" if it may."""
    depth, columns = found.shape
    rows, dtype = node.result.type.size // max(1, columns), node.result.type.dtype
    if options.target.sm < TENSOR_CORES:
        return f"{options.target.name} has no tensor cores for them"
    if dtype not in HALVES and not (options.storage in HALVES and dtype in (DType.F32, DType.F64)):
        return "the product is not computed in 16 bits"
    if not 0 < rows <= MAX_ROWS:
        return f"the product has {rows} rows, not 1 to {MAX_ROWS}"
    if not fits_kernel(TensorType((columns, depth), found.codes.type.dtype), found.size):
        return f"the kernel does not read [{depth}, {columns}] in blocks of {found.size}"
    return ""
