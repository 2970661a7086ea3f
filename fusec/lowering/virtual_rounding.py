"""Which values are rounded to their storage type inside a cuDNN step, and which stay in fp32 from op to op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fusec.ir import Constant, DType, Node, Value
from fusec.lowering.dim_folding import VIEWS
from fusec.ops import Conv, ConvTranspose, MatMul

HALVES = (DType.F16, DType.BF16)
PRODUCTS = (Conv, ConvTranspose, MatMul)

ROUNDED = "rounded"  # to its storage type, in front of a product
SAME = "same"  # not rounded, but the op that reads it commutes with rounding
WIDE = "fp32"  # not rounded
OWN = "own"  # of a type that registers hold exactly

# f(round(x)) = round(f(x)) for operands that are each rounded to one type: rounding is monotone and odd.
_COMMUTES = frozenset({"relu", "neg", "abs", "max", "min", "where", "identity"})


@dataclass(frozen=True)
class Edge:
    """A value made and read inside one step: one of the four words above."""

    value: Value
    user: Node
    kept: str


def edges(nodes: Sequence[Node]) -> Iterator[Edge]:
    """The edges between the computing nodes of one step (or body), in order."""
    inside = {n for n in nodes if not isinstance(n.op, (Constant, *VIEWS))}
    for node in nodes:
        for value in node.results if node in inside else ():
            yield from (Edge(value, user, _kept(value, user)) for user in value.users if user in inside)


def _kept(value: Value, user: Node) -> str:
    if value.type.dtype not in HALVES:
        return OWN
    if isinstance(user.op, PRODUCTS):
        return ROUNDED
    return SAME if _commutes(user, value.type.dtype) else WIDE


def _commutes(user: Node, dtype: DType) -> bool:
    """Whether the op gives the same whether its operands or its result are rounded."""
    if len(user.results) != 1 or user.result.type.dtype is not dtype:
        return False
    if user.op.name == "clip":
        limits = (user.op.attributes["min"], user.op.attributes["max"])
        return all(float(np.asarray(x).astype(dtype.numpy)) == x for x in limits)
    if user.op.name == "add":  # the zero bias of a spelling
        return any(v.literal is not None and not v.literal.array.any() for v in user.operands)
    return user.op.name in _COMMUTES
