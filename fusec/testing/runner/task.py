"""Describe the task that every worker of a run gets at its start."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fusec.system.dataclass import dataclass
from fusec.testing.resolve import version_of


@dataclass(frozen=True)
class Task:
    """Task of a worker.

    shrink_s: the most seconds to shrink a failure.
    hang_s: seconds after which a property counts as hung.
    staging: folder for findings.
    current: file of the current example.
    """

    properties: tuple[str, ...]
    seed: int
    target: str
    graphs: str
    cases: str
    shrink_s: float
    hang_s: float
    staging: str = ""
    hash_seed: int = 0
    current: str = ""

    @property
    def key(self) -> str:
        """Return the database key of the run's chunks: a hash of everything that determines their examples."""
        parts = [self.seed, sorted(self.properties), self.target, self.graphs, self.cases]
        return hashlib.sha256(json.dumps([*parts, version_of((self.graphs, self.cases))]).encode()).hexdigest()[:24]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Task:
        fields = dict(data)
        return cls(tuple(fields.pop("properties")), **fields)
