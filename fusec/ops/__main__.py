"""Print the tables of docs/ir.md from the registry: `python -m fusec.ops`."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from typing import Any, cast

from fusec.ir import Op, print_attribute
from fusec.ops import ALL, Pointwise

_DTYPES = {
    "float": "float",
    "number": "int, float",
    "any": "any",
    "bool": "bool",
    "integer": "int",
    "compare": "any → bool",
    "test": "float → bool",
    "select": "bool, any, any",
}


def _attributes(op: type[Op]) -> str:
    spelled: list[str] = []
    for f in fields(cast(Any, op)):
        kind = str(f.type if isinstance(f.type, str) else f.type.__name__)
        default = "" if f.default is MISSING else f" = {print_attribute(f.default)}"
        spelled.append(f"`{f.name}: {kind}{default}`")
    return ", ".join(spelled)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def markdown() -> str:
    """Return a table of the pointwise ops and one of the others."""
    lines = ["| Pointwise op | Operands | Element types | Attributes |", "|---|---|---|---|"]
    for op in ALL:
        if issubclass(op, Pointwise):
            row = op.row
            operands = f"{row.arity}, in either order" if row.commutative else str(row.arity)
            lines.append(_row(f"`{op.name}`", operands, _DTYPES[row.rule], _attributes(op)))
    lines += ["", "| Other op | Attributes | Meaning |", "|---|---|---|"]
    for op in ALL:
        if not issubclass(op, Pointwise):
            meaning = " ".join(inspect.cleandoc(op.__doc__ or "").split())
            lines.append(_row(f"`{op.name}`", _attributes(op), re.sub(r"([|*])", r"\\\1", meaning)))
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
