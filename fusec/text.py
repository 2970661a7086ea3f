"""Parse the text form of a graph, which `fusec.graph.printer` writes. Errors point at their place with a caret."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from functools import cache
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from fusec.errors import ModelError, VerifyError
from fusec.ir import (
    NUMBERS,
    Array,
    Body,
    Constant,
    DType,
    Graph,
    Literal,
    Op,
    TensorType,
    Value,
    print_attribute,
    quote,
)
from fusec.ops import BY_NAME

_TOKEN = re.compile(
    r"""\s*(?:\#[^\n]*(?:\n|\Z)\s*)*(?:
    (?P<value>%(?:"(?:[^"\\]|\\.)*"|[A-Za-z0-9_.$/:-]*[A-Za-z0-9_.$/-]))
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<number>-?(?:[0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?|inf|nan)(?![A-Za-z0-9_]))
  | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
  | (?P<punct>[()\[\]{},:=])
  | (?P<end>\Z)
  )""",
    re.VERBOSE,
)
# a type as it is printed, if no more of it follows
_TYPE = re.compile(r"\w+\[[0-9,]*\](?:\{[0-9,]*\})?(?: of \[[0-9,]*\])?(?!\s*(?:[{#]|of\b))")
_INTEGER = re.compile(r"-?[0-9]{1,20}")  # no longer than a number of 64 bits
_MAX_RANK = 32
_MAX_NESTING = 8  # of lists in attributes
_MAX_BODIES = 4  # graphs within graphs
_Item = TypeVar("_Item")


def parse(text: str, weights: Mapping[str, Array | Literal] | None = None) -> Graph:
    """Parse the text of one graph, and verify the graph.

    weights: the large constants, which the text names as `weight("label")`, by label. An array is copied. A literal
        is used as it is, and not loaded.
    Raises ModelError with line, column and a caret for bad syntax, unknown ops, wrong types and missing weights.
    """
    parser = _Parser(text, weights or {})
    graph = parser.graph()
    parser.expect_end()
    try:
        graph.verify()
    except VerifyError as error:
        raise ModelError(str(error)) from error
    return graph


def parse_op(text: str) -> Op:
    """Parse an op without operands, as `fusec.ir.print_op` prints it. Raises ModelError for anything else."""
    parser = _Parser(text, {})
    op = parser.attributes(parser.op_class(), 0)
    parser.expect_end("op")
    return op


class _Parser:
    """A recursive-descent parser that holds one token: its kind, its text, and where it starts."""

    def __init__(self, text: str, weights: Mapping[str, Array | Literal]):
        self.text = text
        self.weights = weights
        self.position = 0
        self.depth = 0  # graphs around the current one
        self.kind, self.token, self.start = "", "", 0
        self.values: dict[str, Value] = {}
        self.types_by_text: dict[str, TensorType] = {}
        self.advance()

    # tokens ------------------------------------------------------------------------------------------

    def advance(self) -> str:
        """Move to the next token, and return the text of the one before."""
        previous = self.token
        match = _TOKEN.match(self.text, self.position)
        if match is None:
            start = len(self.text) - len(self.text[self.position :].lstrip())
            found = self.text[start : start + 1]
            self.fail(
                f"unexpected character {found!r}" if found != '"' else "a string without its closing quote", start
            )
        self.kind = str(match.lastgroup)
        self.start, self.position = match.span(self.kind)
        self.token = match[self.kind]
        return previous

    def fail(self, reason: str, at: int | None = None) -> NoReturn:
        """Raise ModelError that points at a position in the text; default: at the current token."""
        before = self.text[: self.start if at is None else at]
        line_number = before.count("\n") + 1
        column = len(before) - (before.rfind("\n") + 1)
        line = self.text.split("\n")[line_number - 1]
        raise ModelError(f"line {line_number}, column {column + 1}: {reason}\n  {line}\n  {' ' * column}^")

    def take(self, token: str) -> bool:
        if self.token == token and self.kind in ("punct", "word"):
            self.advance()
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.take(token):
            self.fail(f"expected {token!r}, found {self.token!r}" if self.token else f"expected {token!r}, not the end")

    def expect_end(self, what: str = "graph") -> None:
        if self.kind != "end":
            self.fail(f"unexpected {self.token!r} after the {what}")

    def listed(self, close: str, item: Callable[[], _Item]) -> list[_Item]:
        """Parse items with commas between them, up to the token `close`."""
        items: list[_Item] = []
        while not self.take(close):
            items.append(item())
            if self.token != close:
                self.expect(",")
        return items

    def string(self) -> str:
        if self.kind != "string":
            self.fail("expected a string in double quotes")
        return _unquote(self.advance())

    def integer(self) -> int:
        if self.kind != "number" or not _INTEGER.fullmatch(self.token):
            self.fail(f"expected an integer of at most 64 bits, found {self.token[:30]!r}")
        if not -(1 << 63) <= int(self.token) < 1 << 64:
            self.fail(f"{self.token} does not fit 64 bits")
        return int(self.advance())

    def name(self) -> str:
        if self.kind != "value":
            self.fail(f"expected a %name, found {self.token!r}" if self.token else "expected a %name, not the end")
        raw = self.token[1:]
        if raw == '""':
            self.fail("an empty name")
        self.advance()
        return _unquote(raw) if raw.startswith('"') else raw

    # grammar -----------------------------------------------------------------------------------------

    def graph(self) -> Graph:
        self.expect("graph")
        graph = Graph(self.string())

        def graph_input() -> None:
            name = self.new_name()
            self.expect(":")
            self.values[name] = graph.add_input(name, self.type())

        self.expect("(")
        self.listed(")", graph_input)
        self.expect("{")
        while not self.take("return"):
            self.node(graph)
        outputs = self.listed("}", self.output)
        graph.set_outputs([value for value, _ in outputs], [name for _, name in outputs])
        return graph

    def output(self) -> tuple[Value, str]:
        value = self.operand()
        return value, self.string() if self.take("as") else value.name

    def new_name(self, *others: str) -> str:
        """Parse the name of a value that is not defined yet, and is none of `others`."""
        at, name = self.start, self.name()
        if name in self.values or name in others:
            self.fail(f"{quote(name)} is defined twice", at)
        return name

    def operand(self) -> Value:
        at, name = self.start, self.name()
        if name not in self.values:
            self.fail(f"{quote(name)} is not defined", at)
        return self.values[name]

    def node(self, graph: Graph) -> None:
        """Parse a node: names, op, operands, attributes, types and origin."""
        names = [self.new_name()]
        while self.take(","):
            names.append(self.new_name(*names))
        self.expect("=")
        at = self.start
        if self.take("constant"):
            self.constant(graph, names, at)
            return
        op_class = self.op_class()
        self.expect("(")
        operands = self.listed(")", self.operand)
        op = self.attributes(op_class, at)
        types = self.types() if self.take(":") else None
        origin = self.origin()
        try:
            results = graph.insert(op, operands, names=names, origin=origin).results
        except VerifyError:
            self.refuse(op, operands, names, at)
        if len(results) != len(names):
            self.refuse(op, operands, names, at)
        if types is not None and len(types) != len(names):
            self.fail(f"{len(names)} results but {len(types)} types", at)
        for name, value, declared in zip(names, results, types or [v.type for v in results], strict=True):
            self.check_rank(value.type, at)
            if not declared.same_value_type(value.type):
                self.fail(f"declared {declared} but {op.name} gives {value.type}", at)
            if declared != value.type:
                graph.set_type(value, declared)
            self.values[name] = value

    def op_class(self) -> type[Op]:
        if self.kind != "word" or self.token not in BY_NAME:
            self.fail(f"unknown op {self.token!r}")
        return BY_NAME[self.advance()]

    def refuse(self, op: Op, operands: list[Value], names: list[str], at: int) -> NoReturn:
        """Point at a node whose op refuses the operands, or has another number of results than are named."""
        try:
            inferred = op.infer(*(v.type for v in operands))
        except VerifyError as error:
            self.fail(str(error), at)
        self.fail(f"{op.name} gives {len(inferred)} results, {len(names)} are named", at)

    def constant(self, graph: Graph, names: list[str], at: int) -> None:
        if len(names) != 1:
            self.fail(f"constant gives 1 result, {len(names)} are named")
        label, items = names[0], None
        if self.take("weight"):
            self.expect("(")
            label = self.string()
            self.expect(")")
        elif self.token == "[":
            items = cast("tuple[Any, ...]", self.attribute())
        else:
            self.fail('expected [elements] or weight("label")')
        self.expect(":")
        type = self.type()
        origin = self.origin()
        literal = self.weight(label, type, at) if items is None else Literal.of(self.elements(items, type, at), label)
        node = graph.insert(Constant(literal), names=names, types=[type], origin=origin)
        self.values[names[0]] = node.result

    def weight(self, label: str, type: TensorType, at: int) -> Literal:
        """Return the given weight of that label, if it has that type."""
        if label not in self.weights:
            self.fail(f"no weight {label!r} was given", at)
        given = self.weights[label]
        if isinstance(given, Literal):
            shape, dtype = given.type.shape, given.type.dtype.numpy
        else:
            given = np.asarray(given)
            shape, dtype = given.shape, given.dtype
        if shape != type.shape or dtype != type.dtype.numpy:
            self.fail(f"weight {label!r} is {dtype}{list(shape)}, not {type}", at)
        return given if isinstance(given, Literal) else Literal.of(given, label)

    def elements(self, items: tuple[Any, ...], type: TensorType, at: int) -> np.ndarray[Any, Any]:
        """Return printed elements as an array, if the type holds each of them."""
        if len(items) != type.size:
            self.fail(f"{len(items)} elements for {type}", at)
        dtype = type.dtype
        for item in items:
            if not _holds(dtype, item):
                self.fail(f"{print_attribute(item)} is no {dtype.value}", at)
        wide = np.float64 if dtype.is_float else dtype.numpy
        return np.array(items, wide).astype(dtype.numpy).reshape(type.shape)

    def origin(self) -> list[str]:
        if not self.take("loc"):
            return []
        self.expect("(")
        return self.listed(")", self.string)

    def attributes(self, op_class: type[Op], at: int) -> Op:
        """Parse attributes in braces, and make the op."""
        declared = _declared(op_class)
        given: dict[str, Any] = {}

        def attribute() -> None:
            if self.kind != "word":
                self.fail("expected an attribute name")
            at, name = self.start, self.advance()
            if name not in declared:
                self.fail(f"{op_class.name} has no attribute {name!r}", at)
            if name in given:
                self.fail(f"{name} is given twice", at)
            self.expect("=")
            at, given[name] = self.start, self.attribute()
            if not _fits(declared[name], given[name]):
                self.fail(f"{name} takes {_wanted(declared[name])}", at)

        if self.take("{"):
            self.listed("}", attribute)
        try:
            return op_class(**given)
        except TypeError:
            missing = [f.name for f in _fields(op_class) if f.name not in given and f.default is MISSING]
            self.fail(f"{op_class.name} needs {', '.join(f'{name}=…' for name in missing)}", at)

    def attribute(self, depth: int = 0) -> Any:
        if self.kind == "string":
            return self.string()
        if self.kind == "number":
            whole = re.fullmatch(r"-?[0-9]+", self.token)
            if not whole and math.isinf(float(self.token)) and not self.token.endswith("inf"):
                self.fail(f"{self.token[:30]} is beyond the largest float")
            return self.integer() if whole else float(self.advance())
        if depth == _MAX_NESTING and self.token == "[":
            self.fail(f"lists nested deeper than {_MAX_NESTING}")
        if self.take("["):
            return tuple(self.listed("]", lambda: self.attribute(depth + 1)))
        if self.kind == "word" and self.token in ("true", "false", "none"):
            return {"true": True, "false": False, "none": None}[self.advance()]
        if self.kind == "word" and self.token in _DTYPES:
            return _DTYPES[self.advance()]
        if self.kind == "word" and self.token == "graph":
            return self.body()
        self.fail(f"expected an attribute value, found {self.token!r}")

    def body(self) -> Body:
        """Parse a graph within a graph. It sees no values but its own."""
        at, outer, self.values = self.start, self.values, {}
        self.depth += 1
        if self.depth > _MAX_BODIES:
            self.fail(f"graphs nested deeper than {_MAX_BODIES}")
        graph = self.graph()
        self.depth -= 1
        self.values = outer
        try:
            graph.verify()
        except VerifyError as error:
            self.fail(str(error), at)
        return Body(graph)

    def types(self) -> list[TensorType]:
        types = [self.type()]
        while self.take(","):
            types.append(self.type())
        return types

    def type(self) -> TensorType:
        printed = _TYPE.match(self.text, self.start)
        if printed is not None and printed[0] in self.types_by_text:
            self.position = printed.end()
            self.advance()
            return self.types_by_text[printed[0]]
        if self.token not in _DTYPES:
            self.fail(f"expected a type such as f32[1,3], found {self.token!r}")
        at, dtype = self.start, _DTYPES[self.advance()]
        shape = self.integers("[", "]")
        order = self.integers("{", "}") if self.token == "{" else ()
        within = self.integers("[", "]") if self.take("of") else ()
        try:
            type = TensorType(shape, dtype, order)
            type = replace(type, within=within) if within else type
        except VerifyError as error:
            self.fail(str(error), at)
        self.check_rank(type, at)
        if printed is not None:
            self.types_by_text[printed[0]] = type
        return type

    def check_rank(self, type: TensorType, at: int) -> None:
        if type.rank > _MAX_RANK:
            self.fail(f"a tensor of {type.rank} dims; {_MAX_RANK} is the most", at)

    def integers(self, open: str, close: str) -> tuple[int, ...]:
        self.expect(open)
        return tuple(self.listed(close, self.integer))


_DTYPES = {d.value: d for d in NUMBERS}


def _fields(op_class: type[Op]) -> Any:
    return fields(cast(Any, op_class))


@cache
def _declared(op_class: type[Op]) -> dict[str, str]:
    """Return the names of the attributes of an op with their declared types."""
    return {f.name: str(f.type if isinstance(f.type, str) else f.type.__name__) for f in _fields(op_class)}


_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text in double quotes",
    "DType": "a dtype without quotes, such as f16",
    "Body": "a graph",
}


def _wanted(declared: str) -> str:
    """Say in words what an attribute of a declared type takes."""
    if declared.startswith("tuple"):
        return f"a list, each item {_WANTED[_item(declared)]}"
    return _WANTED[declared]


def _item(declared: str) -> str:
    """Return the declared type of the items of a tuple."""
    return declared.removeprefix("tuple[").split(",")[0]


def _fits(declared: str, value: Any) -> bool:
    """Tell if a parsed value has the declared type of its attribute. A float may be written as an integer."""
    if declared.startswith("tuple"):
        return isinstance(value, tuple) and all(_fits(_item(declared), v) for v in cast("tuple[Any, ...]", value))
    if declared == "float":
        return type(value) in (int, float)
    return type(value) is {"int": int, "bool": bool, "str": str, "DType": DType, "Body": Body}[declared]


def _holds(dtype: DType, item: Any) -> bool:
    """Tell if an element type holds a parsed number or bool."""
    if not isinstance(item, int | float) or isinstance(item, bool) != (dtype is DType.BOOL):
        return False
    if dtype.is_int:
        info = np.iinfo(dtype.numpy)
        return isinstance(item, int) and int(info.min) <= item <= int(info.max)
    if dtype.is_float and math.isfinite(item):
        with np.errstate(over="ignore"):
            return bool(np.isfinite(np.float64(item).astype(dtype.numpy)))
    return True


def _unquote(text: str) -> str:
    """Remove the quotes of a string, and resolve its escapes."""

    def plain(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else code

    return re.sub(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U00(?:0[0-9a-f]|10)[0-9a-f]{4}|.)", plain, text[1:-1])
