"""Let tensor cores of Hopper add products of fp8 with fewer bits, where the caller lets rounding change for speed."""

from __future__ import annotations

from fusec.ir import DType, Graph, Node, Value
from fusec.ops import MatMul
from fusec.passes.base import FASTEST, Options, RulePass
from fusec.passes.quantization.run_in_fp8 import CAPABILITY
from fusec.passes.rewriting.rewriter import NoMatch, local

# A sum keeps 14 bits, and each product that is added loses one in the last place at most. For numbers of one sign the
# sum is too small by 2**-14 for each product. Up to this many products that is at most 2**-4, as far as the rounding of
# one number to f8e4m3 goes.
MOST_PRODUCTS = 1024
NEXT_CAPABILITY = 100  # of the first GPUs whose tensor cores add in fp32


@local("matmul", equation="matmul(q, p) = matmul(q, p) with sums of 14 bits, for q and p of f8e4m3 and few products")
def fast_sums(graph: Graph, node: Node) -> Value | None:
    """Add up to 1024 products of f8e4m3 without moving the sums to fp32."""
    x = node.operands[0].type
    if x.dtype is not DType.F8E4M3:
        raise NoMatch(f"a product of {x.dtype.value}", node.operands[0])
    if node.op == MatMul(fast_sums=True):
        raise NoMatch("has fast sums", node.result)
    if x.shape[-1] > MOST_PRODUCTS:
        raise NoMatch(f"adds {x.shape[-1]} products, more than {MOST_PRODUCTS}", node.result)
    return graph.add(MatMul(fast_sums=True), *node.operands, before=node)


class FastFp8Sums(RulePass):
    """Add products of fp8 with fewer bits on Hopper, with `rounding="fastest"` alone."""

    name = "fast_fp8_sums"
    rules = (fast_sums,)

    def run(self, graph: Graph, options: Options) -> None:
        if options.rounding == FASTEST and CAPABILITY <= options.target.sm < NEXT_CAPABILITY:
            super().run(graph, options)
