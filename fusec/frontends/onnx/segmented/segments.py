"""Split a model where a value must be known on the host, and import its segments one by one.

A segment is everything that can be imported with what is known so far. Nodes that need a value of it, and the nodes
after them, are imported when the values are there: each such node is a host step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace

from fusec.errors import ModelError
from fusec.frontends.custom_ops import CustomOp, qualified
from fusec.frontends.onnx.advice import require_tensors
from fusec.frontends.onnx.emission.emit import ModelValue, TensorList
from fusec.frontends.onnx.emission.host_values import Answer, Compute, HostValueError
from fusec.frontends.onnx.emission.loop_body import LoopBody
from fusec.frontends.onnx.importer import Bound, Importer
from fusec.frontends.onnx.load import CheckedModel
from fusec.frontends.onnx.model_file.split_model import TensorFiles
from fusec.frontends.onnx.model_file.structure import captured
from fusec.frontends.onnx.tables import domain_of
from fusec.frontends.padding_proof import Crop
from fusec.ir import DType, Graph, Literal, TensorType, Value
from fusec.ops.random import STATE_NAME, STATE_TYPE
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class Slot:
    """A tensor that a call holds under a name: an input of the model, or a result of a segment or of a host step."""

    name: str
    type: TensorType


@dataclass(frozen=True)
class HeldList:
    """A sequence of tensors that a call holds."""

    items: tuple[Slot | Literal, ...]
    dtype: DType | None


Held = Slot | Literal | HeldList


@dataclass(frozen=True)
class HostStep:
    """A node that needs values on the host.

    index: number of the node in the model.
    what: names the values in words.
    reads: names of the slots to read, and constants.
    compute: computes results of these arrays, which are inputs of the next segment; None if the values themselves
        decide shapes or branches, so that the next segment is for these values only.
    body: the body of a loop to run, whose results are inputs of the next segment.
    custom: the user's function that `compute` calls.
    crops: tensors on the device, and how the number that is read crops each: the results, which stay on the device.
    """

    index: int
    node: str
    op: str
    what: str
    reads: tuple[str | Literal, ...]
    compute: Compute | None
    body: LoopBody | None
    custom: CustomOp | None = None
    crops: tuple[tuple[str, Crop], ...] = ()

    @property
    def decides(self) -> bool:
        """Tell if the values decide shapes or branches of the next segment."""
        return self.compute is None and self.body is None and not self.crops

    @property
    def most(self) -> int:
        """Return the number of rows that the results have at most; 0 if nothing is cropped."""
        return self.crops[0][1].steps[0][2] if self.crops else 0


@dataclass(frozen=True)
class Segment:
    """A part of a model between host steps.

    inputs: all that it may read; those of the first segment are the inputs of the model.
    graph: its inputs and outputs are slots; None if there is nothing to compute.
    host_inputs: slots of what the host computed for a node, by number of the node, in order of its steps.
    steps: the host steps after it, none in the last segment.
    waiting: numbers of the nodes of the model that are imported after these steps.
    results: outputs of the model that are known.
    """

    inputs: tuple[Slot, ...]
    graph: Graph | None
    host_inputs: Mapping[int, tuple[str, ...]]
    steps: tuple[HostStep, ...]
    waiting: tuple[int, ...]
    results: Mapping[str, Held]
    resume: Callable[[Sequence[Answer]], Segment]

    def following(self, answers: Sequence[Answer]) -> Segment:
        """Import the next segment. answers: for each host step the arrays that it read, or the types of its results.

        Raises ModelError if the model cannot be imported with these values.
        """
        return self.resume(answers)


@dataclass(frozen=True)
class SegmentedModel:
    """A model that is imported in segments; parameters as those of `load_onnx`."""

    model: CheckedModel
    file: str
    files: TensorFiles | None
    weights: MutableMapping[str, Literal]

    def first(self, shapes: Mapping[str, Sequence[int]], bound: Mapping[str, Bound]) -> Graph | Segment:
        """Import what needs no value on the host: the graph of the whole model, or the first segment.

        A model whose inputs or outputs are strings is a segment, because a program has none.
        """
        importer = self.importer()
        importer.begin(shapes, bound)
        importer.nodes(self.model.order, self.model.names)
        if (importer.asked or importer.has_strings) and not importer.problems:
            first = self._segment(importer, {})
            if not self.model.draws or any(slot.name == STATE_NAME for slot in first.inputs):
                return first
            # a later segment draws random numbers, and the call holds their state from the start
            return replace(first, inputs=(*first.inputs, Slot(STATE_NAME, STATE_TYPE)))
        graph, lengths = importer.finish()
        require_tensors(self.file, lengths)
        return graph

    def importer(self) -> Importer:
        """Start an import of the model."""
        return self.model.importer(self.files, self.file, self.weights)

    def _segment(self, importer: Importer, answers: Mapping[int, tuple[Answer, ...]]) -> Segment:
        """Make the segment of what was imported. answers: those that waiting nodes got so far."""
        slots = Slots(importer.graph)
        names = [v.name for v in self.model.graph.output]
        for index in importer.waiting:
            node = self.model.graph.node[index]
            names += [*node.input, *sorted(captured(node))]
        held = {name: slots.held(value, name) for name in names if name and (value := importer.value(name)) is not None}
        outputs = [v.name for v in self.model.graph.output]
        if importer.problems:
            raise importer.report()
        if not importer.waiting:
            require_tensors(self.file, [name for name in outputs if isinstance(held.get(name), HeldList)])
            if missing := [name for name in outputs if name not in held]:
                raise ModelError(f"{self.file}: output {missing[0]!r} is not computed: its node gives fewer results")
        steps = tuple(self._step(index, error, slots) for index, error in importer.asked.items())
        importer.close(list(slots.made), [slot.name for slot in slots.made.values()])

        asked, waiting = tuple(importer.asked), tuple(importer.waiting)

        def resume(new: Sequence[Answer]) -> Segment:
            given = dict(answers)
            for index, answer in zip(asked, new, strict=True):
                given[index] = (*given.get(index, ()), answer)
            return self._after(waiting, held, given)

        return Segment(
            tuple(Slot(v.name, v.type) for v in importer.graph.inputs),
            _without_unused_inputs(importer.graph) if slots.made else None,
            {index: tuple(v.name for v in values) for index, values in importer.host_results.items()},
            steps,
            waiting,
            {name: held[name] for name in outputs if name in held},
            resume,
        )

    def _after(
        self, order: Sequence[int], held: Mapping[str, Held], answers: Mapping[int, tuple[Answer, ...]]
    ) -> Segment:
        """Import the nodes that waited, from what is held."""
        importer = self.importer()
        inputs: dict[str, Value] = {}

        def tensor(name: str, one: Slot | Literal) -> Value:
            if isinstance(one, Literal):
                return importer.emit.literal(one, name)
            if one.name not in inputs:
                inputs[one.name] = importer.graph.add_input(one.name, one.type)
            return inputs[one.name]

        slots = {name: one for name, one in held.items() if isinstance(one, Slot)}
        for name, one in {**slots, **held}.items():  # slots first, because a constant can have another name
            if isinstance(one, HeldList):
                items = tuple(tensor(f"{name}[{i}]", item) for i, item in enumerate(one.items))
                importer.scope.values[name] = TensorList(items, one.dtype)
            else:
                importer.scope.values[name] = tensor(name, one)
        importer.nodes(order, self.model.names, answers)
        return self._segment(importer, {i: answers[i] for i in importer.waiting if i in answers})

    def _step(self, index: int, error: HostValueError, slots: Slots) -> HostStep:
        node = self.model.graph.node[index]
        held = [slots.one(value, value.name) for value in error.values]
        reads = tuple(one if isinstance(one, Literal) else one.name for one in held)
        op = qualified(domain_of(node), node.op_type)
        name = self.model.names[index]
        crops: tuple[tuple[str, Crop], ...] = ()
        if error.rows is not None:
            rows, most = slots.one(error.rows, error.rows.name), error.rows.type.shape[0]
            assert isinstance(rows, Slot)
            crops = ((rows.name, Crop(((0, 1, most, most),))),)
        return HostStep(index, name, op, error.what, reads, error.compute, error.body, error.custom, crops)


class Slots:
    """Names for the values that leave a segment. made: those that its graph computes."""

    def __init__(self, graph: Graph):
        self._taken = {value.name for value in graph.inputs}
        self.made: dict[Value, Slot] = {}

    def held(self, value: ModelValue, name: str) -> Held:
        """Return how a call holds a value; a value with several names has one slot."""
        if isinstance(value, TensorList):
            return HeldList(tuple(self.one(v, f"{name}[{i}]") for i, v in enumerate(value.items)), value.dtype)
        return self.one(value, name)

    def one(self, value: Value, name: str) -> Slot | Literal:
        """Return how a call holds a tensor."""
        if value.literal is not None:
            return value.literal
        if value.node is None:
            return Slot(value.name, value.type)
        if value not in self.made:
            while name in self._taken:
                name += "'"
            self._taken.add(name)
            self.made[value] = Slot(name, value.type)
        return self.made[value]


def _without_unused_inputs(graph: Graph) -> Graph:
    return graph.extract([v for v in graph.inputs if v.uses], list(graph.nodes), graph.outputs, graph.output_names)
