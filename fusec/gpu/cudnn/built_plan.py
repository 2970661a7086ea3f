"""An execution plan that cuDNN has finalised, ready to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class BuiltPlan:
    """Plan of a frontend graph, which owns it, at an index. blob: the serialized form that it was read from, if any."""

    pygraph: Any
    index: int
    workspace_bytes: int
    scalars: Mapping[int, np.ndarray[Any, Any]]  # passed by value, from host memory
    blob: bytes | None = None

    def addresses(self, buffers: Mapping[int, int]) -> dict[int, int]:
        """Return what `execute` takes: device addresses by uid, and host addresses of scalars passed by value."""
        return {**buffers, **{uid: scalar.ctypes.data for uid, scalar in self.scalars.items()}}

    def execute(self, addresses: dict[int, int], workspace: int, handle: Any) -> None:
        """Queue the plan on the handle's stream, with scratch memory at the address `workspace`."""
        self.pygraph.execute_plan_at_index(addresses, workspace, self.index, handle)
