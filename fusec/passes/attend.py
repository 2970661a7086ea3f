"""Find the attention a model spells out, where cuDNN may have an engine for it: in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fusec.ir import DType, Graph, Node, Value
from fusec.passes.base import Options
from fusec.passes.rewrite import Local, Rewriter, rewrite
from fusec.passes.rules.attention import RULES, attention

HALVES = (DType.F16, DType.BF16)


@dataclass(frozen=True)
class Attend:
    """Attention spelt out in products and a softmax, where it is or will be stored in 16 bits.

    In fp32 it stays as it is: its products then go to engines of true fp32.
    """

    name: ClassVar[str] = "attend"
    rules: ClassVar[tuple[Rewriter, ...]] = RULES

    def run(self, graph: Graph, options: Options) -> None:
        def apply(graph: Graph, node: Node) -> Value | None:
            halved = options.storage in HALVES or node.result.type.dtype in HALVES
            return attention.apply(graph, node) if halved else None

        rewrite(graph, [Local(attention.name, attention.equation, attention.roots, apply)], options.disable)
