"""Record how one cuDNN graph is run: the engine and its knobs, never a plan's place in cuDNN's list.

The list changes with the version of cuDNN and the GPU; engine and knobs name the same plan in any of them.
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
    """One plan of a graph.

    time_us: median on the device; None if it was not timed.
    error: relative L2 against the reference or, if that takes too long, against other engines; None if not measured.
    complete: every plan of its tuning level was timed.
    """

    engine: int
    knobs: Knobs
    workspace_bytes: int = 0
    time_us: float | None = None
    error: float | None = None
    complete: bool = True

    @classmethod
    def of(cls, plan: Plan) -> Choice:
        """Return the choice of a plan that cuDNN offers, without measurements."""
        return cls(plan.engine, plan.knobs, plan.workspace_bytes)

    @property
    def library(self) -> str:
        """Return the library whose plan it is."""
        return "cublaslt" if self.engine == BLAS else "cudnn"

    @property
    def name(self) -> str:
        """Return the plan's name in messages, without its knobs."""
        return f"engine {self.engine}" if self.engine != BLAS else "cuBLASLt"

    @property
    def identity(self) -> tuple[int, Knobs]:
        """Return what names the plan to its library."""
        return self.engine, self.knobs

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `from_json` reads an equal choice from it."""
        return {**asdict(self), "knobs": [list(pair) for pair in self.knobs]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Choice:
        """Read what `to_json` returned. Raises ValueError for other data."""
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
    """One part of a step that was split.

    nodes: how many of the step's nodes, after those of the part before; 0: all that are left.
    runs: who runs them: cuDNN, a kernel, or each op by itself. spelling: the rewrites of a part that cuDNN runs.
    """

    nodes: int
    runs: str = "cudnn"
    spelling: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `from_json` reads an equal part from it."""
        return {**asdict(self), "spelling": list(self.spelling)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Part:
        """Read what `to_json` returned. Raises ValueError for other data."""
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
    """Everything a choice depends on: the graph (`CudnnGraph.key`) or step, the machine, and the tuning level."""

    graph: str
    target: str
    device: str
    driver: str
    cudnn: str
    frontend: str
    tune: str

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the fields, which is the same in every process."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, str]:
        """Return the fields by name, as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Entry:
    """A choice and, if there is one, the plan itself as cuDNN serializes it.

    A blob holds machine code: cuDNN gets it only if this machine built it (`PlanStore.trusts`).
    """

    choice: Choice
    blob: bytes | None = None
