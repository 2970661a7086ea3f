"""The IR: tensors with a type, nodes in SSA form, and a graph that owns both.

Types and ops are frozen values; `Value` and `Node` are compared by identity, and only the five verbs
of `Graph` (insert, set_input, set_type, replace, erase) change wiring, so use lists are always right.
Graph outputs are the operands of one closing `return` node: replacing or erasing has no special case.
"""

# Graph, Node and Value share their links and use lists; nothing outside this file may touch them.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import enum
import hashlib
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

import ml_dtypes
import numpy as np

from fusec.errors import VerifyError

Array = Any  # numpy.ndarray or cupy.ndarray: the reference semantics are written for both


class DType(enum.Enum):
    """An element type; the value is its spelling in the text form."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U64 = "u64"
    U32 = "u32"
    U16 = "u16"
    U8 = "u8"
    BOOL = "bool"
    F8E4M3 = "f8e4m3"
    F8E4M3FNUZ = "f8e4m3fnuz"
    F8E5M2 = "f8e5m2"
    F8E5M2FNUZ = "f8e5m2fnuz"
    F8E8M0 = "f8e8m0"
    F4E2M1 = "f4e2m1"
    I4 = "i4"
    U4 = "u4"
    I2 = "i2"
    U2 = "u2"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype; bf16 comes from ml_dtypes."""
        return _NUMPY[self]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _NUMPY[self].itemsize

    @property
    def is_float(self) -> bool:
        return self in _FLOATS

    @property
    def is_int(self) -> bool:
        return self not in _FLOATS and self is not DType.BOOL and self not in _NARROW

    @property
    def is_narrow(self) -> bool:
        """Floats of 8 bits or fewer and integers below 8: kept, moved and cast, but not computed with."""
        return self in _NARROW

    @property
    def is_narrow_int(self) -> bool:
        return self in (DType.I4, DType.U4, DType.I2, DType.U2)

    @property
    def saturates(self) -> bool:
        """Whether a cast may keep what lies beyond the range of a narrow float at its greatest value."""
        return self in _NARROW and not self.is_narrow_int and self is not DType.F8E8M0

    @property
    def epsilon(self) -> float:
        """Distance from 1.0 to the next value of a floating type; 0 for the others."""
        return float(ml_dtypes.finfo(_NUMPY[self]).eps) if self.is_float else 0.0

    @classmethod
    def of(cls, dtype: Any) -> DType:
        """The DType of a NumPy dtype (or anything numpy.dtype takes); VerifyError if there is none."""
        try:
            return _FROM_NUMPY[np.dtype(dtype)]
        except (KeyError, TypeError):
            raise VerifyError(f"element type {dtype} is not one fusec knows") from None


_FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
_NARROW: dict[DType, np.dtype[Any]] = {
    DType.F8E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.F8E4M3FNUZ: np.dtype(ml_dtypes.float8_e4m3fnuz),
    DType.F8E5M2: np.dtype(ml_dtypes.float8_e5m2),
    DType.F8E5M2FNUZ: np.dtype(ml_dtypes.float8_e5m2fnuz),
    DType.F8E8M0: np.dtype(ml_dtypes.float8_e8m0fnu),
    DType.F4E2M1: np.dtype(ml_dtypes.float4_e2m1fn),
    DType.I4: np.dtype(ml_dtypes.int4),
    DType.U4: np.dtype(ml_dtypes.uint4),
    DType.I2: np.dtype(ml_dtypes.int2),
    DType.U2: np.dtype(ml_dtypes.uint2),
}
_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.I64: np.dtype(np.int64),
    DType.I32: np.dtype(np.int32),
    DType.I16: np.dtype(np.int16),
    DType.I8: np.dtype(np.int8),
    DType.U64: np.dtype(np.uint64),
    DType.U32: np.dtype(np.uint32),
    DType.U16: np.dtype(np.uint16),
    DType.U8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.bool_),
    **_NARROW,
}
_FROM_NUMPY = {v: k for k, v in _NUMPY.items()}


