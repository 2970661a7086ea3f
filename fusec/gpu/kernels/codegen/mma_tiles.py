"""What convolutions on tensor cores share: the size of a warp's product, and loops that are written out."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.pointwise_code import takes
from fusec.ir import Node
from fusec.ops import Relayout

PIXELS, COLUMNS, DEPTH = 16, 8, 16  # of one product of a warp
SHARED_BYTES = 48 << 10  # that a block may have without asking
PROCESSORS = 132  # of a large GPU


def follows(node: Node) -> bool:
    """Whether a node can be applied to each result on the way."""
    return isinstance(node.op, Relayout) or takes(node)


def nested(loops: Sequence[tuple[str, int]], *body: str) -> list[str]:
    """Statements within unrolled loops."""
    heads = [f"for (int {name} = 0; {name} < {size}; ++{name}) {{" for name, size in loops]
    return [*(line for head in heads for line in ("#pragma unroll", head)), *body, *["}"] * len(loops)]
