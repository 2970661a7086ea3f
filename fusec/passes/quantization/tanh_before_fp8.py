"""Compute gelu by tanh before a rounding to fp8, where the caller lets rounding change for speed."""

from __future__ import annotations

from fusec.ir import DType, Graph, Node, Value
from fusec.ops import pw
from fusec.passes.base import FASTEST, Options, RulePass
from fusec.passes.rewriting.rewriter import NoMatch, local, single_use

_ROUNDING = (("div", "mul"), ("clip",), ("cast",))  # ops that scale, limit and round, in order


@local("gelu", equation="q(gelu(x)) = q(gelu_tanh(x)) for a rounding q to f8e4m3; they differ by 5e-4 at most before q")
def gelu_before_fp8(graph: Graph, node: Node) -> Value | None:
    """Use the form that cuBLASLt has, so that it runs the product, gelu and the rounding as one call."""
    value = node.result
    for names in (("cast",), *_ROUNDING):
        if not single_use(value):
            raise NoMatch("used elsewhere too", value)
        user = value.users[0]
        if user.op.name not in names and names == ("cast",) and value is node.result:
            continue  # fp32 needs no cast before the scale
        if user.op.name not in names:
            raise NoMatch("not rounded to f8e4m3", value)
        value = user.result
    if value.type.dtype is not DType.F8E4M3:
        raise NoMatch(f"rounded to {value.type.dtype.value}", value)
    return graph.add(pw("gelu_tanh"), node.operands[0], before=node)


class TanhBeforeFp8(RulePass):
    """Replace gelu by its tanh form where only a rounding to fp8 reads it, with `rounding="fastest"` alone."""

    name = "tanh_before_fp8"
    rules = (gelu_before_fp8,)

    def run(self, graph: Graph, options: Options) -> None:
        if options.rounding == FASTEST:
            super().run(graph, options)