@dataclass(frozen=True)
class TensorType:
    """Shape, element type and memory order of a tensor.

    `order` lists the dims from outermost to innermost in memory; `()` stands for row-major.
    NHWC storage of an NCHW-shaped tensor is `order=(0, 2, 3, 1)`. Storage is packed, unless the tensor lies `within` a
    larger one: then that is the shape of the larger one, whose strides it has. Where it begins there, the ops say that
    use it.
    """

    shape: tuple[int, ...]
    dtype: DType
    order: tuple[int, ...] = ()
    within: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.within and (
            len(self.within) != len(self.shape) or any(w < d for w, d in zip(self.within, self.shape, strict=True))
        ):
            raise VerifyError(f"{list(self.shape)} is no part of {list(self.within)}")
        if any(d < 0 for d in self.shape):
            raise VerifyError(f"negative dimension in shape {list(self.shape)}")
        if self.order:
            if sorted(self.order) != list(range(len(self.shape))):
                raise VerifyError(f"memory order {self.order} does not permute {len(self.shape)} dims")
            if self.order == tuple(range(len(self.shape))):
                object.__setattr__(self, "order", ())

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements, per logical dim."""
        shape = self.within or self.shape
        strides = [0] * self.rank
        step = 1
        for dim in reversed(self.order or range(self.rank)):
            strides[dim] = step
            step *= max(shape[dim], 1)
        return tuple(strides)

    @property
    def span(self) -> int:
        """Elements of memory from the first to the last, both included."""
        if not self.within or not self.size:
            return self.size
        return 1 + sum((d - 1) * stride for d, stride in zip(self.shape, self.strides, strict=True))

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(self.shape, dtype, self.order)

    def with_order(self, order: tuple[int, ...]) -> TensorType:
        return TensorType(self.shape, self.dtype, order)

    def same_value_type(self, other: TensorType) -> bool:
        """Equal shape and dtype; memory order is storage, not meaning."""
        return self.shape == other.shape and self.dtype == other.dtype

    def __str__(self) -> str:
        order = "{" + ",".join(map(str, self.order)) + "}" if self.order else ""
        within = " of [" + ",".join(map(str, self.within)) + "]" if self.within else ""
        return f"{self.dtype.value}[{','.join(map(str, self.shape))}]{order}{within}"


def channels_last(rank: int) -> tuple[int, ...]:
    """The memory order N, spatial…, C for a tensor of shape N, C, spatial… (rank 3 and up)."""
    return (0, *range(2, rank), 1)


class Op:
    """Base of every op: a frozen dataclass whose fields are the attributes.

    `infer` maps operand types to result types and raises VerifyError with the reason alone;
    `reference` computes the results from arrays with the array module `xp` (numpy or cupy), in the
    operands' own precision (float64 included). Memory order never changes meaning.
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
        """Attribute names and values, in declaration order."""
        return {f.name: getattr(self, f.name) for f in fields(cast(Any, self))}


class Literal:
    """An immutable tensor payload, read when first needed; compared by identity.

    `load` returns an array of the given shape and dtype; it is called once, whichever thread comes first.
    """

    __slots__ = ("__weakref__", "_array", "_digest", "_load", "_lock", "label", "type")

    def __init__(self, type: TensorType, load: Callable[[], np.ndarray[Any, Any]], label: str = ""):
        self.type = TensorType(type.shape, type.dtype)
        self.label = label
        self._load = load
        self._lock = threading.Lock()
        self._array: np.ndarray[Any, Any] | None = None
        self._digest = ""

    @classmethod
    def of(cls, array: Any, label: str = "") -> Literal:
        """A literal holding `array` (copied to a read-only row-major array)."""
        held = np.array(array, order="C", copy=True)
        held.flags.writeable = False
        literal = cls(TensorType(held.shape, DType.of(held.dtype)), lambda: held, label)
        literal._array = held
        return literal

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The payload as a read-only NumPy array."""
        if self._array is None:
            with self._lock:
                self._array = self._loaded() if self._array is None else self._array
        return self._array

    def _loaded(self) -> np.ndarray[Any, Any]:
        array = np.asarray(self._load())
        if array.shape != self.type.shape or array.dtype != self.type.dtype.numpy:
            raise VerifyError(
                f"constant {self.label!r} was declared {self.type} but its data is {array.dtype}{list(array.shape)}"
            )
        array = array.view()
        array.flags.writeable = False
        return array

    @property
    def digest(self) -> str:
        """SHA-256 of type and bytes, hexadecimal."""
        if not self._digest:
            sha = hashlib.sha256(str(self.type).encode())
            sha.update(np.ascontiguousarray(self.array).view(np.uint8).reshape(-1).data)
            self._digest = sha.hexdigest()
        return self._digest


def load_all(literals: Iterable[Literal]) -> None:
    """Load literals on all cores: what derives or turns weights is NumPy's work, in which threads run side by side."""
    wanted = list(dict.fromkeys(literals))
    with ThreadPoolExecutor(max(1, min(len(wanted), os.cpu_count() or 1))) as pool:
        for _ in pool.map(lambda literal: literal.array, wanted):
            pass


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
    """Closes a graph: its operands are the graph's outputs, `names` their public names."""

    names: tuple[str, ...] = ()
    name: ClassVar[str] = "return"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        if len(self.names) != len(operands):
            raise VerifyError(f"{len(operands)} outputs but {len(self.names)} names")
        return ()

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return ()


