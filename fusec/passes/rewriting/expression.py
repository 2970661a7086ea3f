"""Define the terms of which both sides of a rule are made: ops applied to leaves, numbers and attributes.

A rule's function is called once, with an `Ops` and one leaf per parameter. Its result is matched, built, printed and
tested without another call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, cast

from fusec.ir import Op, print_attribute
from fusec.ops import BY_NAME
from fusec.system.dataclass import dataclass

Known = Mapping[str, Any]  # numbers and attributes found by a match, by parameter name


@dataclass(frozen=True, eq=False)
class Symbol:
    """A number or attribute known once the pattern matches: a parameter, or computed from parameters."""

    text: str
    value: Callable[[Known], Any]
    parameter: str = ""  # set if the pattern itself finds it

    def __add__(self, other: Symbol | float) -> Symbol:
        return _combine("+", operator.add, self, other)

    def __sub__(self, other: Symbol | float) -> Symbol:
        return _combine("-", operator.sub, self, other)

    def __mul__(self, other: Symbol | float) -> Symbol:
        return _combine("*", operator.mul, self, other)

    def __rmul__(self, other: float) -> Symbol:
        return _combine("*", operator.mul, other, self)

    def __truediv__(self, other: Symbol | float) -> Symbol:
        return _combine("/", operator.truediv, self, other)

    def __rtruediv__(self, other: float) -> Symbol:
        return _combine("/", operator.truediv, other, self)

    def __neg__(self) -> Symbol:
        return Symbol(f"-{self.text}", lambda known: -self.value(known))

    def __getitem__(self, index: int) -> Symbol:
        return Symbol(f"{self.text}[{index}]", lambda known: self.value(known)[index])

    def __str__(self) -> str:
        return self.text


def call(text: str, function: Callable[..., Any], *arguments: Symbol) -> Symbol:
    """Make a symbol computed by a function; `text` is its name in the printed rule."""
    shown = f"{text}({', '.join(a.text for a in arguments)})"
    return Symbol(shown, lambda known: function(*(a.value(known) for a in arguments)))


def _combine(sign: str, compute: Callable[[Any, Any], Any], a: Symbol | float, b: Symbol | float) -> Symbol:
    left, right = symbol(a), symbol(b)
    text = " ".join([left.text if left.parameter or " " not in left.text else f"({left.text})", sign, right.text])
    return Symbol(text, lambda known: compute(left.value(known), right.value(known)))


def symbol(value: Symbol | float) -> Symbol:
    """Wrap a number as a symbol."""
    return value if isinstance(value, Symbol) else Symbol(show_number(value), lambda _: value)


@dataclass(frozen=True, eq=False)
class TracedTensor:
    """A leaf: any value, or (`constant`) any constant."""

    name: str
    constant: bool = False


@dataclass(frozen=True, eq=False)
class Number:
    """A one-element constant: a given number, or one the pattern finds."""

    symbol: Symbol


@dataclass(frozen=True, eq=False)
class Full:
    """A constant of some shape with one number everywhere; in replacements only."""

    shape: Symbol
    fill: float


@dataclass(frozen=True, eq=False)
class Apply:
    """An op applied to terms; attributes are values or symbols, every one of the op's present."""

    op: type[Op]
    operands: tuple[Term, ...]
    attributes: Mapping[str, Any]

    def build(self, known: Known) -> Op:
        """Build the op, with symbols replaced by the matched values."""
        values = {k: v.value(known) if isinstance(v, Symbol) else v for k, v in self.attributes.items()}
        return self.op(**values)


Term = TracedTensor | Number | Full | Apply
Operand = Term | Symbol | float


class Ops:
    """`p.mul(x, 0.5)` is the op `mul` applied to two terms; attributes are keyword arguments."""

    def __getattr__(self, name: str) -> Callable[..., Apply]:
        op = BY_NAME.get(name)
        if op is None:
            raise AttributeError(f"there is no op {name!r}")

        def apply(*operands: Operand, **attributes: Any) -> Apply:
            values: dict[str, Any] = {}
            for declared in fields(cast(Any, op)):
                if declared.name in attributes:
                    values[declared.name] = attributes.pop(declared.name)
                elif declared.default is not MISSING:
                    values[declared.name] = declared.default
                else:
                    raise TypeError(f"{name} needs the attribute {declared.name}")
            if attributes:
                raise TypeError(f"{name} has no attribute {', '.join(attributes)}")
            return Apply(op, tuple(term(o) for o in operands), values)

        return apply

    def full(self, shape: Symbol, fill: float) -> Full:
        """Make a constant of that shape, `fill` everywhere."""
        return Full(shape, fill)


def term(operand: Operand) -> Term:
    """Convert an operand to a term; numbers and symbols become one-element constants."""
    return operand if isinstance(operand, TracedTensor | Number | Full | Apply) else Number(symbol(operand))


def subterms(root: Term) -> Iterator[Term]:
    """Yield every term below and including `root`, operands first, each once."""
    seen: set[Term] = set()

    def visit(item: Term) -> Iterator[Term]:
        if item in seen:
            return
        seen.add(item)
        if isinstance(item, Apply):
            for operand in item.operands:
                yield from visit(operand)
        yield item

    return visit(root)


def show(root: Term) -> str:
    """Print a side of a rule; a repeated term is named first: `d = sub(x, m); mul(d, d)`."""
    uses: dict[Term, int] = {}
    terms = list(subterms(root))
    for item in terms:
        for operand in item.operands if isinstance(item, Apply) else ():
            uses[operand] = uses.get(operand, 0) + 1
    names: dict[Term, str] = {}

    def text(item: Term) -> str:
        if item in names:
            return names[item]
        if isinstance(item, TracedTensor):
            return item.name
        if isinstance(item, Number):
            return item.symbol.text
        if isinstance(item, Full):
            return f"full({item.shape}, {show_number(item.fill)})"
        defaults = {f.name: f.default for f in fields(cast(Any, item.op))}
        given = {k: v for k, v in item.attributes.items() if v is not defaults[k] and v != defaults[k]}
        attributes = [f"{k}={v if isinstance(v, Symbol) else print_attribute(v)}" for k, v in given.items()]
        return f"{item.op.name}({', '.join([*map(text, item.operands), *attributes])})"

    lets: list[str] = []
    for item in terms:
        if isinstance(item, Apply) and uses.get(item, 0) > 1:
            name = f"t{len(lets) + 1}"
            lets.append(f"{name} = {text(item)}")
            names[item] = name
    return "; ".join([*lets, text(root)])


def show_number(value: float) -> str:
    """Print a number, with its usual name where it has one."""
    named = {math.sqrt(0.5): "sqrt(1/2)", math.sqrt(2.0): "sqrt(2)", math.sqrt(2.0 / math.pi): "sqrt(2/pi)"}
    return named.get(value, f"{value:g}")
