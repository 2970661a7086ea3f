"""Parse the text form of a graph, the inverse of printing; errors point at the place with a caret."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, NoReturn, cast

import numpy as np

from fusec.errors import ModelError, VerifyError
from fusec.ir import Array, Constant, DType, Graph, Literal, Op, TensorType, Value, print_attribute, quote
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
_INTEGER = re.compile(r"-?[0-9]{1,20}")  # what 64 bits hold, and a little more
_MAX_RANK = 32
_MAX_NESTING = 8  # of lists in attributes


def parse(text: str, weights: Mapping[str, Array | Literal] | None = None) -> Graph:
    """Parse one graph. Large constants, printed as weight("label"), are looked up in `weights`: an array is
    copied, a literal is taken as it is, and not read.

    Raises ModelError with line, column and a caret for bad syntax, unknown ops, ill-typed nodes and
    missing weights. The result is verified.
    """
    parser = _Parser(text, weights or {})
    graph = parser.graph()
    parser.expect_end()
    try:
        graph.verify()
    except VerifyError as error:
        raise ModelError(str(error)) from error
    return graph


class _Parser:
    def __init__(self, text: str, weights: Mapping[str, Array | Literal]):
        self.text = text
        self.weights = weights
        self.position = 0
        self.kind, self.token, self.start = "", "", 0
        self.values: dict[str, Value] = {}
        self.advance()

    # tokens ------------------------------------------------------------------------------------------

    def advance(self) -> str:
        """Move to the next token; returns the one before it."""
        previous = self.token
        match = _TOKEN.match(self.text, self.position)
        if match is None:
            self.start = len(self.text) - len(self.text[self.position :].lstrip())
            found = self.text[self.start : self.start + 1]
            self.fail("a string without its closing quote" if found == '"' else f"unexpected character {found!r}")
        self.kind = str(match.lastgroup)
        self.token, self.start = match[self.kind], match.start(self.kind)
        self.position = match.end()
        return previous

    def fail(self, reason: str) -> NoReturn:
        before = self.text[: self.start]
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

    def expect_end(self) -> None:
        if self.kind != "end":
            self.fail(f"unexpected {self.token!r} after the graph")

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
        self.expect("(")
        while not self.take(")"):
            at, name = self.start, self.name()
            self.expect(":")
            type = self.type()
            if name in self.values:
                self.start = at
                self.fail(f"{quote(name)} is defined twice")
            self.values[name] = graph.add_input(name, type)
            if self.token != ")":
                self.expect(",")
        self.expect("{")
        while not self.take("return"):
            self.node(graph)
        outputs: list[Value] = []
        names: list[str] = []
        while not self.take("}"):
            value = self.operand()
            outputs.append(value)
            names.append(self.string() if self.take("as") else value.name)
            if self.token != "}":
                self.expect(",")
        graph.set_outputs(outputs, names)
        return graph

    def operand(self) -> Value:
        at, name = self.start, self.name()
        if name not in self.values:
            self.start = at
            self.fail(f"{quote(name)} is not defined")
        return self.values[name]

    def node(self, graph: Graph) -> None:
        names: list[str] = []
        while not names or self.take(","):
            at, name = self.start, self.name()
            if name in self.values or name in names:
                self.start = at
                self.fail(f"{quote(name)} is defined twice")
            names.append(name)
        self.expect("=")
        op_at = self.start
        if self.token == "constant":
            self.advance()
            self.constant(graph, names, op_at)
            return
        if self.kind != "word" or self.token not in BY_NAME:
            self.fail(f"unknown op {self.token!r}")
        op_class = BY_NAME[self.advance()]
        self.expect("(")
        operands: list[Value] = []
        while not self.take(")"):
            operands.append(self.operand())
            if self.token != ")":
                self.expect(",")
        op = self.attributes(op_class, op_at)
        types = self.types() if self.take(":") else None
        origin = self.origin()
        after = self.start
        self.start = op_at
        try:
            inferred = op.infer(*(v.type for v in operands))
        except VerifyError as error:
            self.fail(str(error))
        if len(inferred) != len(names):
            self.fail(f"{op.name} gives {len(inferred)} results, {len(names)} are named")
        if types is not None and len(types) != len(names):
            self.fail(f"{len(names)} results but {len(types)} types")
        for declared, type in zip(types or inferred, inferred, strict=True):
            self.check_size(type)
            if not declared.same_value_type(type):
                self.fail(f"declared {declared} but {op.name} gives {type}")
        self.start = after
        node = graph.insert(op, operands, names=names, types=types, origin=origin)
        self.values.update((v.name, v) for v in node.results)

    def constant(self, graph: Graph, names: list[str], at: int) -> None:
        if len(names) != 1:
            self.fail(f"constant gives 1 result, {len(names)} are named")
        if self.token == "weight":
            self.advance()
            self.expect("(")
            label, items = self.string(), None
            self.expect(")")
        elif self.token == "[":
            label, items = names[0], cast("tuple[Any, ...]", self.attribute())
        else:
            self.fail('expected [elements] or weight("label")')
        self.expect(":")
        type = self.type()
        origin = self.origin()
        after, self.start = self.start, at
        if items is not None:
            if len(items) != type.size:
                self.fail(f"{len(items)} elements for {type}")
            literal = Literal.of(self.elements(items, type), label)
        else:
            if label not in self.weights:
                self.fail(f"no weight {label!r} was given")
            given = self.weights[label]
            literal = given if isinstance(given, Literal) else None
            if literal is None:
                array = np.asarray(given)
                shape, dtype = array.shape, array.dtype
            else:
                shape, dtype = literal.type.shape, literal.type.dtype.numpy
            if shape != type.shape or dtype != type.dtype.numpy:
                self.fail(f"weight {label!r} is {dtype}{list(shape)}, not {type}")
            literal = literal or Literal.of(given, label)
        self.start = after
        node = graph.insert(Constant(literal), names=names, types=[type], origin=origin)
        self.values[names[0]] = node.result

    def elements(self, items: tuple[Any, ...], type: TensorType) -> np.ndarray[Any, Any]:
        dtype = type.dtype
        for item in items:
            held = isinstance(item, bool) == (dtype is DType.BOOL) and isinstance(item, int | float)
            if held and dtype.is_int:
                info = np.iinfo(dtype.numpy)
                held = isinstance(item, int) and int(info.min) <= item <= int(info.max)
            if held and dtype.is_float and math.isfinite(item):
                with np.errstate(over="ignore"):
                    held = bool(np.isfinite(np.float64(item).astype(dtype.numpy)))
            if not held:
                self.fail(f"{print_attribute(item)} is no {dtype.value}")
        wide = np.float64 if dtype.is_float else dtype.numpy
        return np.array(items, wide).astype(dtype.numpy).reshape(type.shape)

    def origin(self) -> list[str]:
        origin: list[str] = []
        if self.take("loc"):
            self.expect("(")
            while not self.take(")"):
                origin.append(self.string())
                if self.token != ")":
                    self.expect(",")
        return origin

    def attributes(self, op_class: type[Op], at: int) -> Op:
        given: dict[str, Any] = {}
        if self.take("{"):
            while not self.take("}"):
                if self.kind != "word":
                    self.fail("expected an attribute name")
                name_at, name = self.start, self.advance()
                declared = {
                    f.name: str(f.type if isinstance(f.type, str) else f.type.__name__) for f in _fields(op_class)
                }
                if name not in declared or name in given:
                    self.start = name_at
                    known = name in declared
                    self.fail(f"{name} is given twice" if known else f"{op_class.name} has no attribute {name!r}")
                self.expect("=")
                value_at, value = self.start, self.attribute()
                if declared[name] == "float" and isinstance(value, int) and not isinstance(value, bool):
                    value = float(value)
                if declared[name] == "tuple[float, ...]" and isinstance(value, tuple):
                    items = cast("tuple[Any, ...]", value)
                    value = tuple(float(v) if type(v) is int else v for v in items)
                if not _fits(declared[name], value):
                    self.start = value_at
                    self.fail(f"{name} takes {declared[name]}")
                given[name] = value
                if self.token != "}":
                    self.expect(",")
        try:
            return op_class(**given)
        except TypeError:
            self.start = at
            missing = [f.name for f in _fields(op_class) if f.name not in given and f.default is MISSING]
            self.fail(f"{op_class.name} needs {', '.join(f'{name}=…' for name in missing)}")

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
            items: list[Any] = []
            while not self.take("]"):
                items.append(self.attribute(depth + 1))
                if self.token != "]":
                    self.expect(",")
            return tuple(items)
        if self.kind == "word" and self.token in ("true", "false", "none"):
            return {"true": True, "false": False, "none": None}[self.advance()]
        if self.kind == "word" and self.token in _DTYPES:
            return _DTYPES[self.advance()]
        self.fail(f"expected an attribute value, found {self.token!r}")

    def types(self) -> list[TensorType]:
        types = [self.type()]
        while self.take(","):
            types.append(self.type())
        return types

    def type(self) -> TensorType:
        if self.token not in _DTYPES:
            self.fail(f"expected a type such as f32[1,3], found {self.token!r}")
        at, dtype = self.start, _DTYPES[self.advance()]
        shape = self.integers("[", "]")
        order = self.integers("{", "}") if self.token == "{" else ()
        within = self.integers("[", "]") if self.take("of") else ()
        after, self.start = self.start, at
        try:
            type = TensorType(shape, dtype, order)
            type = replace(type, within=within) if within else type
        except VerifyError as error:
            self.fail(str(error))
        self.check_size(type)
        self.start = after
        return type

    def check_size(self, type: TensorType) -> None:
        if type.rank > _MAX_RANK:
            self.fail(f"a tensor of {type.rank} dims; {_MAX_RANK} is the most")

    def integers(self, open: str, close: str) -> tuple[int, ...]:
        self.expect(open)
        items: list[int] = []
        while not self.take(close):
            items.append(self.integer())
            if self.token != close:
                self.expect(",")
        return tuple(items)


_DTYPES = {d.value: d for d in DType}


def _fields(op_class: type[Op]) -> Any:
    return fields(cast(Any, op_class))


def _fits(declared: str, value: Any) -> bool:
    """Tell if a parsed value has the attribute's declared type."""
    if declared.startswith("tuple"):
        item = declared.removeprefix("tuple[").split(",")[0]
        return isinstance(value, tuple) and all(_fits(item, v) for v in cast("tuple[Any, ...]", value))
    expected: type = {"int": int, "float": float, "bool": bool, "str": str, "DType": DType}[declared]
    return type(value) is expected


def _unquote(text: str) -> str:
    def plain(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else code

    return re.sub(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U00(?:0[0-9a-f]|10)[0-9a-f]{4}|.)", plain, text[1:-1])