class Value:
    """A tensor: a graph input (`node` is None) or the result `index` of `node`."""

    __slots__ = ("_uses", "graph", "index", "name", "node", "type")

    def __init__(self, graph: Graph, name: str, type: TensorType, node: Node | None, index: int):
        self.graph = graph
        self.name = name
        self.type = type
        self.node = node
        self.index = index
        self._uses: dict[tuple[Node, int], None] = {}

    @property
    def uses(self) -> list[tuple[Node, int]]:
        """(node, operand index) of every use, in the order they were made."""
        return list(self._uses)

    @property
    def users(self) -> list[Node]:
        """The distinct nodes that use this value."""
        return list(dict.fromkeys(node for node, _ in self._uses))

    @property
    def literal(self) -> Literal | None:
        """The payload, if this value is a constant."""
        return self.node.op.literal if self.node is not None and isinstance(self.node.op, Constant) else None

    def scalar(self) -> float | None:
        """The number, if this value is a one-element constant; None otherwise."""
        literal = self.literal
        if literal is None or literal.type.size != 1:
            return None
        return float(literal.array.reshape(-1)[0])

    def __repr__(self) -> str:
        return f"{quote(self.name)}: {self.type}"


class Node:
    """One application of an op. `origin` names the source-model nodes it stands for."""

    __slots__ = ("_erased", "_next", "_operands", "_prev", "graph", "op", "origin", "results")

    def __init__(self, graph: Graph, op: Op, operands: Sequence[Value], origin: tuple[str, ...]):
        self.graph = graph
        self.op = op
        self.origin = origin
        self._operands = list(operands)
        self.results: tuple[Value, ...] = ()
        self._prev: Node | None = None
        self._next: Node | None = None
        self._erased = False

    @property
    def operands(self) -> tuple[Value, ...]:
        return tuple(self._operands)

    @property
    def result(self) -> Value:
        """The only result."""
        (value,) = self.results
        return value

    def __repr__(self) -> str:
        return print_node(self)


