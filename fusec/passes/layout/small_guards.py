"""Keep numbers that guard a division or a logarithm from 0 where fp16 would round them to 0.

`x / max(norm(x), 1e-12)` is 0 for a row of zeros, and would be NaN.
"""

from __future__ import annotations

import numpy as np

from fusec.ir import DType, Graph, Node
from fusec.ops import pw

SMALLEST = 2.0**-24  # of fp16
_WIDE = (DType.F64, DType.F32)
LEAST_LIMIT = 2.0**-15  # its reciprocal is far from fp16's largest number


def keep_guards(graph: Graph, storage: DType) -> None:
    """Raise small positive lower limits and addends so that they are not 0 in fp16; other types hold them."""
    if storage is not DType.F16:
        return
    for node in list(graph.nodes):
        if node.op.name == "clip" and _vanishes(node.op.attributes["min"]):
            most = max(LEAST_LIMIT, node.op.attributes["max"])
            graph.set_op(node, pw("clip", min=LEAST_LIMIT, max=most))
        elif node.op.name == "add":
            _keep_addend(graph, node)


def _keep_addend(graph: Graph, node: Node) -> None:
    for index, value in enumerate(node.operands):
        number = value.scalar() if value.literal is not None and value.type.dtype in _WIDE else None
        if number is not None and _vanishes(number):
            smallest = np.full(value.type.shape, SMALLEST, value.type.dtype.numpy)
            raised = graph.constant(smallest, value.name, before=node)
            graph.set_input(node, index, raised)


def _vanishes(number: float) -> bool:
    return 0 < number < SMALLEST
