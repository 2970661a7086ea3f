"""Define the IR of fusec: a graph of nodes in SSA form, whose values have a shape, an element type and a layout.

A `Node` applies an `Op` to operands, and each of its results is a `Value`. A `Graph` owns both.
A graph is changed only through methods of `Graph`, which keep the links between nodes and values consistent.
A graph ends with one `return` node, whose operands are the outputs. An output is therefore a use like any other, and
no edit has to treat it separately.

    graph = Graph()
    x = graph.add_input("x", TensorType((2, 3), DType.F32))
    graph.set_outputs([graph.add(pw("relu"), x)])
"""

# Graph, Node and Value use each other's private links. Only this file may change them.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from fusec.errors import VerifyError
from fusec.graph.body import Body
from fusec.graph.literal import (
    Literal,
    MissingLiteral,
    digest_all,
    is_scale,
    load_all,
    load_early,
    noted_reads,
    operand_all,
)
from fusec.graph.op import Array, Constant, HostArray, Op, Return
from fusec.graph.printer import (
    INLINE_ELEMENTS,
    print_attribute,
    print_graph,
    print_literal,
    print_node,
    print_op,
    quote,
    quote_string,
)
from fusec.graph.types import BYTES, HALVES, NUMBERS, DType, TensorType, channels_last
from fusec.graph.verifier import check

# Also the names of fusec.graph, so that other modules import all of the IR from here.
__all__ = [
    "BYTES",
    "HALVES",
    "INLINE_ELEMENTS",
    "NUMBERS",
    "Array",
    "Body",
    "Constant",
    "DType",
    "Graph",
    "HostArray",
    "Literal",
    "MissingLiteral",
    "Node",
    "Op",
    "Return",
    "TensorType",
    "Value",
    "channels_last",
    "copy_name",
    "digest_all",
    "is_scale",
    "load_all",
    "load_early",
    "noted_reads",
    "operand_all",
    "positions",
    "print_attribute",
    "print_graph",
    "print_literal",
    "print_node",
    "print_op",
    "quote",
    "quote_string",
]


class Value:
    """A tensor of a graph: result number `index` of `node`, or graph input number `index` if `node` is None.

    Values are compared by identity.
    """

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
        """Return each use as (node, number of the operand), in the order in which the uses were made."""
        return list(self._uses)

    @property
    def users(self) -> list[Node]:
        """Return the nodes that use this value, each once."""
        return list(dict.fromkeys(node for node, _ in self._uses))

    @property
    def literal(self) -> Literal | None:
        """Return the data of a constant; None if this value is not a constant."""
        return self.node.op.literal if self.node is not None and isinstance(self.node.op, Constant) else None

    def scalar(self) -> float | None:
        """Return the number in a constant of one element; None for any other value."""
        literal = self.literal
        if literal is None or literal.type.size != 1:
            return None
        return float(literal.array.reshape(-1)[0])

    def __repr__(self) -> str:
        return f"{quote(self.name)}: {self.type}"


class Node:
    """An op applied to operands. Nodes are compared by identity.

    origin: names of the nodes of the source model that this node replaces.
    """

    __slots__ = ("_checked", "_erased", "_next", "_operands", "_prev", "graph", "op", "origin", "results")

    def __init__(self, graph: Graph, op: Op, operands: Sequence[Value], origin: tuple[str, ...]):
        self.graph = graph
        self.op = op
        self.origin = origin
        self._operands = list(operands)
        self.results: tuple[Value, ...] = ()
        self._prev: Node | None = None
        self._next: Node | None = None
        self._erased = False
        # The op, operand types and result types for which `op.infer` last agreed; `verifier` asks only about others.
        self._checked: tuple[object, ...] = ()

    @property
    def operands(self) -> tuple[Value, ...]:
        return tuple(self._operands)

    @property
    def result(self) -> Value:
        """Return the result of a node that has exactly one."""
        (value,) = self.results
        return value

    def __repr__(self) -> str:
        return print_node(self)


