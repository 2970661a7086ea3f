"""What a GPU is, as data: the properties cuDNN plans by, and the figures the cost model needs."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from fusec.errors import TargetError

CPU = "cpu"  # the target that is no GPU: NumPy, op by op
DEFAULT = "h200"  # what stands for a GPU where there is none


@dataclass(frozen=True)
class Target:
    """A GPU that plans are made for.

    `properties` is the JSON text of cuDNN's device properties. memory_bandwidth is in bytes/s, flops in
    operations/s by precision (dense), launch_us what one kernel launch costs inside a CUDA graph.
    `derived` says that the figures come from data sheets (`source`), not from a device.
    """

    name: str
    sm: int  # compute capability, 90 for 9.0
    properties: str
    memory_bandwidth: float
    flops: Mapping[str, float]
    launch_us: float
    source: str
    derived: bool

    @property
    def device_name(self) -> str:
        return str(json.loads(self.properties)["deviceName"])

    @property
    def memory_bytes(self) -> int:
        """Of the whole GPU."""
        return int(json.loads(self.properties)["totalGlobalMem"])

    @property
    def digest(self) -> str:
        """Identifies the properties; part of the key of every remembered answer."""
        return hashlib.sha256(f"{self.sm} {self.properties}".encode()).hexdigest()


def names() -> list[str]:
    """The targets there are, by compute capability."""
    files = [
        f.name.removesuffix(".json") for f in resources.files("fusec.targets").iterdir() if f.name.endswith(".json")
    ]
    return sorted(files, key=lambda name: (_read(name)["sm"], name))


@functools.cache
def load(name: str) -> Target:
    """Load the target of that name; TargetError listing the known ones. `cpu` has the figures of the default."""
    if name == CPU:
        return replace(load(DEFAULT), name=CPU)
    if name not in names():
        raise TargetError(f"no target {name!r}; targets are {', '.join(names())}")
    data = _read(name)
    # memoryBusWidth: cuDNN 9.28 wants the key, 9.19 takes no notice of it
    properties = {**data["properties"], "memoryBusWidth": data["memory_bus_width_bits"]}
    return Target(
        name=data["name"],
        sm=data["sm"],
        properties=json.dumps(properties, sort_keys=True),
        memory_bandwidth=data["memory_bandwidth"],
        flops=data["flops"],
        launch_us=data["launch_us"],
        source=data["source"],
        derived=data["derived"],
    )


def _read(name: str) -> dict[str, Any]:
    return json.loads((resources.files("fusec.targets") / f"{name}.json").read_text(encoding="utf-8"))
