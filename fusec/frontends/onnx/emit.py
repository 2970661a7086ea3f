"""What an ONNX op's function builds with: emits ops into the graph, folding small constants on the spot.

Shapes are concrete, so what a model computes only to name a shape becomes a constant here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fusec.errors import VerifyError
from fusec.frontends.onnx.limits import by_blocks, require_constant
from fusec.ir import Array, Constant, DType, Graph, Literal, Node, Op, TensorType, Value, quote
from fusec.ops import Cast, Expand, Reshape, Slice
from fusec.ops.spec import require

if TYPE_CHECKING:
    from onnx import GraphProto

FOLD_RESULT_ELEMENTS = 4096  # larger constants are left to the folding pass
FOLD_OPERAND_ELEMENTS = 1 << 16
MAX_UNROLLED = 100_000  # nodes made of loops: a larger graph is no use to anybody


class HostValueError(VerifyError):
    """`value` decides shapes or control flow, and is computed at run time."""

    def __init__(self, message: str, value: Value):
        super().__init__(message)
        self.value = value


@dataclass(frozen=True, eq=False)
class TensorList:
    """A sequence of tensors: its length is known, so it is resolved during import."""

    items: tuple[Value, ...]
    dtype: DType | None = None  # of an empty one


Held = Value | TensorList  # what a name of the model stands for
Results = Held | tuple[Held, ...]
OpFunction = Callable[..., Results]
Table = dict[tuple[str, int], OpFunction]


class Emitter:
    """Builds the graph, node by node of the model; `begin` names the node being imported.

    `outputs` says how many results that node declares (Split cuts into as many).
    """

    def __init__(self, graph: Graph, opset: int, reserved: frozenset[str]):
        self.graph = graph
        self.opset = opset
        self.outputs = 1
        self.subgraph: Callable[[GraphProto, Sequence[Held]], list[Held]] = _no_body
        self._reserved = reserved  # names the model uses: no intermediate may take one
        self._origin: tuple[str, ...] = ()
        self._name = ""
        self._fresh: set[Value] = set()
        self.notes: dict[str, dict[str, None]] = {}  # what a user should know of the import -> where it was met
        self.unrolled = 0
        self._loops = 0

    def begin(self, origin: str, outputs: Sequence[str], inner: bool = False) -> None:
        """`inner`: the node is part of the body of another, which stays in progress and is the origin."""
        self._name = next((name for name in outputs if name), origin)
        self.outputs = len(outputs)
        if not inner:
            self._origin = (origin,)
            self._fresh.clear()

    @property
    def name(self) -> str:
        """What the current node's first result is called."""
        return self._name

    def state(self) -> tuple[str, int, int]:
        """What `begin` sets and an inner node changes."""
        return self._name, self.outputs, self.opset

    def restore(self, state: tuple[str, int, int]) -> None:
        self._name, self.outputs, self.opset = state

    def bind(self, value: Value, name: str) -> None:
        """Give a result of the current node its name in the model; one that was there before keeps its own."""
        if value not in self._fresh:
            return
        self._fresh.discard(value)
        self.graph.rename(value, name)
        if value.literal is not None:
            value.literal.label = value.name

    def note(self, what: str, where: str = "") -> None:
        """Tell the user, once a model, what was done and at which places; default: at the current node."""
        self.notes.setdefault(what, {})[where or f"node {self._origin[0]!r}"] = None

    @contextmanager
    def unrolling(self) -> Generator[None]:
        """Count the nodes made within, which a small file can ask for in any number."""
        self._loops += 1
        try:
            yield
        finally:
            self._loops -= 1

    def require_room(self, more: int = 0) -> None:
        """VerifyError if loops have made too many nodes, `more` included."""
        require(self.unrolled + more <= MAX_UNROLLED, f"the model unrolls to more than {MAX_UNROLLED} nodes")

    def _insert(self, op: Op, operands: Sequence[Value], names: Sequence[str]) -> Node:
        if self._loops:
            self.unrolled += 1
        return self.graph.insert(op, operands, names=names, origin=self._origin)

    # emitting ----------------------------------------------------------------------------------------

    def __call__(self, op: Op, *operands: Value) -> Value:
        """Apply an op with one result."""
        (value,) = self.many(op, *operands)
        return value

    def many(self, op: Op, *operands: Value) -> tuple[Value, ...]:
        """Apply an op; VerifyError with the reason alone if it refuses the operands."""
        types = op.infer(*(v.type for v in operands))
        literals = [v.literal for v in operands]
        known = [literal for literal in literals if literal is not None]
        constant = len(known) == len(operands) > 0
        for type in types if constant else ():
            if type.nbytes > max(k.type.nbytes for k in known):
                require_constant(type, f"the result of {op.name},")
        if constant and isinstance(op, Expand):
            return (self.literal(Literal(types[0], lambda: np.broadcast_to(known[0].array, op.shape))),)
        if (
            constant
            and all(t.size <= FOLD_RESULT_ELEMENTS for t in types)
            and all(k.type.size <= FOLD_OPERAND_ELEMENTS for k in known)
        ):
            return tuple(map(self.constant, _evaluated(op, [k.array for k in known], types)))
        hints = [self._hint(op.name) for _ in types]
        node = self._insert(op, operands, hints)
        self._fresh.update(node.results)
        return node.results

    def constant(self, array: Any) -> Value:
        """A constant of the array's own dtype."""
        return self.literal(Literal.of(array))

    def scalar(self, number: float, like: Value) -> Value:
        """A rank-0 constant of the dtype of `like`."""
        with np.errstate(all="ignore"):  # beyond the dtype's range it is infinite, as a computed one would be
            return self.constant(np.asarray(number).astype(like.type.dtype.numpy))

    def full(self, type: TensorType, element: np.ndarray[Any, Any]) -> Value:
        """A constant repeating one element: its payload takes no memory until something copies it."""
        scalar = element.reshape(())
        return self.computed(type, lambda: np.broadcast_to(scalar, type.shape))

    def computed(self, type: TensorType, load: Callable[[], Array]) -> Value:
        """A constant that is computed when first read: its size is checked before it takes memory."""
        require_constant(type)
        return self.literal(Literal(type, load))

    def indexed(self, shape: Sequence[int], values: Callable[[Array], Any], dtype: DType = DType.I64) -> Value:
        """A constant with `values` of the indices 0, 1, … of its elements in row-major order."""
        type = TensorType(tuple(shape), dtype)
        return self.computed(type, lambda: by_blocks(type, values))

    def literal(self, literal: Literal, name: str = "") -> Value:
        """A constant holding the literal; a name of the model's is given, others are made up."""
        node = self._insert(Constant(literal), (), [name or self._hint("constant")])
        literal.label = literal.label or node.result.name
        if not name:
            self._fresh.add(node.result)
        return node.result

    def cast(self, value: Value, dtype: DType) -> Value:
        return value if value.type.dtype is dtype else self(Cast(dtype), value)

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        return value if value.type.shape == tuple(shape) else self(Reshape(tuple(shape)), value)

    def window(self, value: Value, axis: int, start: int, size: int) -> Value:
        """`size` elements of a dim, from `start` on."""
        shape = value.type.shape
        if start == 0 and size == shape[axis]:
            return value
        sizes = (*shape[:axis], size, *shape[axis + 1 :])
        starts = tuple(start if i == axis and size else 0 for i in range(len(shape)))
        return self(Slice(starts, sizes, (1,) * len(shape)), value)

    # reading what must be known at import ------------------------------------------------------------

    def array(self, value: Value, what: str) -> np.ndarray[Any, Any]:
        """The payload of an operand that decides shapes; VerifyError if it is computed at run time."""
        literal = value.literal
        if literal is None:
            raise HostValueError(
                f"{what} must be known at import, but {quote(value.name)} is computed at run time", value
            )
        require(literal.type.size <= FOLD_OPERAND_ELEMENTS, f"{what} has {literal.type.size} elements")
        return literal.array

    def ints(self, value: Value, what: str) -> tuple[int, ...]:
        """The payload of an integer operand of rank 0 or 1."""
        require(value.type.dtype.is_int, f"{what} must be integers, not {value.type.dtype.value}")
        require(value.type.rank <= 1, f"{what} must be a list, not of shape {list(value.type.shape)}")
        return tuple(int(i) for i in self.array(value, what).reshape(-1))

    def number(self, value: Value, what: str) -> float:
        """The payload of a one-element operand."""
        require(value.type.size == 1, f"{what} must be one number, not of shape {list(value.type.shape)}")
        return self.array(value, what).reshape(-1)[0].item()

    def _hint(self, kind: str) -> str:
        hint = f"{self._name}/{kind}"
        while hint in self._reserved:
            hint += "_"
        return hint


def _no_body(body: GraphProto, given: Sequence[Held]) -> list[Held]:
    raise VerifyError("has a body, where none can be imported")


def _evaluated(op: Op, arrays: list[Array], types: Sequence[TensorType]) -> list[Array]:
    """The op's results by its reference; whatever NumPy refuses is a refusal of the model."""
    try:
        with np.errstate(all="ignore"):
            results = op.reference(np, *arrays)
    except (ValueError, TypeError, IndexError, ArithmeticError, MemoryError) as error:
        raise VerifyError(f"{op.name} of constants: {error}") from error
    return [np.asarray(a).astype(t.dtype.numpy, copy=False) for a, t in zip(results, types, strict=True)]


def axes_of(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Axes in ascending order, none negative; VerifyError for one out of range or given twice."""
    for axis in axes:
        require(-rank <= axis < rank, f"axis {axis} is out of range for rank {rank}")
    positive = tuple(sorted(axis % rank for axis in axes))
    require(len(set(positive)) == len(positive), f"axes {list(axes)} name a dim twice")
    return positive
