"""Sizes and loops that kernels on tensor cores share."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.pointwise_code import can_generate
from fusec.ir import Node
from fusec.ops import Relayout

PIXELS, COLUMNS, DEPTH = 16, 8, 16  # of one product of a warp


def can_follow(node: Node) -> bool:
    """Tell if a node can be applied to each result before it is stored."""
    return isinstance(node.op, Relayout) or can_generate(node)


def unrolled_loops(loops: Sequence[tuple[str, int]], *body: str) -> list[str]:
    """Generate statements within unrolled loops.

    loops: name and size, the outermost first.
    """
    heads = [f"for (int {name} = 0; {name} < {size}; ++{name}) {{" for name, size in loops]
    return [*(line for head in heads for line in ("#pragma unroll", head)), *body, *["}"] * len(loops)]
