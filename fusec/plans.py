"""How a cuDNN graph is run, as data: engine and knobs of a plan, never its place in a list, which drifts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

Knobs = tuple[tuple[int, int], ...]  # (knob type, value), sorted


@dataclass(frozen=True)
class Choice:
    """A plan that was chosen. time_us: median on the device; error: relative L2 against the reference or, where that
    was too large to compute, against other engines; None where not measured. complete: every plan of its tuning
    level was timed."""

    engine: int
    knobs: Knobs
    workspace_bytes: int = 0
    time_us: float | None = None
    error: float | None = None
    complete: bool = True


@dataclass(frozen=True)
class Place:
    """Where plans run: the GPU's name, and the versions of driver, cuDNN and its frontend."""

    device: str
    driver: str
    cudnn: str
    frontend: str


@dataclass(frozen=True)
class PlanKey:
    """What a choice depends on. `graph` is `CudnnGraph.key`, which knows of precision; `tune` the level."""

    graph: str
    device: str
    driver: str
    cudnn: str
    frontend: str
    tune: str

    @property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Entry:
    """A choice with the plan serialized by cuDNN, if it is at hand."""

    choice: Choice
    blob: bytes | None = None
