"""How one cuDNN graph is run, as plain data: the engine and its knobs, never a plan's place in cuDNN's list.

The list drifts with the version of cuDNN and the GPU; engine and knobs name the same plan in any of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from fusec.plans.verdict import Plan

Knobs = tuple[tuple[int, int], ...]  # (knob type, value), sorted
BLAS = 1 << 20  # stands for an engine where cuBLASLt runs a graph; the knobs are its algorithm's attributes


@dataclass(frozen=True)
class Choice:
    """One plan of a graph. `time_us` (median on the device) and `error` (relative L2 against the reference or, where
    that would take too long, against other engines) are None where nothing was measured. complete: every plan of its
    tuning level was timed."""

    engine: int
    knobs: Knobs
    workspace_bytes: int = 0
    time_us: float | None = None
    error: float | None = None
    complete: bool = True

    @classmethod
    def of(cls, plan: Plan) -> Choice:
        """A plan that cuDNN offers, not measured."""
        return cls(plan.engine, plan.knobs, plan.workspace_bytes)

    @property
    def library(self) -> str:
        """Whose plan it is."""
        return "cublaslt" if self.engine == BLAS else "cudnn"

    @property
    def name(self) -> str:
        """What messages call the plan, without its knobs."""
        return f"engine {self.engine}" if self.engine != BLAS else "cuBLASLt"

    @property
    def identity(self) -> tuple[int, Knobs]:
        """What names the plan to its library."""
        return self.engine, self.knobs

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` gives back an equal choice."""
        return {**asdict(self), "knobs": [list(pair) for pair in self.knobs]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Choice:
        """Inverse of `to_json`. ValueError for data of another form."""
        try:
            pairs = [(k, v) for k, v in data["knobs"]]
            measured = (data["workspace_bytes"], data["time_us"], data["error"], data.get("complete", True))
            choice = cls(data["engine"], tuple(sorted(pairs)), *measured)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the choice of a plan: {error}") from None
        whole = (choice.engine, choice.workspace_bytes, *(n for pair in pairs for n in pair))
        if any(type(n) is not int for n in whole) or choice.engine < 0 or choice.workspace_bytes < 0:
            raise ValueError("not the choice of a plan: engine, knobs and workspace are whole numbers")
        if any(n is not None and type(n) not in (int, float) for n in (choice.time_us, choice.error)):
            raise ValueError("not the choice of a plan: time and error are numbers or absent")
        if type(choice.complete) is not bool:
            raise ValueError("not the choice of a plan: complete is true or false")
        return choice


ORDERS = ("in order", "side by side")  # how the steps of a whole program run
RUNS = ("cudnn", "kernel", "ops", "in place", "copy", *ORDERS)  # in place, copy: a concat


@dataclass(frozen=True)
class Part:
    """One step of the form that a step of cuDNN's takes: how many of its nodes, from where the part before ends (0: all
    that are left), and what runs them: cuDNN, in that spelling; a kernel; or each op by itself."""

    nodes: int
    runs: str = "cudnn"
    spelling: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` gives back an equal part."""
        return {**asdict(self), "spelling": list(self.spelling)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Part:
        """Inverse of `to_json`. ValueError for data of another form."""
        try:
            nodes, runs, spelling = data["nodes"], data["runs"], data["spelling"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a part of a form: {error}") from None
        if type(nodes) is not int or nodes < 0 or runs not in RUNS or not isinstance(spelling, list):
            raise ValueError(f"not a part of a form: nodes is a number, runs one of {', '.join(RUNS)}")
        names = [name for name in spelling if isinstance(name, str)]
        if len(names) != len(spelling) or (names and runs != "cudnn"):
            raise ValueError("not a part of a form: spelling is a list of names, and what cuDNN runs alone has one")
        return cls(nodes, runs, tuple(names))


@dataclass(frozen=True)
class PlanKey:
    """What a choice holds for: the graph (`CudnnGraph.key`) or other work, where it runs, and the tuning level."""

    graph: str
    target: str
    device: str
    driver: str
    cudnn: str
    frontend: str
    tune: str

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the fields: the same in every process."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, str]:
        """Plain data, the fields by name."""
        return asdict(self)


@dataclass(frozen=True)
class Entry:
    """A choice and, where there is one, the plan itself as cuDNN serializes it.

    A blob holds machine code: it is handed to cuDNN only if this machine built it (`PlanStore.trusts`).
    """

    choice: Choice
    blob: bytes | None = None
