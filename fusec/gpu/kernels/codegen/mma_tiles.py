"""Define the tiles of products on tensor cores, and the ops that may follow them."""

from __future__ import annotations

from fusec.gpu.kernels.codegen.pointwise_code import can_generate
from fusec.ir import Node
from fusec.ops import Relayout

PIXELS, COLUMNS, DEPTH = 16, 8, 16  # of one product of a warp


def can_follow(node: Node) -> bool:
    """Tell if a node can be applied to each result before it is stored."""
    return isinstance(node.op, Relayout) or can_generate(node)
