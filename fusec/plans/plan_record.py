"""Record which plan runs a cuDNN graph, by the plan's engine and knobs.

The place of a plan in the list of cuDNN is not recorded, because it changes with the version of cuDNN and the GPU.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any, cast

from fusec.plans.verdict import Plan
from fusec.system.dataclass import dataclass

Knobs = tuple[tuple[int, int], ...]  # (knob type, value), sorted
BLAS = 1 << 20  # number of an engine that stands for cuBLASLt; its knobs are the attributes of the algorithm
NVRTC = BLAS + 1  # number of an engine that stands for a kernel of fusec, whose serialized form NVRTC compiled


@dataclass(frozen=True)
class Choice:
    """The plan that was chosen for a graph.

    time_us: median on the device; None if it was not timed.
    error: relative L2 error, measured against the reference, or against other engines where the reference takes too
        long; None if it was not measured.
    complete: the budget was enough to time every plan of the tuning level.
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
        """Return engine and knobs, by which the library knows the plan."""
        return self.engine, self.knobs

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `from_json` reads an equal choice from it."""
        return {**asdict(self), "knobs": [list(pair) for pair in self.knobs]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Choice:
        """Read what `to_json` returned. Raises ValueError that names the field for other data."""
        knobs = _field(data, "knobs")
        if not isinstance(knobs, list) or not all(_is_pair(pair) for pair in cast("list[Any]", knobs)):
            raise ValueError(f"knobs are {knobs!r}, not pairs of whole numbers")
        pairs = cast("list[tuple[int, int]]", knobs)
        for key in ("time_us", "error"):
            if data.get(key) is not None and type(data[key]) not in (int, float):
                raise ValueError(f"{key} is {data[key]!r}, not a number")
        complete = data.get("complete", True)
        if type(complete) is not bool:
            raise ValueError(f"complete is {complete!r}, not true or false")
        return cls(
            whole_number(data, "engine"),
            tuple(sorted((knob, value) for knob, value in pairs)),
            whole_number(data, "workspace_bytes"),
            data.get("time_us"),
            data.get("error"),
            complete,
        )


def whole_number(data: Mapping[str, Any], key: str) -> int:
    """Return a field that is a whole number and not negative. Raises ValueError for any other."""
    number = _field(data, key)
    if type(number) is not int or number < 0:
        raise ValueError(f"{key} is {number!r}, not a whole number")
    return number


def _field(data: Mapping[str, Any], key: str) -> Any:
    if key not in data:
        raise ValueError(f"{key} is missing")
    return data[key]


def _is_pair(item: Any) -> bool:
    return isinstance(item, list) and [type(number) for number in cast("list[Any]", item)] == [int, int]


ORDERS = ("in order", "side by side")  # how the steps of a whole program run
RUNS = ("cudnn", "kernel", "ops", "in place", "copy", *ORDERS)  # `in place` and `copy` are for the operands of a concat


@dataclass(frozen=True)
class Part:
    """One part of a step; a step that is not split has one.

    nodes: number of the step's nodes in this part, which follow those of the part before; 0: all that are left.
    runs: one of RUNS; `ops`: each op by itself.
    spelling: names of the rewrites of a part that cuDNN runs.
    """

    nodes: int
    runs: str = "cudnn"
    spelling: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `from_json` reads an equal part from it."""
        return {**asdict(self), "spelling": list(self.spelling)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Part:
        """Read what `to_json` returned. Raises ValueError that names the field for other data."""
        runs, spelling = _field(data, "runs"), _field(data, "spelling")
        if runs not in RUNS:
            raise ValueError(f"runs is {runs!r}, not one of {', '.join(RUNS)}")
        if not isinstance(spelling, list) or not all(isinstance(name, str) for name in cast("list[Any]", spelling)):
            raise ValueError(f"spelling is {spelling!r}, not a list of names")
        if spelling and runs != "cudnn":
            raise ValueError(f"a spelling is named where {runs!r} runs")
        return cls(whole_number(data, "nodes"), runs, tuple(cast("list[str]", spelling)))


@dataclass(frozen=True)
class PlanKey:
    """Key of a choice: the graph (`CudnnGraph.key`) or step, the machine, and the tuning level."""

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