class Graph:
    """An SSA graph. Nodes are kept in a topological order, closed by one `return` node."""

    def __init__(self, name: str = "main"):
        self.name = name
        self._inputs: list[Value] = []
        self._names: set[str] = set()
        self._counter = 0
        self._return = Node(self, Return(), (), ())
        self._head: Node = self._return  # first node in order; the return node is always last
        self._size = 0

    # reading ---------------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[Value, ...]:
        return tuple(self._inputs)

    @property
    def outputs(self) -> tuple[Value, ...]:
        return self._return.operands

    @property
    def output_names(self) -> tuple[str, ...]:
        return cast(Return, self._return.op).names

    @property
    def return_node(self) -> Node:
        return self._return

    @property
    def nodes(self) -> Iterator[Node]:
        """All nodes but the return, in order; any, the current one too, may be erased while iterating."""
        node: Node = self._head
        while node is not self._return:
            following = node._next
            yield node
            # an erased node keeps the link to what followed it, so the way back into the list is never lost
            node = cast(Node, following if node._erased else node._next)
            while node._erased:
                node = cast(Node, node._next)

    @property
    def last(self) -> Node | None:
        """The last node in order, the return not counted."""
        return self._return._prev

    def since(self, node: Node | None) -> list[Node]:
        """The nodes behind one, in order; all of them for None."""
        found: list[Node] = []
        at = self._return._prev
        while at is not None and at is not node:
            found.append(at)
            at = at._prev
        return found[::-1]

    def __len__(self) -> int:
        """Number of nodes, the return not counted."""
        return self._size

    def value(self, name: str) -> Value:
        """The value of that name; VerifyError if there is none."""
        for value in self.values():
            if value.name == name:
                return value
        raise VerifyError(f"graph {self.name!r} has no value {quote(name)}")

    def values(self) -> Iterator[Value]:
        yield from self._inputs
        for node in self.nodes:
            yield from node.results

    # the verbs that change wiring ----------------------------------------------------------------

    def add_input(self, name: str, type: TensorType) -> Value:
        """Append a graph input. Its name must be free: it is part of the interface."""
        if not name:
            raise VerifyError(f"graph {self.name!r}: an input has an empty name")
        if name in self._names:
            raise VerifyError(f"graph {self.name!r}: two values are named {quote(name)}")
        self._names.add(name)
        value = Value(self, name, type, None, len(self._inputs))
        self._inputs.append(value)
        return value

    def insert(
        self,
        op: Op,
        operands: Sequence[Value] = (),
        *,
        before: Node | None = None,
        names: Sequence[str] = (),
        types: Sequence[TensorType] | None = None,
        origin: Iterable[str] = (),
    ) -> Node:
        """Add a node before `before` (default: at the end). Result types are inferred unless given.

        Names are hints: a taken one gets a suffix. Raises VerifyError if the op refuses the operands.
        """
        assert before is None or (before.graph is self and not before._erased), "insert before a node that is not here"
        for operand in operands:
            assert operand.graph is self, f"{operand!r} belongs to another graph"
        try:
            inferred = op.infer(*(v.type for v in operands))
        except VerifyError as error:
            raise VerifyError(f"{op.name}({', '.join(map(repr, operands))}): {error}") from None
        if len(names) > len(inferred) or (types is not None and len(types) != len(inferred)):
            raise VerifyError(f"{op.name} gives {len(inferred)} results: too many names, or types for another number")
        hints = [*names, *([""] * (len(inferred) - len(names)))]
        return self._place(
            op, operands, hints, inferred if types is None else types, before, tuple(dict.fromkeys(origin))
        )

    def _place(
        self,
        op: Op,
        operands: Sequence[Value],
        hints: Sequence[str],
        types: Sequence[TensorType],
        before: Node | None,
        origin: tuple[str, ...],
    ) -> Node:
        """`insert` of what is known to be well-formed: nothing is inferred."""
        node = Node(self, op, operands, origin)
        node.results = tuple(
            Value(self, self.fresh_name(hint), type, node, i)
            for i, (hint, type) in enumerate(zip(hints, types, strict=True))
        )
        for i, operand in enumerate(operands):
            operand._uses[node, i] = None
        following = before or self._return
        node._prev, node._next = following._prev, following
        if following._prev is None:
            self._head = node
        else:
            following._prev._next = node
        following._prev = node
        self._size += 1
        return node

    def add(self, op: Op, *operands: Value, name: str = "", before: Node | None = None) -> Value:
        """`insert` for an op with one result; returns that result."""
        return self.insert(op, operands, names=(name,) if name else (), before=before).result

    def constant(self, array: Any, name: str = "", before: Node | None = None) -> Value:
        """Insert a constant holding `array` (its NumPy dtype decides the type)."""
        return self.add(Constant(Literal.of(array, name)), name=name, before=before)

    def set_outputs(self, values: Sequence[Value], names: Sequence[str] | None = None) -> None:
        """Make `values` the outputs, under their own names unless `names` are given."""
        names = tuple(names if names is not None else (v.name for v in values))
        if len(names) != len(values):
            raise VerifyError(f"{len(values)} outputs but {len(names)} names")
        for value in values:
            assert value.graph is self, f"{value!r} belongs to another graph"
        while self._return._operands:
            self._drop_use(self._return, len(self._return._operands) - 1)
            self._return._operands.pop()
        for i, value in enumerate(values):
            self._return._operands.append(value)
            value._uses[self._return, i] = None
        self._return.op = Return(names)

    def set_input(self, node: Node, index: int, value: Value) -> None:
        """Let operand `index` of `node` be `value`; order is checked by `verify`."""
        assert value.graph is self and node.graph is self and not node._erased
        self._drop_use(node, index)
        node._operands[index] = value
        value._uses[node, index] = None

    def set_type(self, value: Value, type: TensorType) -> None:
        """Change the type of a value; what uses it must be made to agree before `verify`."""
        value.type = type

    def set_op(self, node: Node, op: Op) -> None:
        """Change a node's attributes in place: same kind of op, same arity."""
        assert op.name == node.op.name
        node.op = op

    def replace(self, old: Value, new: Value) -> None:
        """Let every use of `old` use `new` instead; `new`'s node takes over the origin of `old`'s."""
        assert new.graph is self and new is not old
        for node, index in old.uses:
            self.set_input(node, index, new)
        if new.node is not None and old.node is not None:
            new.node.origin = tuple(dict.fromkeys((*old.node.origin, *new.node.origin)))

    def erase(self, node: Node) -> None:
        """Remove a node none of whose results is used."""
        assert node.graph is self and not node._erased and node is not self._return, f"{node!r} is not there to erase"
        assert not any(v._uses for v in node.results), f"{node!r} is in use"
        for index in range(len(node._operands)):
            self._drop_use(node, index)
        assert node._next is not None
        node._next._prev = node._prev
        if node._prev is None:
            self._head = node._next
        else:
            node._prev._next = node._next
        node._prev, node._erased = None, True
        for value in node.results:
            self._names.discard(value.name)
        self._size -= 1

    def rename(self, value: Value, name: str) -> None:
        """Give a value a name (made unique if taken)."""
        self._names.discard(value.name)
        value.name = self.fresh_name(name)

    def _drop_use(self, node: Node, index: int) -> None:
        del node._operands[index]._uses[node, index]

    def fresh_name(self, hint: str = "") -> str:
        """A free name, reserved from now on: the hint itself if it is free."""
        name = hint
        while not name or name in self._names:
            name = f"{hint}.{self._counter}" if hint else f"v{self._counter}"
            self._counter += 1
        self._names.add(name)
        return name

    # whole-graph services ---------------------------------------------------------------------------

    def prune(self) -> int:
        """Erase every node no output depends on; returns how many went."""
        before = self._size
        node = self._return._prev
        while node is not None:
            previous = node._prev
            if not any(v._uses for v in node.results):
                self.erase(node)
            node = previous
        return before - self._size

    def clone(self) -> Graph:
        """An independent copy: same names, order, types and literals."""
        return self.extract(self.inputs, list(self.nodes), self.outputs, self.output_names)

    def extract(
        self,
        inputs: Sequence[Value],
        nodes: Sequence[Node],
        outputs: Sequence[Value],
        output_names: Sequence[str] | None = None,
    ) -> Graph:
        """Copy `nodes` (in graph order) into a new graph fed by `inputs`, returning `outputs`."""
        copy = Graph(self.name)
        mapped: dict[Value, Value] = {v: copy.add_input(v.name, v.type) for v in inputs}
        for node in nodes:
            operands, names = [mapped[v] for v in node.operands], [v.name for v in node.results]
            twin = copy._place(node.op, operands, names, [v.type for v in node.results], None, node.origin)
            mapped.update(zip(node.results, twin.results, strict=True))
        names = [v.name for v in outputs] if output_names is None else output_names
        copy.set_outputs([mapped[v] for v in outputs], names)
        copy._counter = self._counter
        return copy

    def verify(self) -> None:
        """Check every rule of the IR; VerifyError names the first node that breaks one."""
        defined: set[Value] = set()
        names: set[str] = set()
        for index, value in enumerate(self._inputs):
            self._verify_value(value, None, index, names)
            defined.add(value)
        members = [*self.nodes, self._return]
        previous: Node | None = None
        for node in members:
            if node.graph is not self or node._prev is not previous:
                raise VerifyError(f"{node!r}: is not linked to the node before it")
            self._verify_node(node, defined)
            for index, value in enumerate(node.results):
                self._verify_value(value, node, index, names)
                defined.add(value)
            previous = node
        if len(members) != self._size + 1:
            raise VerifyError(f"graph {self.name!r} counts {self._size} nodes but holds {len(members) - 1}")
        if len(set(self.output_names)) != len(self.output_names):
            raise VerifyError(f"{self._return!r}: two outputs have the same name")
        present = set(members)
        for value in defined:
            for node, index in value._uses:
                there = node in present and index < len(node._operands) and node._operands[index] is value
                if not there:
                    raise VerifyError(f"{quote(value.name)} has a use in {node.op.name} that is not there")

    def _verify_node(self, node: Node, defined: set[Value]) -> None:
        for index, operand in enumerate(node.operands):
            if operand not in defined:
                raise VerifyError(f"{node!r}: operand {quote(operand.name)} is not defined before its use")
            if (node, index) not in operand._uses:
                raise VerifyError(f"{node!r}: operand {quote(operand.name)} does not know of this use")
        try:
            inferred = node.op.infer(*(v.type for v in node.operands))
        except VerifyError as error:
            raise VerifyError(f"{node!r}: {error}") from None
        if len(inferred) != len(node.results):
            raise VerifyError(f"{node!r}: has {len(node.results)} results, the op gives {len(inferred)}")
        for value, type in zip(node.results, inferred, strict=True):
            if not value.type.same_value_type(type):
                raise VerifyError(f"{node!r}: {quote(value.name)} is {value.type} but the op gives {type}")

    def _verify_value(self, value: Value, node: Node | None, index: int, names: set[str]) -> None:
        if value.graph is not self or value.node is not node or value.index != index:
            raise VerifyError(f"{quote(value.name)} does not know where it is made")
        if value.name in names:
            raise VerifyError(f"two values are named {quote(value.name)}")
        if value.name not in self._names:
            raise VerifyError(f"graph {self.name!r} does not know the name {quote(value.name)}")
        names.add(value.name)

    def __str__(self) -> str:
        return print_graph(self)


