"""Define loops of a known number of steps as one op, so that a kernel can run all of them in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from fusec.ir import HALVES, INLINE_ELEMENTS, Array, Body, DType, Graph, Node, Op, TensorType, Value
from fusec.ops.pointwise import Cast, keeps_number, pw
from fusec.ops.reduction import Reduce, Softmax
from fusec.ops.spec import require
from fusec.system.dataclass import dataclass

HOST_STEPS = 4096  # that the host runs one by one at compile time, to make constants of a loop of constants


@dataclass(frozen=True)
class Scan(Op):
    """Run `body`, the graph of one step, `steps` times.

    Operands: first the `states` before the first step, then as many `sequences`[steps, …], of which a step reads one
    row, then the values that all steps read. The body takes them in this order, and gives the next states and then
    rows. Results: the states after the last step, and all rows[steps, …].
    """

    body: Body
    steps: int
    states: int
    sequences: int = 0
    name: ClassVar[str] = "scan"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        graph, first = self.body.graph, self.states + self.sequences
        require(self.steps >= 1, f"scan of {self.steps} steps")
        require(self.states >= 0 and self.sequences >= 0, f"{self.states} states and {self.sequences} sequences")
        inputs, outputs = graph.inputs, graph.outputs
        require(first <= len(inputs), f"a body of {len(inputs)} inputs for {first} states and sequences")
        require(len(operands) == len(inputs), f"scan takes {len(inputs)} operands, not {len(operands)}")
        require(self.states <= len(outputs), f"a body of {len(outputs)} outputs for {self.states} states")
        for index, (given, value) in enumerate(zip(operands, inputs, strict=True)):
            wanted = value.type
            if self.states <= index < first:
                wanted = TensorType((self.steps, *wanted.shape), wanted.dtype)
            require(given.same_value_type(wanted), f"operand {index} is {given}, not {wanted}")
        for index, (value, state) in enumerate(zip(outputs, inputs[: self.states], strict=False)):
            same = value.type.same_value_type(state.type)
            require(same, f"state {index} is {state.type} before a step, and {value.type} after it")
        for value in graph.values():
            large = value.literal is not None and value.type.size > INLINE_ELEMENTS
            require(not large, f"constants of a body have up to {INLINE_ELEMENTS} elements: {value!r}")
        rows = (value.type for value in outputs[self.states :])
        return (
            *(TensorType(value.type.shape, value.type.dtype) for value in outputs[: self.states]),
            *(TensorType((self.steps, *row.shape), row.dtype) for row in rows),
        )

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        pairs = zip(self.body.graph.inputs, operands, strict=True)
        raised = (a.dtype for v, a in pairs if v.type.dtype.is_float and a.dtype != v.type.dtype.numpy)
        return self.evaluate(xp, operands, next(raised, None))

    def evaluate(self, xp: Any, operands: Sequence[Array], precision: Any) -> tuple[Array, ...]:
        """Return the results. precision: the NumPy dtype of all floats, as in `fusec.reference`; None: their own."""
        state, sequences = list(operands[: self.states]), operands[self.states : self.states + self.sequences]
        shared = operands[self.states + self.sequences :]
        rows: list[list[Array]] = [[] for _ in self.body.graph.outputs[self.states :]]
        for step in range(self.steps):
            results = self._step(xp, [*state, *(v[step] for v in sequences), *shared], precision)
            state = results[: self.states]
            for items, row in zip(rows, results[self.states :], strict=True):
                items.append(row)
        return (*map(xp.asarray, state), *(xp.stack(items) for items in rows))

    def _step(self, xp: Any, arrays: Sequence[Array], precision: Any) -> list[Array]:
        """Return the outputs of one step."""
        graph = self.body.graph
        known: dict[Value, Array] = dict(zip(graph.inputs, arrays, strict=True))
        for node in graph.nodes:
            given = [known[v] for v in node.operands]
            if precision is not None and keeps_number(node):
                results: Sequence[Array] = given[:1]
            elif isinstance(node.op, Scan):
                results = node.op.evaluate(xp, given, precision)
            else:
                results = node.op.reference(xp, *given)
            for value, array in zip(node.results, results, strict=True):
                raises = precision is not None and value.type.dtype.is_float
                known[value] = array.astype(precision, copy=False) if raises else array
        return [known[v] for v in graph.outputs]


def body_of(inputs: Sequence[Value], outputs: Sequence[Value]) -> Body:
    """Return the nodes between values of a graph as a body, with names of its own.

    Equal computations have equal bodies, whatever their names in the model. Constants are copied. Softmax becomes its
    parts, which a block computes like other sums.
    """
    graph = Graph("body")
    made = {value: graph.add_input(f"x{index}", value.type) for index, value in enumerate(inputs)}
    for node in nodes_between(inputs, outputs):
        operands = [made[v] for v in node.operands]
        if isinstance(node.op, Softmax):
            made[node.result] = _softmax_by_parts(graph, node.op, *operands)
            continue
        copied = graph.insert(node.op, operands, types=[v.type for v in node.results])
        made.update(zip(node.results, copied.results, strict=True))
    graph.set_outputs([made[v] for v in outputs], [f"y{index}" for index in range(len(outputs))])
    return Body(graph)


def _softmax_by_parts(graph: Graph, op: Softmax, x: Value) -> Value:
    """Add the nodes of a softmax, which computes in f32 if `x` has fewer bits."""

    def add(made: Op, *operands: Value) -> Value:
        return graph.insert(made, operands).result

    axes, halves = (op.axis % x.type.rank,), x.type.dtype in HALVES
    wide = add(Cast(DType.F32), x) if halves else x
    shifted = add(pw("sub"), wide, add(Reduce("max", axes), wide))
    powers = add(pw("exp"), shifted)
    total = add(Reduce("sum", axes), powers)
    result = add(pw("sub"), shifted, add(pw("log"), total)) if op.log else add(pw("div"), powers, total)
    return add(Cast(x.type.dtype), result) if halves else result


def dependents(nodes: Sequence[Node], values: Sequence[Value]) -> list[Node]:
    """Return those of some nodes that depend on values, without the nodes that compute these."""
    changing, found = set(values), list[Node]()
    for node in nodes:
        if any(v in changing for v in node.operands) and not changing.issuperset(node.results):
            found.append(node)
            changing.update(node.results)
    return found


def is_number(value: Value) -> bool:
    """Tell if a value is a constant of one element, which a body holds itself."""
    return value.literal is not None and value.type.size == 1


def nodes_between(inputs: Sequence[Value], outputs: Sequence[Value]) -> list[Node]:
    """Return the nodes that compute some values from others, in an order in which each comes after its operands."""
    found: dict[Node, None] = {}
    todo = [value.node for value in reversed(outputs)]
    given = set(inputs)
    while todo:
        node = todo[-1]
        if node is None or node in found or given.issuperset(node.results):
            todo.pop()
            continue
        waiting = [v.node for v in node.operands if v not in given and v.node is not None and v.node not in found]
        if waiting:
            todo.extend(reversed(waiting))
            continue
        found[node] = None
        todo.pop()
    return list(found)
