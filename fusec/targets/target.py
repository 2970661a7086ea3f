"""Describe a GPU as data: the properties that cuDNN plans by, and the figures of the cost model."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

from fusec.errors import TargetError
from fusec.system.dataclass import dataclass

CPU = "cpu"  # the target without a GPU: NumPy runs each op
DEFAULT = "h200"  # the target on a machine without a GPU
# Not used for dynamic shared memory, because the sources of kernels declare some static shared memory, too. It depends
# on these sources alone, so it is the same for every GPU.
STATIC_BYTES = 3 << 10


@dataclass(frozen=True)
class Target:
    """A GPU model to plan for.

    name: name of the file in fusec/targets.
    sm: compute capability, 90 for 9.0.
    properties: JSON text of cuDNN's device properties.
    memory_bandwidth: bytes/s.
    flops: operations/s by precision (dense).
    launch_us: microseconds that one kernel launch costs inside a CUDA graph.
    source: where the figures come from.
    derived: True if the figures come from data sheets, not from a device.
    """

    name: str
    sm: int
    properties: str
    memory_bandwidth: float
    flops: Mapping[str, float]
    launch_us: float
    source: str
    derived: bool

    @property
    def device_name(self) -> str:
        return str(self._property("deviceName"))

    @property
    def memory_bytes(self) -> int:
        """Return the memory of the whole GPU."""
        return int(self._property("totalGlobalMem"))

    @property
    def processors(self) -> int:
        """Return the number of streaming multiprocessors."""
        return int(self._property("multiProcessorCount"))

    @property
    def shared_memory_bytes(self) -> int:
        """Return the shared memory that one block may use."""
        return int(self._property("maxSharedMemoryPerBlockOptin"))

    @property
    def l2_bytes(self) -> int:
        """Return the size of the second-level cache."""
        return int(self._property("l2CacheSize"))

    def _property(self, name: str) -> Any:
        return json.loads(self.properties)[name]

    @property
    def digest(self) -> str:
        """Return a digest of the properties, which is part of the key of every cached verdict."""
        return hashlib.sha256(f"{self.sm} {self.properties}".encode()).hexdigest()

    @property
    def figures_digest(self) -> str:
        """Return a digest of all figures, on which the candidates of a step and their estimated costs depend."""
        figures = [self.digest, self.memory_bandwidth, dict(self.flops), self.launch_us]
        return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()


def resident_cache_bytes(cache_bytes: int) -> int:
    """Return the bytes of a second-level cache that still hold elements when a kernel reads them again.

    Two fifths of it, a measurement on an H200. It is a share, so it grows with the cache.
    """
    return cache_bytes * 2 // 5


def names() -> list[str]:
    """List the known targets, by compute capability."""
    files = [
        f.name.removesuffix(".json") for f in resources.files("fusec.targets").iterdir() if f.name.endswith(".json")
    ]
    return sorted(files, key=lambda name: (_read(name)["sm"], name))


@functools.cache
def load(name: str) -> Target:
    """Load the target of that name; `cpu` has the figures of the default target.

    Raises TargetError for an unknown name; it lists the known ones.
    """
    if name == CPU:
        return replace(load(DEFAULT), name=CPU)
    if name not in names():
        raise TargetError(f"no target {name!r}; targets are {', '.join(names())}")
    data = _read(name)
    # cuDNN 9.28 requires memoryBusWidth, 9.19 ignores it
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


@functools.cache
def _read(name: str) -> dict[str, Any]:
    return json.loads((resources.files("fusec.targets") / f"{name}.json").read_text(encoding="utf-8"))
