"""Define the base class of ops, and the two ops of every graph: the constant and the closing `return`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

from fusec.errors import VerifyError
from fusec.graph.literal import Literal
from fusec.graph.types import TensorType

Array = Any  # numpy.ndarray or cupy.ndarray: the reference semantics are written for both


class Op:
    """Base of every op: a frozen dataclass whose fields are the attributes.

    `infer` maps operand types to result types, and raises VerifyError with the bare reason. `reference` computes the
    results from arrays with the array module `xp` (numpy or cupy), in the operands' own precision (float64 included).
    Memory order never changes meaning.
    """

    name: ClassVar[str] = ""
    commutative: ClassVar[bool] = False

    def __post_init__(self) -> None:
        # 2 where a float is declared becomes 2.0: equal ops print alike
        for f in fields(cast(Any, self)):
            value = getattr(self, f.name)
            if f.type in ("float", float) and type(value) is int:
                object.__setattr__(self, f.name, float(value))
            elif f.type == "tuple[float, ...]":
                object.__setattr__(self, f.name, tuple(map(float, value)))

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        raise NotImplementedError

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        raise NotImplementedError

    @property
    def attributes(self) -> dict[str, Any]:
        """Return attribute names and values, in declaration order."""
        return {f.name: getattr(self, f.name) for f in fields(cast(Any, self))}


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
