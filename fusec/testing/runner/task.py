"""Describe the task that every worker of a run gets at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fusec.testing.resolve import CASES, GRAPHS


@dataclass(frozen=True)
class Task:
    """Task of a worker.

    staging: folder for findings.
    current: file of the current example.
    """

    properties: tuple[str, ...]
    seed: int
    target: str
    staging: str
    graphs: str = GRAPHS
    cases: str = CASES
    shrink_s: float = 5.0
    reduce_s: float = 20.0
    hang_s: float = 60.0
    hash_seed: int = 0
    current: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Task:
        fields = dict(data)
        fields["properties"] = tuple(fields["properties"])
        return cls(**fields)
