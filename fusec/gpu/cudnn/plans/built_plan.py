"""Read a serialized plan on this machine's GPU, and run a plan that cuDNN has finalised."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import cudnn
import cupy
import numpy as np

from fusec.errors import ExecutionError
from fusec.gpu.cudnn.plans.backend_plan import READS_WITHOUT_HANDLE
from fusec.gpu.cudnn.plans.error_messages import reason_of
from fusec.gpu.cudnn.plans.plan_list import DECLINED
from fusec.system.dataclass import dataclass


@dataclass(frozen=True, eq=False)
class BuiltPlan:
    """Plan of a frontend graph, at an index of its list.

    scalars: host memory of scalars passed by value, by uid
    blob: the serialized form that the plan was read from, if any
    """

    pygraph: Any
    index: int
    workspace_bytes: int
    scalars: Mapping[int, np.ndarray[Any, Any]]
    blob: bytes | None = None

    def addresses(self, buffers: Mapping[int, int]) -> dict[int, int]:
        """Return what `execute` takes: device addresses by uid, and host addresses of scalars passed by value."""
        return {**buffers, **{uid: scalar.ctypes.data for uid, scalar in self.scalars.items()}}

    def execute(self, addresses: dict[int, int], workspace: int, handle: Any) -> None:
        """Queue the plan on the handle's stream, with scratch memory at the address `workspace`."""
        self.pygraph.execute_plan_at_index(addresses, workspace, self.index, handle)


def revive(blob: bytes, handle: Any) -> Any:
    """Read a serialized plan as a frontend graph that executes by uid.

    A precompiled plan is read in less than a millisecond. Only for a blob that is trusted, because it holds machine
    code. Raises ExecutionError if cuDNN does not accept it.
    """
    properties = _properties(cudnn.backend_version(), int(cupy.cuda.runtime.getDevice()))
    if properties is not None:
        # Reading for a handle runs the plan once within a capture that is thrown away, which takes several times as
        # long as the rest. Reading for the device does not.
        graph = cudnn.pygraph(device_property=properties)
        try:
            graph.deserialize(list(blob))
            return graph
        except DECLINED:  # reading for the handle may work, or gives the reason
            pass
    graph = cudnn.pygraph()
    try:
        graph.deserialize(handle, list(blob))
    except DECLINED as error:
        raise ExecutionError(f"cuDNN does not read a serialized plan: {', '.join(reason_of(error))}") from error
    return graph


@cache
def _properties(version: int, device: int) -> Any:
    """Return cuDNN's description of a GPU; None for a version that does not read plans by it."""
    return cudnn.create_device_properties(device) if version >= READS_WITHOUT_HANDLE else None
