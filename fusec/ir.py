"""The IR: nodes in SSA form over typed values, and the graph that owns both.

`Value` and `Node` are compared by identity, and only the five verbs of `Graph` (insert, set_input, set_type, replace,
erase) change wiring. Its outputs are the operands of one closing `return`: replacing or erasing has no special case.
"""

# Graph, Node and Value share their links and use lists; nothing but this file may change them.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from fusec.errors import VerifyError
from fusec.graph.literal import Literal, load_all
from fusec.graph.op import Array, Constant, Op, Return
from fusec.graph.printer import (
    INLINE_ELEMENTS,
    print_attribute,
    print_graph,
    print_literal,
    print_node,
    quote,
    quote_string,
)
from fusec.graph.types import HALVES, DType, TensorType, channels_last
from fusec.graph.verifier import check

# what a graph is made of, under one roof
__all__ = [
    "HALVES",
    "INLINE_ELEMENTS",
    "Array",
    "Constant",
    "DType",
    "Graph",
    "Literal",
    "Node",
    "Op",
    "Return",
    "TensorType",
    "Value",
    "channels_last",
    "copy_name",
    "load_all",
    "positions",
    "print_attribute",
    "print_graph",
    "print_literal",
    "print_node",
    "quote",
    "quote_string",
]


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

    __slots__ = ("_agreed", "_erased", "_next", "_operands", "_prev", "graph", "op", "origin", "results")

    def __init__(self, graph: Graph, op: Op, operands: Sequence[Value], origin: tuple[str, ...]):
        self.graph = graph
        self.op = op
        self.origin = origin
        self._operands = list(operands)
        self.results: tuple[Value, ...] = ()
        self._prev: Node | None = None
        self._next: Node | None = None
        self._erased = False
        self._agreed: tuple[object, ...] = ()  # what the rules of the op were found to be kept for: see `verifier`

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
        self.edits = 0  # how often a verb has changed something: as long as this stays, the graph does
        self._verified = -1  # how many there were when every rule was found to be kept
        self._found: tuple[int, dict[Hashable, Any]] = (0, {})  # edits before it, and what was found

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
    def found(self) -> dict[Hashable, Any]:
        """Return facts that were found about the graph as it is, for others to use again; empty after an edit."""
        if self._found[0] != self.edits:
            self._found = (self.edits, {})
        return self._found[1]

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
        """Return the nodes after one, in order; all nodes for None."""
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
        self.edits += 1
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
        node = self._place(
            op, operands, hints, inferred if types is None else types, before, tuple(dict.fromkeys(origin))
        )
        if types is None:
            node._agreed = (op, *(v.type for v in operands), *inferred)
        return node

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
        self.edits += 1
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
        self.edits += 1

    def set_input(self, node: Node, index: int, value: Value) -> None:
        """Let operand `index` of `node` be `value`; order is checked by `verify`."""
        assert value.graph is self and node.graph is self and not node._erased
        self._drop_use(node, index)
        node._operands[index] = value
        value._uses[node, index] = None
        self.edits += 1

    def set_type(self, value: Value, type: TensorType) -> None:
        """Change the type of a value; what uses it must be made to agree before `verify`."""
        value.type = type
        self.edits += 1

    def set_op(self, node: Node, op: Op) -> None:
        """Change a node's attributes in place: same kind of op, same arity."""
        assert op.name == node.op.name
        node.op = op
        self.edits += 1

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
        self.edits += 1

    def rename(self, value: Value, name: str) -> None:
        """Give a value a name (made unique if taken)."""
        self._names.discard(value.name)
        value.name = self.fresh_name(name)
        self.edits += 1

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
            twin._agreed = node._agreed
            mapped.update(zip(node.results, twin.results, strict=True))
        names = [v.name for v in outputs] if output_names is None else output_names
        copy.set_outputs([mapped[v] for v in outputs], names)
        copy._counter = self._counter
        return copy

    def verify(self) -> None:
        """Check every rule of the IR; VerifyError names the first node that breaks one."""
        check(self)
        self._verified = self.edits

    def verify_changes(self) -> None:
        """`verify`, unless no verb has changed anything since."""
        if self._verified != self.edits:
            self.verify()

    def __str__(self) -> str:
        return print_graph(self)


def positions(graph: Graph) -> Mapping[Node, int]:
    """Each node's place in the graph's order; the return node comes last."""
    return {node: i for i, node in enumerate([*graph.nodes, graph.return_node])}


def copy_name(name: str, dtype: DType) -> str:
    """Return the name of the copy of a parameter in another type."""
    return f"{name} as {dtype.value}"
