"""Print a graph, its nodes, attributes and constants as text; `fusec.text` parses it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fusec.graph.body import Body
from fusec.graph.literal import Literal
from fusec.graph.op import Constant, Op, Return
from fusec.graph.types import DType

if TYPE_CHECKING:
    from fusec.ir import Graph, Node

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.$/:-]*[A-Za-z0-9_.$/-]\Z")  # no colon at the end: it comes before a type
INLINE_ELEMENTS = 16  # constants of at most this many elements are printed with their numbers


def quote(name: str) -> str:
    """Return `%name`, with quotes around a name whose characters the parser would read otherwise."""
    if _PLAIN_NAME.match(name):
        return f"%{name}"
    return f"%{quote_string(name)}"


def quote_string(text: str) -> str:
    """Quote a string, and escape quotes, backslashes and unprintable characters by backslashes."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped if escaped.isprintable() else "".join(map(_escaped, escaped))}"'


def _escaped(character: str) -> str:
    """Write an unprintable character as its number, because a terminal obeys some of them, such as ESC."""
    code = ord(character)
    if character.isprintable():
        return character
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def print_attribute(value: Any) -> str:
    """Print one attribute value."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, DType):
        return value.value
    if isinstance(value, str):
        return quote_string(value)
    if isinstance(value, float):
        return repr(float(value))  # NumPy's own scalars are floats too, and print otherwise
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Body):
        return value.text
    if isinstance(value, tuple):
        return "[" + ", ".join(print_attribute(v) for v in cast("tuple[Any, ...]", value)) + "]"
    raise TypeError(f"attribute of type {type(value).__name__}")


def print_literal(literal: Literal) -> str:
    """Print a small constant with its numbers (floats exactly, as repr does), a large one as `weight("label")`."""
    if literal.type.size > INLINE_ELEMENTS:
        return f"weight({quote_string(literal.label)})"
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        dtype = literal.type.dtype
        inexact = dtype.is_float or (dtype.is_narrow and not dtype.is_narrow_int)
        items = literal.array.astype(np.float64) if inexact else literal.array
        items = items.astype(np.int64) if dtype.is_narrow_int else items
    return "[" + ", ".join(print_attribute(v) for v in items.reshape(-1).tolist()) + "]"


def print_node(node: Node, locations: bool = False, label: Callable[[Literal], str] | None = None) -> str:
    """Print a node as one line.

    locations: append the names of the source-model nodes it was made from.
    label: name each constant, whatever its size, by this function, and leave its numbers out.
    """
    left = ", ".join(quote(v.name) for v in node.results)
    if isinstance(node.op, Constant):
        literal = node.op.literal
        body = f"constant {f'weight({quote_string(label(literal))})' if label else print_literal(literal)}"
    elif isinstance(node.op, Return):
        outputs = zip(node.operands, node.op.names, strict=False)  # not strict, so that a malformed return prints too
        body = "return " + ", ".join(
            quote(v.name) if v.name == n else f"{quote(v.name)} as {quote_string(n)}" for v, n in outputs
        )
    else:
        body = f"{node.op.name}({', '.join(quote(v.name) for v in node.operands)}){_attributes(node.op)}"
    text = f"{left} = {body}" if left else body
    if node.results:
        text += " : " + ", ".join(str(v.type) for v in node.results)
    if locations and node.origin:
        text += " loc(" + ", ".join(quote_string(o) for o in node.origin) + ")"
    return text


def print_op(op: Op) -> str:
    """Print an op without operands; `fusec.text.parse_op` parses it."""
    return f"{op.name}{_attributes(op)}"


def _attributes(op: Op) -> str:
    printed = ", ".join(f"{name}={print_attribute(value)}" for name, value in op.printed.items())
    return f" {{{printed}}}" if printed else ""


def print_graph(graph: Graph, locations: bool = False, label: Callable[[Literal], str] | None = None) -> str:
    """Print a graph. locations, label: see `print_node`."""
    head = ", ".join(f"{quote(v.name)}: {v.type}" for v in graph.inputs)
    lines = [f"graph {quote_string(graph.name)} ({head}) {{"]
    lines += [f"  {print_node(node, locations, label)}" for node in [*graph.nodes, graph.return_node]]
    return "\n".join([*lines, "}"])
