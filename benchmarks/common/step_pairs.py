"""Compare the steps of two forms of a model, such as quantised and fp16, that compute the same operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusec.diagnostics.step_times import Bench, StepTime
from fusec.ops import PRODUCTS, PackedMatMul

if TYPE_CHECKING:
    from fusec.ir import Node
    from fusec.runtime import Executable


@dataclass(frozen=True)
class NamedStep:
    """A step with its time, the operators whose products it computes, and how it is spelled for cuDNN.

    operators: all operators of a step without a product, or whose product has no name.
    """

    operators: frozenset[str]
    time: StepTime
    spelling: tuple[str, ...] = ()

    @property
    def us(self) -> float:
        return self.time.time.median_us

    def __str__(self) -> str:
        spelled = f" as {'+'.join(self.spelling)}" if self.spelling else ""
        return f"{self.time.kind}{spelled} {self.time.signature}"


@dataclass(frozen=True)
class StepPair:
    """Steps of both forms that compute the same operators. One side is empty if no step of that form has them."""

    first: Sequence[NamedStep]
    second: Sequence[NamedStep]

    @property
    def more_us(self) -> float:
        """Return how much longer the first form takes."""
        return _sum_us(self.first) - _sum_us(self.second)

    def to_json(self, first: str, second: str) -> dict[str, Any]:
        """Return plain data. first, second: the names of the forms."""
        operators = sorted({name for step in (*self.first, *self.second) for name in step.operators})
        sides = {first: self.first, second: self.second}
        found: dict[str, Any] = {"operators": operators}
        for name, steps in sides.items():
            us, limit_us = round(_sum_us(steps), 2), round(_limit_us(steps), 2)
            found[name] = {"us": us, "limit_us": limit_us, "steps": list(map(str, steps))}
        return found

    def __str__(self) -> str:
        sides = "  ".join(f"{_sum_us(steps):8.1f} {_limit_us(steps):7.1f}" for steps in (self.first, self.second))
        operators = sorted(name for step in (self.first or self.second) for name in step.operators)
        names = " | ".join(" & ".join(map(str, steps)) or "-" for steps in (self.first, self.second))
        return f"{sides}  {operators[0] if operators else '-'}: {names}"


def named_steps(executable: Executable, bench: Bench) -> list[NamedStep]:
    """Return the steps that were timed, with their operators."""
    steps = executable.compiled.program.steps
    found: list[NamedStep] = []
    for time in bench.steps:
        step = steps[time.index]
        products = [node for node in step.nodes if isinstance(node.op, (*PRODUCTS, PackedMatMul))]
        # a product that a rule made has no origin of its own
        names = _origins(products) or _origins(step.nodes)
        found.append(NamedStep(frozenset(names), time, step.spelling))
    return found


def _origins(nodes: Sequence[Node]) -> list[str]:
    return [name for node in nodes for name in node.origin]


def step_pairs(first: Sequence[NamedStep], second: Sequence[NamedStep]) -> list[StepPair]:
    """Pair the steps that share an operator, those first of which the first form loses most."""
    groups: list[_Group] = []
    for side, steps in enumerate((first, second)):
        for step in steps:
            merged = _Group(set(step.operators), ([], []))
            for group in [group for group in groups if group.operators & step.operators]:
                merged.add(group)
                groups.remove(group)
            merged.sides[side].append(step)
            groups.append(merged)
    return sorted((StepPair(*group.sides) for group in groups), key=lambda pair: -pair.more_us)


@dataclass(eq=False)
class _Group:
    """Steps of both forms that share operators with each other."""

    operators: set[str]
    sides: tuple[list[NamedStep], list[NamedStep]]

    def add(self, other: _Group) -> None:
        self.operators |= other.operators
        for mine, more in zip(self.sides, other.sides, strict=True):
            mine.extend(more)


def table(pairs: Sequence[StepPair], first: str, second: str, worst: int) -> str:
    """Return a table of the `worst` pairs, whose first form loses most, and of the sums of all pairs."""
    heads = "  ".join(f"{name:>8} {'limit':>7}" for name in (first, second))
    every = StepPair([s for p in pairs for s in p.first], [s for p in pairs for s in p.second])
    sums = "  ".join(f"{_sum_us(steps):8.1f} {_limit_us(steps):7.1f}" for steps in (every.first, every.second))
    lines = [f"{heads}  us, steps timed alone: {first} | {second}", *map(str, pairs[:worst]), f"{sums}  all steps"]
    return "\n".join(line[:200] for line in lines)


def _sum_us(steps: Sequence[NamedStep]) -> float:
    return sum(step.us for step in steps)


def _limit_us(steps: Sequence[NamedStep]) -> float:
    return sum(step.time.limit_us for step in steps)
