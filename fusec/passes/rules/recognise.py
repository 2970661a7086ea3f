"""Recognise activations, norms and softmax that are spelled as smaller ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fusec.ir import Graph
from fusec.passes.base import Options
from fusec.passes.rewriting.rewriter import Rewriter, rewrite
from fusec.passes.rules import activation, casts, norm, rotary

RULES: tuple[Rewriter, ...] = (*norm.RULES, *activation.RULES, *rotary.RULES, *casts.RULES)


@dataclass(frozen=True)
class Recognise:
    """Recognise activations, norms and softmax that are spelled as smaller ops."""

    name: ClassVar[str] = "recognise"
    rules: ClassVar[tuple[Rewriter, ...]] = RULES

    def run(self, graph: Graph, options: Options) -> None:
        rewrite(graph, RULES, options.disable)
