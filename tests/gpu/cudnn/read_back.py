"""Read serialized plans without a GPU."""

from __future__ import annotations

from fusec.gpu.cudnn.without_driver.deviceless import bring_up
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.targets.target import Target


def workspace_bytes(graph: CudnnGraph, blob: bytes, target: Target) -> int:
    """Return the workspace of a serialized plan. Raises an error of DECLINED for a damaged plan."""
    bring_up(target.sm)
    from fusec.gpu.cudnn.plans.emit import emit  # imports cudnn, which needs the driver library loaded

    pygraph = emit(graph, target=target)
    pygraph.deserialize(list(blob))
    return int(pygraph.get_workspace_size())