# the text form (parsed by fusec.text) -------------------------------------------------------------

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.$/:-]*[A-Za-z0-9_.$/-]\Z")  # the parser takes a last colon for punctuation
INLINE_ELEMENTS = 16  # a constant of at most this many elements is printed in full


def copy_name(name: str, dtype: DType) -> str:
    """What the copy of a parameter in another type is called."""
    return f"{name} as {dtype.value}"


def quote(name: str) -> str:
    """`%name`, in quotes where the name has characters the text form gives another meaning."""
    if _PLAIN_NAME.match(name):
        return f"%{name}"
    return f"%{quote_string(name)}"


def quote_string(text: str) -> str:
    """A double-quoted string with backslash escapes for quotes, backslashes and control characters."""
    escaped = re.sub(
        r"[\x00-\x1f\x7f]", lambda m: f"\\x{ord(m[0]):02x}", text.replace("\\", "\\\\").replace('"', '\\"')
    )
    return f'"{escaped}"'


def print_attribute(value: Any) -> str:
    """One attribute value in the text form."""
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
    if isinstance(value, tuple):
        return "[" + ", ".join(print_attribute(v) for v in cast("tuple[Any, ...]", value)) + "]"
    raise TypeError(f"attribute of type {type(value).__name__}")


def print_literal(literal: Literal) -> str:
    """Small payloads in full (floats exactly, as repr); large ones as `weight("label")`."""
    if literal.type.size > INLINE_ELEMENTS:
        return f"weight({quote_string(literal.label)})"
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        dtype = literal.type.dtype
        inexact = dtype.is_float or (dtype.is_narrow and not dtype.is_narrow_int)
        items = literal.array.astype(np.float64) if inexact else literal.array
        items = items.astype(np.int64) if dtype.is_narrow_int else items
    return "[" + ", ".join(print_attribute(v) for v in items.reshape(-1).tolist()) + "]"


