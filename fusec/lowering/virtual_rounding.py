"""Find where a cuDNN step rounds a value to its storage type, and where it keeps fp32 between ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fusec.ir import HALVES, Constant, DType, Node, Value
from fusec.ops import LINEAR_OPS, STRIDED_VIEWS
from fusec.system.dataclass import dataclass

ROUNDED = "rounded"  # rounded to its storage type, because a product reads it
SAME = "same"  # not rounded, but the op that reads it commutes with rounding
WIDE = "fp32"  # not rounded
OWN = "own"  # of a type that registers hold exactly

# f(round(x)) = round(f(x)) for these ops, because rounding is monotone and odd.
_COMMUTES = frozenset({"relu", "neg", "abs", "max", "min", "where", "identity"})


@dataclass(frozen=True)
class ValueUse:
    """A value that is computed and read inside one step. rounding: one of the four words above."""

    value: Value
    user: Node
    rounding: str


def value_uses(nodes: Sequence[Node]) -> Iterator[ValueUse]:
    """Yield each use of a value inside one step, in order of the nodes; constants and views do not count."""
    inside = {n for n in nodes if not isinstance(n.op, (Constant, *STRIDED_VIEWS))}
    for node in nodes:
        for value in node.results if node in inside else ():
            yield from (ValueUse(value, user, _rounding(value, user)) for user in value.users if user in inside)


def _rounding(value: Value, user: Node) -> str:
    if value.type.dtype not in HALVES:
        return OWN
    if isinstance(user.op, LINEAR_OPS):
        return ROUNDED
    return SAME if _commutes(user, value.type.dtype) else WIDE


def _commutes(user: Node, dtype: DType) -> bool:
    """Tell if rounding the operands of an op gives the same as rounding its result."""
    if len(user.results) != 1 or user.result.type.dtype is not dtype:
        return False
    if user.op.name == "clip":
        limits = (user.op.attributes["min"], user.op.attributes["max"])
        return all(float(np.asarray(x).astype(dtype.numpy)) == x for x in limits)
    if user.op.name == "add":  # the zero bias of a spelling
        return any(v.literal is not None and not v.literal.array.any() for v in user.operands)
    return user.op.name in _COMMUTES
