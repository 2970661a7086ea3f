"""Import loops of a known number of steps as one op, if a kernel can run all steps in one launch.

The body is imported once, with values that stand for what changes from step to step. What no step changes is computed
before the loop.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import field

import numpy as np
from onnx import GraphProto

from fusec.errors import VerifyError
from fusec.frontends.onnx.emission.emit import Emitter, ModelValue, TensorList
from fusec.frontends.onnx.model_file.functions import all_nodes
from fusec.frontends.onnx.model_file.structure import draws
from fusec.frontends.onnx.ops.loop_rows import add_computed, add_gathered
from fusec.ir import Constant, Node, Op, Value
from fusec.lowering.scan_plan import why_not
from fusec.ops import Reshape, Scan, Slice, pw
from fusec.ops.scan import body_of, dependents, is_number
from fusec.system.dataclass import dataclass

MAX_STEPS = 1 << 20
LEAST_STEPS = 8  # fewer are unrolled, because their nodes may fuse with others


@dataclass(frozen=True, eq=False)
class LoopForm:
    """A loop: what its body takes and gives.

    body: takes the trip and the condition (`is_loop`), the states, and a row of each sequence.
    states: before the first step.
    sequences: with the steps first.
    lists: places among what a Loop carries that are sequences of tensors, to which a step appends one.
    counted: the condition that the body computes took part in `steps`; otherwise it has to be true in each step.
    """

    body: GraphProto
    steps: int
    states: Sequence[Value]
    sequences: Sequence[Value] = ()
    is_loop: bool = False
    lists: tuple[int, ...] = ()
    counted: bool = False


def loop_as_scan(g: Emitter, form: LoopForm) -> tuple[Value, ...] | None:
    """Return the last states and the stacked rows of a loop, those of its lists last; None if it has to be unrolled."""
    if form.steps < LEAST_STEPS:
        return None
    if any(draws(node) for node in all_nodes(form.body.node)):
        g.remark("its loop is unrolled, because its body draws random numbers")
        return None
    before, found = g.graph.last, tuple[Value, ...]()
    made = _Import(g, form)
    try:
        with g.tentative(), g.unrolling():
            found = made.scan(g.subgraph(form.body, made.given()), before)
    except VerifyError:  # unrolled, the body may do without what it lacked
        pass
    _erase_unread(g, before, found)
    g.remark("" if found or not made.refusal else f"its loop is unrolled, because {made.refusal}")
    return found or None


@dataclass(eq=False)
class _Import:
    """The import of a body, with values that stand for those of a step.

    states, rows: stand for states and rows of sequences.
    trip: stands for the number of the step; only loops have one.
    refusal: why no kernel runs the loop.
    """

    g: Emitter
    form: LoopForm
    states: list[Value] = field(default_factory=list[Value])
    rows: list[Value] = field(default_factory=list[Value])
    trip: Value | None = None
    refusal: str = ""

    def given(self) -> list[ModelValue]:
        """Return what the body takes."""
        self.states = [self._stand_in(pw("identity"), v) for v in self.form.states]
        for v in self.form.sequences:
            rank, shape = v.type.rank, v.type.shape[1:]
            first = self._stand_in(Slice((0,) * rank, (1, *shape), (1,) * rank), v)
            self.rows.append(self._stand_in(Reshape(shape), first))
        if not self.form.is_loop:
            return [*self.states, *self.rows]
        self.trip = self._stand_in(pw("identity"), self.g.constant(np.array(0, np.int64)))
        carried: list[ModelValue] = [*self.states]
        for place in self.form.lists:
            carried.insert(place, TensorList(()))
        return [self.trip, self.g.constant(np.array(True)), *carried]

    def _stand_in(self, op: Op, value: Value) -> Value:
        """Return a value that is not known at import."""
        return self.g.graph.insert(op, [value]).result

    def scan(self, results: Sequence[ModelValue], before: Node | None) -> tuple[Value, ...]:
        """Return the results of a scan of the imported body; none if no kernel runs it."""
        form, count = self.form, len(self.states)
        if form.is_loop:
            condition, *results = results
            if not form.counted and not _is_true(condition):
                return ()
        values = self._tensors(results)
        if len(values) < count:
            return ()
        states = list(zip(self.states, form.states, strict=True))
        fixed = [new is v for new, v in zip(values, self.states, strict=False)]
        same = {v: old for (v, old), never in zip(states, fixed, strict=True) if never}
        for v, old in same.items():
            self.g.graph.replace(v, old)
        values = [same.get(v, v) for v in values]
        rows: dict[Value, Value] = dict(zip(self.rows, form.sequences, strict=True))
        first = [v for v in (*self.states, *rows, self.trip) if v is not None and v not in same]
        inner = dependents(self.g.graph.since(before), first)
        varying = {*first, *(v for node in inner for v in node.results)}
        if self.trip is not None:
            add_gathered(self.g, rows, [n for n in inner if n.operands[0] not in varying], self.trip, form.steps)
            rows[self.trip] = self.g.constant(np.arange(form.steps))
        add_computed(self.g, rows, inner, varying, has_states=not all(fixed))
        changing = [(v, old, new) for (v, old), new in zip(states, values, strict=False) if v not in same]
        given = list(dict.fromkeys(v for v in values[count:] if v not in rows))
        outputs = [*(new for *_, new in changing), *given]
        made: Sequence[Value] = ()
        if outputs:
            read = _read(inner, rows, outputs)
            used = [v for v in rows if v in read]
            shared = [v for v in read if v not in varying and not is_number(v)]
            body = body_of([*(v for v, *_ in changing), *used, *shared], outputs)
            op = Scan(body, form.steps, len(changing), len(used))
            self.refusal = why_not(op)
            if self.refusal:
                return ()
            made = self.g.many(op, *(old for _, old, _ in changing), *(rows[v] for v in used), *shared)
        rows.update(zip(given, made[len(changing) :], strict=True))
        last = iter(made)
        return (*(same[v] if v in same else next(last) for v in self.states), *(rows[v] for v in values[count:]))

    def _tensors(self, results: Sequence[ModelValue]) -> list[Value]:
        """Return what a step gives: states, rows, and what it appends to sequences; nothing if that is impossible."""
        lists = self.form.lists
        appended = [v.items for v in (results[place] for place in lists) if isinstance(v, TensorList)]
        others = [v for place, v in enumerate(results) if place not in lists]
        first = others[: max(len(self.states), self.g.outputs - len(lists))]
        values = [v for v in first if isinstance(v, Value)]
        possible = len(values) == len(first) and [len(items) for items in appended] == [1] * len(lists)
        return [*values, *(items[0] for items in appended)] if possible else []


def _is_true(condition: ModelValue) -> bool:
    return isinstance(condition, Value) and condition.literal is not None and bool(condition.literal.array.all())


def _read(inner: Sequence[Node], rows: Container[Value], outputs: Sequence[Value]) -> dict[Value, None]:
    """Return the values that a step reads or gives, without those that only rows depend on."""
    read = dict.fromkeys(outputs)
    for node in reversed(inner):
        if any(v in read and v not in rows for v in node.results):
            read.update(dict.fromkeys(node.operands))
    return read


def reversed_rows(g: Emitter, x: Value) -> Value:
    """Return a tensor with its rows from the last to the first."""
    return g(Slice.of_rows_backward(x.type.shape), x)


def _erase_unread(g: Emitter, before: Node | None, results: Sequence[Value]) -> None:
    """Erase what the import of the body has added and nothing reads. Constants may be initializers of the model."""
    for node in reversed(g.graph.since(before)):
        read = any(v.uses or v in results for v in node.results)
        if not isinstance(node.op, Constant) and not read:
            g.graph.erase(node)