class Graph:
    """A graph in SSA form. Its nodes are in a topological order, and a `return` node comes last.

    edits: counts the changes; the graph is unchanged as long as this number is.
    remarks: why nodes of the model became as many as they did, by the name of the node.
    """

    def __init__(self, name: str = "main"):
        self.name = name
        self.remarks: dict[str, str] = {}
        self._inputs: list[Value] = []
        self._names: set[str] = set()
        self._counter = 0
        self._return = Node(self, Return(), (), ())
        self._head: Node = self._return  # the first node; nodes are a linked list, so that edits take constant time
        self._size = 0
        self.edits = 0
        self._verified_edits = -1  # value of `edits` at the last `verify` that passed
        self._memo: tuple[int, dict[Hashable, Any]] = (0, {})  # value of `edits`, and results computed since then

    # reading -----------------------------------------------------------------------------------------

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
    def memo(self) -> dict[Hashable, Any]:
        """Return a dict in which callers store what they computed about this graph; an edit empties it."""
        if self._memo[0] != self.edits:
            self._memo = (self.edits, {})
        return self._memo[1]

    @property
    def nodes(self) -> Iterator[Node]:
        """Iterate over the nodes in order, without the return node.

        The caller may erase any node meanwhile, the current one included.
        """
        node: Node = self._head
        while node is not self._return:
            following = node._next
            yield node
            # An erased node keeps its link to the next one, so the iteration always gets back to the list.
            node = cast(Node, following if node._erased else node._next)
            while node._erased:
                node = cast(Node, node._next)

    @property
    def last(self) -> Node | None:
        """Return the last node before the return node; None for a graph without nodes."""
        return self._return._prev

    def since(self, node: Node | None) -> list[Node]:
        """Return the nodes after `node`, in order; all nodes for None."""
        later: list[Node] = []
        at = self._return._prev
        while at is not None and at is not node:
            later.append(at)
            at = at._prev
        return later[::-1]

    def __len__(self) -> int:
        """Count the nodes without the return node."""
        return self._size

    def value(self, name: str) -> Value:
        """Find a value by name. Raises VerifyError if the graph has none of that name."""
        for value in self.values():
            if value.name == name:
                return value
        raise VerifyError(f"graph {self.name!r} has no value {quote(name)}")

    def values(self) -> Iterator[Value]:
        yield from self._inputs
        for node in self.nodes:
            yield from node.results

    # editing -----------------------------------------------------------------------------------------

    def add_input(self, name: str, type: TensorType) -> Value:
        """Append a graph input. Raises VerifyError if the name is taken, because callers give inputs by name."""
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
        """Insert a node.

        before: the node that follows it; default: it becomes the last one.
        names: hints for the names of the results; a name that is taken gets a suffix.
        types: result types; default: those that the op infers.
        Raises VerifyError if the op refuses the operands.
        """
        assert before is None or (before.graph is self and not before._erased), f"{before!r} is not in this graph"
        for operand in operands:
            assert operand.graph is self, f"{operand!r} belongs to another graph"
        try:
            inferred = op.infer(*(v.type for v in operands))
        except VerifyError as error:
            raise VerifyError(f"{op.name}({', '.join(map(repr, operands))}): {error}") from None
        if len(names) > len(inferred) or (types is not None and len(types) != len(inferred)):
            raise VerifyError(f"{op.name} gives {len(inferred)} results: too many names, or types for another number")
        hints = [*names, *([""] * (len(inferred) - len(names)))]
        node = self._link(
            op, operands, hints, inferred if types is None else types, before, tuple(dict.fromkeys(origin))
        )
        if types is None:
            node._checked = (op, *(v.type for v in operands), *inferred)
        return node

    def _link(
        self,
        op: Op,
        operands: Sequence[Value],
        hints: Sequence[str],
        types: Sequence[TensorType],
        before: Node | None,
        origin: tuple[str, ...],
    ) -> Node:
        """Make a node and link it into the graph; the caller has checked it."""
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
        """Insert an op that has one result, and return that result."""
        return self.insert(op, operands, names=(name,) if name else (), before=before).result

    def constant(self, array: Any, name: str = "", before: Node | None = None) -> Value:
        """Insert a constant with the data and the dtype of `array`."""
        return self.add(Constant(Literal.of(array, name)), name=name, before=before)

    def set_outputs(self, values: Sequence[Value], names: Sequence[str] | None = None) -> None:
        """Make `values` the outputs. names: public names of the outputs; default: the names of the values."""
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
        """Replace one operand of a node. `verify` checks that `value` is computed before the node."""
        assert value.graph is self and node.graph is self and not node._erased
        self._drop_use(node, index)
        node._operands[index] = value
        value._uses[node, index] = None
        self.edits += 1

    def set_type(self, value: Value, type: TensorType) -> None:
        """Change the type of a value. The caller adapts the nodes that use it, or `verify` fails."""
        value.type = type
        self.edits += 1

    def set_op(self, node: Node, op: Op) -> None:
        """Give a node an op of the same name with other attributes."""
        assert op.name == node.op.name
        node.op = op
        self.edits += 1

    def replace(self, old: Value, new: Value) -> None:
        """Use `new` wherever `old` is used. The node of `new` adds the origin of the node of `old` to its own."""
        assert new.graph is self and new is not old
        for node, index in old.uses:
            self.set_input(node, index, new)
        if new.node is not None and old.node is not None:
            new.node.origin = tuple(dict.fromkeys((*old.node.origin, *new.node.origin)))

    def erase(self, node: Node) -> None:
        """Remove a node whose results have no uses."""
        assert node.graph is self and not node._erased and node is not self._return, f"{node!r} is not in this graph"
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
        """Give a value another name; a name that is taken gets a suffix."""
        self._names.discard(value.name)
        value.name = self.fresh_name(name)
        self.edits += 1

    def _drop_use(self, node: Node, index: int) -> None:
        del node._operands[index]._uses[node, index]

    def fresh_name(self, hint: str = "") -> str:
        """Reserve a name and return it: the hint, with a suffix if it is taken."""
        name = self.free_name(hint)
        self._names.add(name)
        return name

    def free_name(self, hint: str = "") -> str:
        """Return a name that no value has, without reserving it: the hint, with a suffix if it is taken."""
        name = hint
        while not name or name in self._names:
            name = f"{hint}.{self._counter}" if hint else f"v{self._counter}"
            self._counter += 1
        return name

    # whole graphs ------------------------------------------------------------------------------------

    def prune(self) -> int:
        """Erase the nodes that no output depends on, and return their number."""
        before = self._size
        node = self._return._prev
        while node is not None:
            previous = node._prev
            if not any(v._uses for v in node.results):
                self.erase(node)
            node = previous
        return before - self._size

    def clone(self) -> Graph:
        """Copy the graph. The copy shares only ops and literals, which are immutable."""
        copy = self.extract(self.inputs, list(self.nodes), self.outputs, self.output_names)
        copy.remarks.update(self.remarks)
        return copy

    def extract(
        self,
        inputs: Sequence[Value],
        nodes: Sequence[Node],
        outputs: Sequence[Value],
        output_names: Sequence[str] | None = None,
    ) -> Graph:
        """Copy some nodes into a new graph.

        inputs: values that become the inputs of the new graph.
        nodes: the nodes to copy, in graph order. Their operands are `inputs`, or results of nodes before them.
        outputs: values that become the outputs; output_names: their public names (default: their own).
        """
        copy = Graph(self.name)
        copied: dict[Value, Value] = {v: copy.add_input(v.name, v.type) for v in inputs}
        for node in nodes:
            operands, names = [copied[v] for v in node.operands], [v.name for v in node.results]
            twin = copy._link(node.op, operands, names, [v.type for v in node.results], None, node.origin)
            twin._checked = node._checked
            copied.update(zip(node.results, twin.results, strict=True))
        names = [v.name for v in outputs] if output_names is None else output_names
        copy.set_outputs([copied[v] for v in outputs], names)
        copy._counter = self._counter
        return copy

    def verify(self) -> None:
        """Check every rule of the IR. Raises VerifyError that names the first node that breaks one."""
        check(self)
        self._verified_edits = self.edits

    def verify_changes(self) -> None:
        """Verify the graph, unless it has not changed since it was verified."""
        if self._verified_edits != self.edits:
            self.verify()

    def __str__(self) -> str:
        return print_graph(self)


def positions(graph: Graph) -> Mapping[Node, int]:
    """Return the number of each node in graph order; the return node comes last."""
    return {node: i for i, node in enumerate([*graph.nodes, graph.return_node])}


def copy_name(name: str, dtype: DType) -> str:
    """Return the name of the copy of a parameter in another element type, such as `w as f16`."""
    return f"{name} as {dtype.value}"
