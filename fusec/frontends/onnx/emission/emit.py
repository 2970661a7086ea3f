"""Emit ops into the graph for the functions that import ONNX ops, and fold small constants immediately.

All shapes are concrete, so computations of shapes become constants here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from fusec.errors import VerifyError
from fusec.frontends.custom_ops import CustomOp
from fusec.frontends.onnx.emission.host_values import Answer, Compute, HostValueError
from fusec.frontends.onnx.emission.loop_body import Surroundings, loop_body
from fusec.frontends.onnx.model_file.limits import by_blocks, require_constant
from fusec.ir import Array, Constant, DType, Graph, Literal, Node, Op, TensorType, Value
from fusec.ops import Cast, Concat, Expand, Gather, Reshape, Scan, Slice, Split, Transpose
from fusec.ops.scan import HOST_STEPS
from fusec.ops.spec import require
from fusec.system.dataclass import dataclass

if TYPE_CHECKING:
    from onnx import GraphProto

FOLD_RESULT_ELEMENTS = 4096  # the folding pass folds larger constants
FOLD_OPERAND_ELEMENTS = 1 << 16
MOVES = (Concat, Expand, Gather, Reshape, Slice, Split, Transpose)  # ops that move elements of any type
MAX_UNROLLED = 100_000  # nodes of unrolled loops; larger graphs would take too long to compile


@dataclass(frozen=True, eq=False)
class TensorList:
    """A sequence of tensors. Its length is known, so no sequence is left after the import.

    dtype: element type of an empty sequence.
    present: False for an optional value without an element. An optional value with an element is that element.
    stack: a tensor whose rows are the items, if there is one.
    """

    items: tuple[Value, ...]
    dtype: DType | None = None
    present: bool = True
    stack: Value | None = None


ModelValue = Value | TensorList  # a tensor or a sequence, by one name of the model
Results = ModelValue | tuple[ModelValue, ...]
OpFunction = Callable[..., Results]
Table = dict[tuple[str, int], OpFunction]


class Emitter:
    """Builder of the graph during the import of a model; `begin` names the node that is imported.

    outputs: number of results that the node declares (Split makes that many parts).
    host_results: inputs of the graph that were computed on the host for nodes of this import, in order.
    whole: `bounded` returns all rows, and notes in `counts` how many of them count.
    notes: messages for the user, each with the places that it is about.
    """

    def __init__(self, graph: Graph, opset: int, reserved: frozenset[str]):
        self.graph = graph
        self.opset = opset
        self.outputs = 1
        self.subgraph: Callable[[GraphProto, Sequence[ModelValue]], list[ModelValue]] = _no_body
        self.around: Callable[[GraphProto], Surroundings] = _no_surroundings
        self._reserved = reserved  # names of the model, which no intermediate value may have
        self._origin: tuple[str, ...] = ()
        self._name = ""
        self._fresh: set[Value] = set()
        self.notes: dict[str, dict[str, None]] = {}
        self.unrolled = 0
        self._loops = 0
        self._draws: Counter[str] = Counter()
        self.host_results: list[Value] = []
        self.whole = False
        self.counts: list[Value] = []
        self._answers: deque[Answer] = deque()
        self._known: dict[Value, Array] = {}

    def answer(self, answers: Sequence[Answer]) -> None:
        """Give the answers to what the next node asked in earlier imports. It asks the same, in the same order."""
        self._answers = deque(answers)
        self._known.clear()

    @contextmanager
    def tentative(self) -> Generator[None]:
        """Import something that may fail, and take no answer for it."""
        answers, self._answers = self._answers, deque()
        try:
            yield
        finally:
            self._answers = answers

    def begin(self, origin: str, outputs: Sequence[str], inner: bool = False) -> None:
        """Start the import of a node.

        origin: name of the node. The origin of new nodes, unless `inner`.
        inner: the node belongs to the body of another node, which stays the origin.
        """
        self._name = next((name for name in outputs if name), origin)
        self.outputs = len(outputs)
        if not inner:
            self._origin = (origin,)
            self._fresh.clear()

    @property
    def name(self) -> str:
        """Return the name of the current node's first result."""
        return self._name

    def state(self) -> tuple[str, int, int]:
        """Return the state that `begin` of an inner node changes, for `restore`."""
        return self._name, self.outputs, self.opset

    def restore(self, state: tuple[str, int, int]) -> None:
        self._name, self.outputs, self.opset = state

    def bind(self, value: Value, name: str) -> None:
        """Give a result of the current node its name in the model. An older value keeps its name."""
        if value not in self._fresh:
            return
        self._fresh.discard(value)
        self.graph.rename(value, name)
        if value.literal is not None:
            value.literal.label = value.name

    def note(self, what: str, where: str = "") -> None:
        """Note something for the user, and its place (by default the current node). Each note is shown once a model."""
        self.notes.setdefault(what, {})[where or f"node {self._origin[0]!r}"] = None

    def remark(self, what: str) -> None:
        """Remark why the current node becomes many ops; hints tell it. Empty: it does not."""
        self.graph.remarks.pop(self._origin[0], None)
        if what:
            self.graph.remarks[self._origin[0]] = what

    @contextmanager
    def unrolling(self) -> Generator[None]:
        """Count the nodes made within, because a small file can ask for any number of them."""
        self._loops += 1
        try:
            yield
        finally:
            self._loops -= 1

    def require_room(self, more: int = 0) -> None:
        """Check the number of unrolled nodes, including `more`. Raises VerifyError if it exceeds MAX_UNROLLED."""
        require(self.unrolled + more <= MAX_UNROLLED, f"the model unrolls to more than {MAX_UNROLLED} nodes")

    def next_draw(self) -> int:
        """Count how often the current node draws random numbers, because trips of a loop have nodes of one name."""
        self._draws[self._name] += 1
        return self._draws[self._name]

    def _insert(self, op: Op, operands: Sequence[Value], names: Sequence[str]) -> Node:
        if self._loops:
            self.unrolled += 1
        return self.graph.insert(op, operands, names=names, origin=self._origin)

    # emitting ----------------------------------------------------------------------------------------

    def __call__(self, op: Op, *operands: Value) -> Value:
        """Apply an op that has one result."""
        (value,) = self.many(op, *operands)
        return value

    def many(self, op: Op, *operands: Value) -> tuple[Value, ...]:
        """Apply an op and return all its results. Raises VerifyError if it refuses the operands."""
        if any(v.type.dtype is DType.STRING for v in operands):
            return self._moved_strings(op, operands)
        types = op.infer(*(v.type for v in operands))
        literals = [v.literal for v in operands]
        known = [literal for literal in literals if literal is not None]
        constant = len(known) == len(operands) > 0
        for type in types if constant else ():
            if type.nbytes > max(k.type.nbytes for k in known):
                require_constant(type, f"the result of {op.name},")
        if constant and isinstance(op, Expand):
            expanded = Literal(types[0], lambda: np.broadcast_to(known[0].array, op.shape), sources=known)
            return (self.literal(expanded),)
        if (
            constant
            and not _widens_weights(op, types[0], known[0].type)
            and not (isinstance(op, Scan) and op.steps > HOST_STEPS)
            and all(t.size <= FOLD_RESULT_ELEMENTS for t in types)
            and all(k.type.size <= FOLD_OPERAND_ELEMENTS for k in known)
        ):
            return tuple(map(self.constant, _evaluated(op, [k.array for k in known], types)))
        hints = [self._hint(op.name) for _ in types]
        node = self._insert(op, operands, hints)
        self._fresh.update(node.results)
        return node.results

    def _moved_strings(self, op: Op, operands: Sequence[Value]) -> tuple[Value, ...]:
        """Let the host move strings, because the device has none."""
        require(isinstance(op, MOVES) or op.name == "where", f"{op.name} takes numbers, not strings")
        op.infer(*(v.type for v in operands))  # refuses shapes that do not fit
        return self.on_host("the strings", lambda arrays: op.reference(np, *arrays), *operands)

    def constant(self, array: Any) -> Value:
        """Make a constant of the array's own dtype."""
        return self.literal(Literal.of_host(array))

    def scalar(self, number: float, like: Value) -> Value:
        """Make a constant of rank 0 of the dtype of `like`."""
        with np.errstate(all="ignore"):  # a number out of range becomes infinite, as it would at run time
            return self.constant(np.asarray(number).astype(like.type.dtype.numpy))

    def full(self, type: TensorType, element: np.ndarray[Any, Any]) -> Value:
        """Make a constant that repeats one element. Its payload takes no memory until something copies it."""
        scalar = element.reshape(())
        return self.computed(type, lambda: np.broadcast_to(scalar, type.shape))

    def computed(
        self,
        type: TensorType,
        load: Callable[[], Array],
        key: Hashable | None = None,
        sources: Sequence[Literal] = (),
    ) -> Value:
        """Make a constant that is computed at its first read. Its size is checked before it takes memory.

        key: equal for constants that are computed in the same way from the same data; default: a unique key
        sources: the constants that `load` reads
        """
        require_constant(type)
        return self.literal(Literal(type, load, key=key, sources=sources))

    def indexed(self, shape: Sequence[int], values: Callable[[Array], Any], dtype: DType = DType.I64) -> Value:
        """Make a constant whose elements are `values` of their row-major indices from 0 on."""
        type = TensorType(tuple(shape), dtype)
        return self.computed(type, lambda: by_blocks(type, values))

    def literal(self, literal: Literal, name: str = "") -> Value:
        """Make a constant of a literal. `name`: its name in the model; without one, a new name is made."""
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
        """Slice `size` elements of a dim, from `start` on."""
        shape = value.type.shape
        if start == 0 and size == shape[axis]:
            return value
        sizes = (*shape[:axis], size, *shape[axis + 1 :])
        starts = tuple(start if i == axis and size else 0 for i in range(len(shape)))
        return self(Slice(starts, sizes, (1,) * len(shape)), value)

    # reading values that must be known at import ------------------------------------------------------------

    def need(self, what: str, *values: Value | None) -> None:
        """Check that values are known. `what` names them in messages.

        Raises HostValueError if some are computed at run time; it names all of them, so that they are read together.
        """
        missing = [v for v in dict.fromkeys(values) if v is not None and v.literal is None and v not in self._known]
        if not missing:
            return
        if not self._answers:
            for value in missing:
                require(value.type.size <= FOLD_OPERAND_ELEMENTS, f"{what} has {value.type.size} elements")
            raise HostValueError(what, missing)
        arrays = self._answers.popleft()
        for value, array in zip(missing, arrays, strict=True):
            assert not isinstance(array, TensorType)
            self._known[value] = array

    def on_host(
        self, what: str, compute: Compute, *operands: Value, custom: CustomOp | None = None
    ) -> tuple[Value, ...]:
        """Return results that NumPy computes on the host: constants, or inputs of the graph if an operand is computed.

        what: names the operands in messages.
        compute: computes the results from the arrays of the operands. The shapes of the results may depend on them.
        custom: the user's function that `compute` calls. One on the device reads constants there as well.

        Raises HostValueError if operands are computed at run time and the host has not computed the results yet.
        """
        distinct = list(dict.fromkeys(operands))
        missing = [v for v in distinct if v.literal is None and v not in self._known]
        read = distinct if missing and custom is not None and custom.on_device else missing
        known = {v: self._known[v] for v in distinct if v in self._known}

        def from_read(arrays: Sequence[Array]) -> Sequence[Array]:
            given = known | dict(zip(read, arrays, strict=True))
            return compute([given[v] if v in given or v.literal is None else v.literal.array for v in operands])

        if not missing:
            return tuple(self.constant(array) for array in from_read(()))
        if not self._answers:
            raise HostValueError(what, read, from_read, custom=custom)
        return tuple(self._host_result(type) for type in self._answers.popleft() if isinstance(type, TensorType))

    def bounded(self, what: str, op: Op, *operands: Value) -> Value:
        """Return the rows that an op finds on the device. It fills some rows of its first result, and counts them.

        what: names the second result, the number of rows, in messages.

        Raises HostValueError if the host has not read the number yet.
        """
        if self._answers:
            (type,) = self._answers.popleft()
            assert isinstance(type, TensorType)
            return self._host_result(type)
        rows, count = self.many(op, *operands)
        if not self.whole:
            raise HostValueError(what, [count], rows=rows)
        self.counts.append(count)
        return rows

    def on_host_loop(
        self, what: str, body: GraphProto, first: Sequence[Value], carried: Sequence[Value]
    ) -> list[Value]:
        """Return the results of a loop that the host runs. first: the number of trips and the condition.

        Raises HostValueError until the host has run it.
        """
        require(not any(v.type.dtype is DType.STRING for v in carried), "carries strings, which its body cannot")
        if not self._answers:
            made, values = loop_body(body, first, carried, self.around(body))
            raise HostValueError(what, values, body=made)
        return [self._host_result(type) for type in self._answers.popleft() if isinstance(type, TensorType)]

    def _host_result(self, type: TensorType) -> Value:
        """Add an input for a result that the host computes."""
        value = self.graph.add_input(self.graph.free_name(self._hint("host")), type)
        self._fresh.add(value)
        self.host_results.append(value)
        return value

    def array(self, value: Value, what: str) -> np.ndarray[Any, Any]:
        """Return the payload of an operand that decides shapes. `what` names it in messages.

        Raises HostValueError if it is computed at run time.
        """
        self.need(what, value)
        literal = value.literal
        if literal is None:
            return self._known[value]
        require(literal.type.size <= FOLD_OPERAND_ELEMENTS, f"{what} has {literal.type.size} elements")
        return literal.array

    def ints(self, value: Value, what: str) -> tuple[int, ...]:
        """Return the payload of an integer operand of rank 0 or 1."""
        require(value.type.dtype.is_int, f"{what} must be integers, not {value.type.dtype.value}")
        require(value.type.rank <= 1, f"{what} must be a list, not of shape {list(value.type.shape)}")
        return tuple(int(i) for i in self.array(value, what).reshape(-1))

    def number(self, value: Value, what: str) -> float:
        """Return the payload of an operand of one element."""
        require(value.type.size == 1, f"{what} must be one number, not of shape {list(value.type.shape)}")
        return self.array(value, what).reshape(-1)[0].item()

    def _hint(self, kind: str) -> str:
        hint = f"{self._name}/{kind}"
        while hint in self._reserved:
            hint += "_"
        return hint


