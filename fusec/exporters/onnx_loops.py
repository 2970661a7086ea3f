"""Export loops: ONNX's Scan, or its Loop if no sequence is read, because a Scan reads at least one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np

from fusec.exporters.onnx_emit import Export, Exporter
from fusec.ir import Node
from fusec.ops import Scan


def _scan(e: Exporter, node: Node, x: list[str]) -> list[str]:
    op, count = cast(Scan, node.op), len(node.results)
    first = op.states + op.sequences
    body = e.body(op.body.graph, x[first:], in_loop=not op.sequences)
    if op.sequences:
        return e.several("Scan", x[:first], count, {"body": body, "num_scan_inputs": op.sequences})
    steps = e.initializer(np.array(op.steps, np.int64), e.fresh("steps"))
    return e.several("Loop", [steps, "", *x[:first]], count, {"body": body})


LOOPS: Mapping[str, Export] = {"scan": _scan}
