"""Define the base class of ops, and the two ops of every graph: the constant and the closing `return`."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, ClassVar, cast

import numpy as np

from fusec.errors import VerifyError
from fusec.graph.literal import Literal
from fusec.graph.types import TensorType
from fusec.system.dataclass import dataclass

Array = Any  # numpy.ndarray or cupy.ndarray, because `reference` runs with both
HostArray = np.ndarray[Any, Any]  # always numpy.ndarray


class Op:
    """Base of every op: a frozen dataclass whose fields are the attributes.

    `infer` returns the result types for operand types, and raises VerifyError with the reason for types it refuses.
    `reference` computes the results from arrays with the array module `xp` (numpy or cupy). It computes in the
    precision of the operands, float64 included. It is the meaning of the op; memory order does not change it.
    """

    name: ClassVar[str] = ""
    commutative: ClassVar[bool] = False
    rare: ClassVar[frozenset[str]] = frozenset()  # attributes that text leaves out where they have their default

    def __post_init__(self) -> None:
        # An int in a float attribute becomes a float, so that equal ops have equal text.
        for name, declared in _float_attributes(type(self)):
            value = getattr(self, name)
            if declared == "tuple[float, ...]":
                object.__setattr__(self, name, tuple(map(float, value)))
            elif type(value) is int:
                object.__setattr__(self, name, float(value))

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        raise NotImplementedError

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        raise NotImplementedError

    @property
    def attributes(self) -> dict[str, Any]:
        """Return attribute names and values, in declaration order."""
        return {name: getattr(self, name) for name in _attribute_names(type(self))}

    @property
    def printed(self) -> dict[str, Any]:
        """Return the attributes that text shows."""
        defaults = {f.name: f.default for f in fields(cast(Any, self)) if f.name in self.rare}
        return {k: v for k, v in self.attributes.items() if k not in defaults or v != defaults[k]}


@cache
def _attribute_names(op_class: type[Op]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cast(Any, op_class)))


@cache
def _float_attributes(op_class: type[Op]) -> tuple[tuple[str, Any], ...]:
    """Return the names and declared types of the attributes that hold floats."""
    declared = ((f.name, f.type) for f in fields(cast(Any, op_class)))
    return tuple((name, type) for name, type in declared if type in ("float", float, "tuple[float, ...]"))


@dataclass(frozen=True)
class Constant(Op):
    """A tensor known at compile time."""

    literal: Literal
    name: ClassVar[str] = "constant"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        return (self.literal.type,)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return (xp.asarray(self.literal.array),)


@dataclass(frozen=True)
class Return(Op):
    """The end of a graph: its operands are the graph's outputs, `names` their public names."""

    names: tuple[str, ...] = ()
    name: ClassVar[str] = "return"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        if len(self.names) != len(operands):
            raise VerifyError(f"{len(operands)} outputs but {len(self.names)} names")
        return ()

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return ()