def _widens_weights(op: Op, result: TensorType, source: TensorType) -> bool:
    """Tell if an op makes floats of quantised weights; passes look for the 8-bit numbers."""
    narrow = source.dtype in (DType.I8, DType.U8, DType.F8E4M3)
    return isinstance(op, Cast) and narrow and source.rank > 1 and result.dtype.is_float


def _no_surroundings(body: GraphProto) -> Surroundings:
    raise VerifyError("has a body, which cannot be imported here")


def _no_body(body: GraphProto, given: Sequence[ModelValue]) -> list[ModelValue]:
    raise VerifyError("has a body, which cannot be imported here")


def _evaluated(op: Op, arrays: list[Array], types: Sequence[TensorType]) -> list[Array]:
    """Compute the results of an op of constants with its NumPy reference. Raises VerifyError if NumPy fails."""
    try:
        with np.errstate(all="ignore"):
            results = op.reference(np, *arrays)
    except (ValueError, TypeError, IndexError, ArithmeticError, MemoryError) as error:
        raise VerifyError(f"{op.name} of constants: {error}") from error
    return [np.asarray(a).astype(t.dtype.numpy, copy=False) for a, t in zip(results, types, strict=True)]


def axes_of(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Sort axes and make them non-negative. Raises VerifyError if one is out of range or given twice."""
    for axis in axes:
        require(-rank <= axis < rank, f"axis {axis} is out of range for rank {rank}")
    positive = tuple(sorted(axis % rank for axis in axes))
    require(len(set(positive)) == len(positive), f"axes {list(axes)} name a dim twice")
    return positive
