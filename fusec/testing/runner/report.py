"""Report a run of the fuzzer (counts, findings, coverage) as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from fusec.system.dataclass import dataclass
from fusec.testing.runner.coverage import Coverage


def short(property: str) -> str:
    """Shorten the name of a user's property by the folders of its file."""
    place, sign, function = property.rpartition(":")
    return f"{Path(place).name}{sign}{function}"


@dataclass
class PropertyCount:
    """Counts of one property. `skips`: examples that it does not apply to."""

    runs: int = 0
    skips: int = 0
    failures: int = 0
    seconds: float = 0.0

    def add(self, row: Sequence[float]) -> None:
        self.runs += int(row[0])
        self.skips += int(row[1])
        self.failures += int(row[2])
        self.seconds += row[3]

    @property
    def ms(self) -> float:
        """Return the mean time of a run in milliseconds."""
        return 1e3 * self.seconds / self.runs if self.runs else 0.0


@dataclass
class Found:
    """A finding of the report.

    count: number of failures that match it.
    old: it was open in the database before the run.
    """

    folder: str
    property: str
    message: str
    how: str
    ops: dict[str, int]
    signature: str
    doubt: bool = False
    count: int = 1
    old: bool = False

    def __str__(self) -> str:
        line = self.message.strip().split("\n")[0]
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{short(self.property)}: {line[:200]}\n    {self.folder}{', still open' if self.old else ''}{times}"


@dataclass
class FuzzReport:
    """Report of a run.

    examples_before: examples of earlier runs with this seed and these properties, from the database.
    findings: mismatches with the reference, errors, crashes and hangs.
    doubts: mismatches that only a weaker check reports.
    left_out: properties that did not run, with the reason.
    """

    seed: int
    target: str
    properties: dict[str, PropertyCount]
    workers: int = 0
    seconds: float = 0.0
    examples: int = 0
    examples_before: int = 0
    nodes: int = 0
    shrinking: int = 0
    findings: list[Found] = field(default_factory=list[Found])
    doubts: list[Found] = field(default_factory=list[Found])
    fixed: list[str] = field(default_factory=list[str])
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    coverage: Coverage = field(default_factory=Coverage)
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def per_second(self) -> float:
        return self.examples / self.seconds if self.seconds else 0.0

    @property
    def line(self) -> str:
        """Return the progress of the run in one line."""
        found = f"{len(self.findings)} findings, {len(self.doubts)} doubts"
        return f"{self.examples} examples, {self.per_second:.1f}/s, {found}"

    def to_json(self) -> dict[str, Any]:
        properties = {name: {**asdict(count), "ms": count.ms} for name, count in self.properties.items()}
        plain = {
            name: getattr(self, name)
            for name in ("seed", "target", "workers", "seconds", "examples", "examples_before", "nodes", "shrinking")
        }
        return {
            **plain,
            "ok": self.ok,
            "interrupted": self.interrupted,
            "properties": properties,
            "findings": [asdict(found) for found in self.findings],
            "doubts": [asdict(found) for found in self.doubts],
            "fixed": self.fixed,
            "left_out": self.left_out,
            "coverage": self.coverage.to_json(),
            "holes": self.coverage.holes(),
        }

    def __str__(self) -> str:
        lines = [
            f"{self.examples} examples ({self.nodes} ops) in {self.seconds:.0f} s on {self.workers} workers, "
            f"{self.per_second:.1f}/s; seed {self.seed}, target {self.target}"
        ]
        if self.examples_before:
            lines.append(f"{self.examples_before} examples of this seed were run before; these are others")
        lines += ["", "coverage: " + str(self.coverage), ""]
        width = max([8, *(len(short(name)) for name in self.properties)])
        lines.append(f"{'property':{width}} {'runs':>8} {'skipped':>8} {'failed':>7} {'ms':>8}")
        lines += [
            f"{short(name):{width}} {c.runs:8} {c.skips:8} {c.failures:7} {c.ms:8.2f}"
            for name, c in self.properties.items()
        ]
        lines += [f"not run: {name}: {reason}" for name, reason in self.left_out.items()]
        lines += [f"fixed: {folder}" for folder in self.fixed]
        for title, entries in (("finding", self.findings), ("doubt", self.doubts)):
            lines += [f"{title}  {found}" for found in entries]
        lines.append(f"{len(self.findings)} findings, {len(self.doubts)} doubts")
        return "\n".join(lines)