def print_node(node: Node, locations: bool = False, label: Callable[[Literal], str] | None = None) -> str:
    """One line of the text form, without indentation. With `label` every constant is a weight, so named."""
    left = ", ".join(quote(v.name) for v in node.results)
    if isinstance(node.op, Constant):
        literal = node.op.literal
        body = f"constant {f'weight({quote_string(label(literal))})' if label else print_literal(literal)}"
    elif isinstance(node.op, Return):
        outputs = zip(node.operands, node.op.names, strict=False)  # a return that is ill-formed still prints
        body = "return " + ", ".join(
            quote(v.name) if v.name == n else f"{quote(v.name)} as {quote_string(n)}" for v, n in outputs
        )
    else:
        body = f"{node.op.name}({', '.join(quote(v.name) for v in node.operands)})"
        attributes = node.op.attributes
        if attributes:
            body += " {" + ", ".join(f"{k}={print_attribute(v)}" for k, v in attributes.items()) + "}"
    text = f"{left} = {body}" if left else body
    if node.results:
        text += " : " + ", ".join(str(v.type) for v in node.results)
    if locations and node.origin:
        text += " loc(" + ", ".join(quote_string(o) for o in node.origin) + ")"
    return text


def print_graph(graph: Graph, locations: bool = False, label: Callable[[Literal], str] | None = None) -> str:
    """The whole graph; `locations` adds the source-model nodes each line stands for, `label` see `print_node`."""
    head = ", ".join(f"{quote(v.name)}: {v.type}" for v in graph.inputs)
    lines = [f"graph {quote_string(graph.name)} ({head}) {{"]
    lines += [f"  {print_node(node, locations, label)}" for node in [*graph.nodes, graph.return_node]]
    return "\n".join([*lines, "}"])


def positions(graph: Graph) -> Mapping[Node, int]:
    """Each node's place in the graph's order; the return node comes last."""
    return {node: i for i, node in enumerate([*graph.nodes, graph.return_node])}
