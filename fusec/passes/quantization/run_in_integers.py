"""Run quantised products in integers: move scales past ops that commute with them, then multiply 8-bit integers."""

from __future__ import annotations

from fusec.ir import DType, Graph
from fusec.passes.base import ROUND_ACTIVATIONS, Options, RulePass
from fusec.passes.quantization import integer_products, move_rounding, move_scales
from fusec.passes.quantization.float_activations import keep_floats


class RunInIntegers(RulePass):
    """Multiply quantised operands as integers, and move quantisation next to such products."""

    name = "run_in_integers"
    rules = (*move_rounding.RULES, *move_scales.RULES, *integer_products.RULES)

    def run(self, graph: Graph, options: Options) -> None:
        if ROUND_ACTIVATIONS in options.disable:
            keep_floats(graph)
        if options.storage is not DType.F32 and not options.as_source:
            keep_floats(graph, (DType.I16, DType.U16))
        super().run(graph, options)
