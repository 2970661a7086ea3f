"""Define rules as equations: trace them from a function, match, build, print, and explain near misses.

@rule
def gelu_erf(p: Ops, x: TracedTensor) -> Sides:
    return p.mul(p.mul(x, 0.5), p.add(p.erf(p.mul(x, SQRT_HALF)), 1.0)), p.gelu(x)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, overload

import numpy as np

from fusec.errors import VerifyError
from fusec.ir import DType, Graph, Node, TensorType, Value
from fusec.passes.rewriting.expression import (
    Apply,
    Full,
    Number,
    Operand,
    Ops,
    Symbol,
    Term,
    TracedTensor,
    show,
    subterms,
    term,
)
from fusec.passes.rewriting.rewriter import NoMatch
from fusec.system.dataclass import dataclass

TOLERANCE = 1e-5  # relative; models spell sqrt(2) as 1.4142135, 1.41421 and worse

Sides = tuple[Apply, Operand]
# The annotation of a parameter says what it matches.
Scalar = Symbol  # the number of a one-element constant
Attribute = Symbol  # any value of an attribute
Weight = TracedTensor  # any constant


@dataclass
class Match:
    """Values, numbers and attributes that a pattern matched, by parameter name."""

    root: Node
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    known: dict[str, Any] = field(default_factory=dict[str, Any])

    def __getitem__(self, name: str) -> Value:
        return self.values[name]

    def require(self, condition: bool, reason: str, name: str = "") -> None:
        """Raise NoMatch unless the condition holds."""
        if not condition:
            raise NoMatch(reason, self.values.get(name))


@dataclass(frozen=True)
class Miss:
    """The nearest miss of a rule: `matched` of `size` ops, and the reason at `value`."""

    rule: str
    root: str
    matched: int
    size: int
    reason: str
    value: str = ""

    def __str__(self) -> str:
        at = f" (at %{self.value})" if self.value else ""
        return f"{self.rule}: {self.matched} of {self.size} ops match at %{self.root}: {self.reason}{at}"


@dataclass(frozen=True, eq=False)
class Rule:
    """One equation, used from left to right."""

    name: str
    pattern: Apply
    replacement: Term
    parameters: Mapping[str, str]
    where: Callable[[Match], None] | None
    dtypes: str
    sample: Mapping[str, Any]

    @property
    def equation(self) -> str:
        return f"{show(self.pattern)} = {show(self.replacement)}"

    @property
    def roots(self) -> frozenset[str]:
        # a product with a number may also be spelled as a quotient
        extra = {"div"} if self.pattern.op.name == "mul" and _number_at(self.pattern) is not None else set[str]()
        return frozenset({self.pattern.op.name, *extra})

    @property
    def size(self) -> int:
        """Count the ops in the pattern."""
        return sum(isinstance(item, Apply) for item in subterms(self.pattern))

    def apply(self, graph: Graph, node: Node) -> Value | None:
        match = self.match(node)
        return None if match is None else instantiate(graph, self.replacement, match.values, match.known, node)

    def match(self, node: Node, misses: list[Miss] | None = None) -> Match | None:
        """Return the first match of the pattern at `node`; collect misses if a list is given."""
        attempt = _Attempt(self, node, misses)
        for _ in attempt.at(self.pattern, node.results[0]):
            match = Match(node, attempt.values(), dict(attempt.known))
            try:
                self._check(attempt, match)
            except NoMatch as miss:
                attempt.miss(miss.reason, miss.value)
                continue
            return match
        return None

    def _check(self, attempt: _Attempt, match: Match) -> None:
        if self.dtypes == "float" and not match.root.result.type.dtype.is_float:
            raise NoMatch("not floating point", match.root.result)
        inside = {value.node for item, value in attempt.bound.items() if isinstance(item, Apply)}
        for item, value in attempt.bound.items():
            if isinstance(item, Apply) and item is not self.pattern and any(n not in inside for n in value.users):
                raise NoMatch("used elsewhere too", value)
        if self.where is not None:
            self.where(match)
        found = self._infer(self.replacement, match, match.root.result.type.dtype)
        if not found.same_value_type(match.root.result.type):
            raise NoMatch(f"the replacement is {found}, not {match.root.result.type}", match.root.result)

    def _infer(self, item: Term, match: Match, dtype: DType) -> TensorType:
        """Infer the type of a term of the replacement as `instantiate` would build it; numbers have that dtype."""
        if isinstance(item, TracedTensor):
            return match.values[item.name].type
        if not isinstance(item, Apply):
            return TensorType(item.shape.value(match.known) if isinstance(item, Full) else (), dtype)
        inner = _dtype_of_leaves(item, match.values, dtype)
        types = [self._infer(o, match, inner) for o in item.operands]
        try:
            return item.build(match.known).infer(*types)[0]
        except VerifyError as error:
            raise NoMatch(str(error), match.root.result) from error


class _Attempt:
    """One attempt to match at a node: terms bound to values, and unbound when it backtracks."""

    def __init__(self, rule: Rule, root: Node, misses: list[Miss] | None):
        self.rule = rule
        self.root = root
        self.misses = misses
        self.bound: dict[Term, Value] = {}
        self.known: dict[str, Any] = {}

    def values(self) -> dict[str, Value]:
        return {item.name: value for item, value in self.bound.items() if isinstance(item, TracedTensor)}

    def miss(self, reason: str, value: Value | None) -> None:
        if self.misses is None:
            return
        matched = sum(isinstance(item, Apply) for item in self.bound)
        place = value.name if value is not None else ""
        self.misses.append(Miss(self.rule.name, self.root.results[0].name, matched, self.rule.size, reason, place))

    def at(self, item: Term, value: Value) -> Iterator[None]:
        """Yield once for every match of `item` with `value`."""
        held = self.bound.get(item)
        if held is not None:
            if held is value:
                yield
            else:
                self.miss(f"not the same value as %{held.name}", value)
            return
        if isinstance(item, Number):
            yield from self.number(item.symbol, value.scalar(), value)
            return
        if isinstance(item, Apply):
            yield from self.application(item, value)
            return
        if isinstance(item, TracedTensor) and item.constant and value.literal is None:
            self.miss("not a constant", value)
            return
        self.bound[item] = value
        yield
        del self.bound[item]

    def number(self, wanted: Symbol, found: float | None, value: Value) -> Iterator[None]:
        if found is None:
            self.miss("not a one-element constant", value)
        elif wanted.parameter and wanted.parameter not in self.known:
            self.known[wanted.parameter] = as_written(found, value.type.dtype)
            yield
            del self.known[wanted.parameter]
        elif same_number(found, float(wanted.value(self.known)), value.type.dtype):
            yield
        else:
            self.miss(f"{found:g} is not {wanted}", value)

    def application(self, item: Apply, value: Value) -> Iterator[None]:
        node = value.node
        if node is None or node.op.name != item.op.name:
            if node is not None and node.op.name == "div" and item.op.name == "mul":
                place = _number_at(item)
                if place is not None:
                    yield from self.quotient(item, place, node)
                    return
            self.miss(f"{node.op.name if node else 'a graph input'} is not {item.op.name}", value)
            return
        operands = node.operands
        if len(operands) != len(item.operands):
            self.miss(f"{node.op.name} has {len(operands)} operands", value)
            return
        found: list[str] = []
        if self.attributes(item, node, found):
            self.bound[item] = value
            yield from self.all(item.operands, operands)
            if node.op.commutative and operands[0] is not operands[1]:
                yield from self.all(item.operands, (operands[1], operands[0]))
            del self.bound[item]
        for name in found:
            del self.known[name]

    def quotient(self, item: Apply, place: int, node: Node) -> Iterator[None]:
        """Match x / c where the pattern has x * (1/c)."""
        wanted, (x, divisor) = item.operands[place], node.operands
        scalar = divisor.scalar()
        if not isinstance(wanted, Number) or not scalar or not divisor.type.dtype.is_float:
            self.miss("not divided by a one-element constant", divisor)
            return
        self.bound[item] = node.results[0]
        for _ in self.number(wanted.symbol, 1.0 / scalar, divisor):
            yield from self.at(item.operands[1 - place], x)
        del self.bound[item]

    def all(self, items: Sequence[Term], values: Sequence[Value]) -> Iterator[None]:
        if not items:
            yield
            return
        for _ in self.at(items[0], values[0]):
            yield from self.all(items[1:], values[1:])

    def attributes(self, item: Apply, node: Node, found: list[str]) -> bool:
        for name, wanted in item.attributes.items():
            actual = getattr(node.op, name)
            if isinstance(wanted, Symbol):
                if wanted.parameter and wanted.parameter not in self.known:
                    self.known[wanted.parameter] = actual
                    found.append(wanted.parameter)
                    continue
                wanted = wanted.value(self.known)
            if actual != wanted and not (isinstance(wanted, float) and same_number(actual, wanted, DType.F32)):
                self.miss(f"{name} is {actual}, not {wanted}", node.results[0])
                return False
        return True


def same_number(found: float, wanted: float, dtype: DType) -> bool:
    """Tell if a number stored as `dtype` stands for `wanted`."""
    if found == wanted or math.isinf(wanted) or math.isinf(found):  # no number is near infinity
        return found == wanted
    return abs(found - wanted) <= max(TOLERANCE, dtype.epsilon) * abs(wanted)


def as_written(found: float, dtype: DType) -> float:
    """Return an f32 number as its author wrote it: 1e-05, not 9.999999747378752e-06; the same once rounded."""
    return float(str(np.float32(found))) if dtype is DType.F32 else found


def _number_at(item: Apply) -> int | None:
    """Return the place of the only number among two operands; None without one."""
    places = [i for i, o in enumerate(item.operands) if isinstance(o, Number)]
    return places[0] if len(places) == 1 and len(item.operands) == 2 else None


def _dtype_of_leaves(item: Apply, values: Mapping[str, Value], default: DType) -> DType:
    """Return the dtype of numbers among the operands: that of the first leaf below, else the default."""
    return next((values[t.name].type.dtype for t in subterms(item) if isinstance(t, TracedTensor)), default)


def instantiate(
    graph: Graph, item: Term, values: Mapping[str, Value], known: Mapping[str, Any], before: Node | None = None
) -> Value:
    """Build a term over the given leaves; new nodes are inserted before `before`."""
    made: dict[Term, Value] = {}

    def build(item: Term, dtype: DType) -> Value:
        if isinstance(item, TracedTensor):
            return values[item.name]
        if item in made:
            return made[item]
        if isinstance(item, Apply):
            inner = _dtype_of_leaves(item, values, dtype)
            operands = [build(o, inner) for o in item.operands]
            made[item] = graph.insert(item.build(known), operands, before=before).results[0]
        else:
            is_number = isinstance(item, Number)
            shape, fill = ((), item.symbol.value(known)) if is_number else (item.shape.value(known), item.fill)
            made[item] = graph.constant(np.full(shape, fill, np.float64).astype(dtype.numpy), before=before)
        return made[item]

    dtype = before.results[0].type.dtype if before is not None and before.results else DType.F32
    return build(item, dtype)


@overload
def rule(function: Callable[..., Sides], /) -> Rule: ...
@overload
def rule(
    *,
    where: Callable[[Match], None] | None = None,
    dtypes: str = "float",
    sample: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Sides]], Rule]: ...


def rule(
    function: Callable[..., Sides] | None = None,
    /,
    *,
    where: Callable[[Match], None] | None = None,
    dtypes: str = "float",
    sample: Mapping[str, Any] | None = None,
) -> Rule | Callable[[Callable[..., Sides]], Rule]:
    """Make a rule of a function from `Ops` and leaves to (pattern, replacement).

    where: raises NoMatch where the rule does not apply
    dtypes: `float`, or `any` where the equation holds for integers too
    sample: shapes, numbers and attributes to try the equation with
    """

    def trace(function: Callable[..., Sides]) -> Rule:
        _, *declared = inspect.signature(function).parameters.values()
        parameters = {p.name: str(p.annotation) for p in declared}
        pattern, replacement = function(Ops(), *(_leaf(n, kind) for n, kind in parameters.items()))
        return Rule(function.__name__, pattern, term(replacement), parameters, where, dtypes, sample or {})

    return trace if function is None else trace(function)


def _leaf(name: str, kind: str) -> TracedTensor | Symbol:
    if kind in ("Scalar", "Attribute"):
        return Symbol(name, lambda known: known[name], name)
    if kind not in ("TracedTensor", "Weight"):
        raise TypeError(f"parameter {name} is annotated {kind}, not TracedTensor, Weight, Scalar or Attribute")
    return TracedTensor(name, constant=kind == "Weight")


def nearest_misses(graph: Graph, rules: Sequence[Rule]) -> list[Miss]:
    """Find for each rule that matches nowhere its nearest miss (of two ops or more)."""
    best: dict[str, Miss] = {}
    matched: set[str] = set()
    for node in graph.nodes:
        for candidate in rules:
            if node.op.name not in candidate.roots or candidate.name in matched:
                continue
            misses: list[Miss] = []
            if candidate.match(node, misses) is not None:
                matched.add(candidate.name)
                continue
            for miss in misses:
                held = best.get(miss.rule)
                if miss.matched >= 2 and (held is None or miss.matched > held.matched):
                    best[miss.rule] = miss
    return [miss for name, miss in best.items() if name not in matched]
