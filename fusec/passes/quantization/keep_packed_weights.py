"""Keep integer weights of 4 and 8 bits packed in memory where a product has few rows, because memory bounds it.

x @ ((q - z) * s) becomes packed_matmul(x, q, s, z), before constants are folded. A product of more rows reads weights
of 16 bits, which are made at compile time: there tensor cores bound it.
"""

from __future__ import annotations

from fusec.ir import HALVES, DType, Graph, Node, TensorType, Value
from fusec.ops import MatMul, PackedMatMul
from fusec.ops.packed_matmul import MAX_ROWS, fits_kernel
from fusec.passes.base import Options, Pass
from fusec.passes.quantization.packed_weights import packed_weights
from fusec.passes.rewriting.rewriter import substitute

TENSOR_CORES = 80  # the first compute capability whose tensor cores multiply as the kernel does


class KeepPackedWeights(Pass):
    """Multiply by integer weights that a kernel of fusec unpacks, where the model is computed in 16 bits."""

    name = "keep_packed_weights"

    def run(self, graph: Graph, options: Options) -> None:
        if options.target.sm < TENSOR_CORES:
            return
        for node in list(graph.nodes):
            if isinstance(node.op, MatMul) and _in_halves(node, options.storage):
                made = _packed(graph, node)
                if made is not None:
                    substitute(graph, node.result, made, fresh=True)


def _in_halves(node: Node, storage: DType) -> bool:
    dtype = node.result.type.dtype
    return dtype in HALVES or (storage in HALVES and dtype in (DType.F32, DType.F64))


def _packed(graph: Graph, node: Node) -> Value | None:
    x, weight = node.operands
    if x.literal is not None or not 0 < node.result.type.size // max(1, weight.type.shape[-1]) <= MAX_ROWS:
        return None
    found = packed_weights(weight)
    if found is None or not fits_kernel(TensorType(found.shape[::-1], found.codes.type.dtype), found.size):
        return None
    operands = found.operands(graph, node)
    return None if operands is None else graph.add(PackedMatMul(found.size), x, *operands, before=node)
