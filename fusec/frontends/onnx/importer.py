"""Import the nodes of a model into a Graph, one by one, and report all problems in one error."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto

from fusec.errors import ModelError, VerifyError
from fusec.frontends.onnx.advice import NO_HOST_STEPS
from fusec.frontends.onnx.emission.annotations import check
from fusec.frontends.onnx.emission.emit import ModelValue, TensorList
from fusec.frontends.onnx.emission.host_values import Answer, HostValueError
from fusec.frontends.onnx.model_file.inputs import input_types
from fusec.frontends.onnx.model_file.split_model import TensorFiles
from fusec.frontends.onnx.model_file.structure import abridged, captured, node_names, report
from fusec.frontends.onnx.node_importer import NodeImporter
from fusec.ir import DType, Graph, Literal, Value
from fusec.system.printable import printable

# The value of an input: a tensor, a sequence of tensors, or None for an optional value without an element.
Bound = Literal | np.ndarray[Any, Any] | Sequence[np.ndarray[Any, Any]] | None


class InputsNeededError(ModelError):
    """Shapes or control flow of the model depend on the values of the inputs named in `inputs`."""

    inputs: frozenset[str] = frozenset()


class Importer(NodeImporter):
    """One import: the graph so far, and the problems found.

    file: name of the model in messages.
    noted: notes of earlier imports of the model, which are not shown again.
    The others are those of `NodeImporter`.
    """

    def __init__(
        self,
        source: GraphProto,
        opsets: Mapping[str, int],
        files: TensorFiles | None,
        file: str,
        weights: MutableMapping[str, Literal],
        noted: set[str],
    ):
        super().__init__(source, opsets, files, weights)
        self.noted = noted
        self.file = file
        self.asked: dict[int, HostValueError] = {}  # by index of the node
        self.waiting: list[int] = []  # nodes that asked or need results of those, in order
        self.host_results: dict[int, list[Value]] = {}  # inputs that the host computed, by index of the node

    def run(
        self,
        order: Sequence[int],
        names: Sequence[str],
        shapes: Mapping[str, Sequence[int]],
        bound: Mapping[str, Bound],
    ) -> tuple[Graph, dict[str, int]]:
        """Import the nodes. Returns the graph, and the length of each output that is a sequence.

        order: indices of the nodes to import, in order.
        names: name of each node.
        shapes: shapes of inputs, by name.
        bound: values of inputs, by name.

        Raises ModelError: one error that lists all problems. InputsNeededError if values of inputs would solve some.
        """
        self.begin(shapes, bound)
        self.nodes(order, names)
        return self.finish()

    def begin(self, shapes: Mapping[str, Sequence[int]], bound: Mapping[str, Bound]) -> None:
        """Add the inputs of the model to the graph, or their values as constants."""
        for name, type in input_types(self.source, shapes, self.file, frozenset(bound)).items():
            self.scope.values[name] = self.graph.add_input(name, type)
        self._bind(bound)

    def nodes(
        self, order: Sequence[int], names: Sequence[str], answers: Mapping[int, Sequence[Answer]] | None = None
    ) -> None:
        """Import nodes, and note the problems of those that cannot be imported.

        answers: what the host gave to nodes that asked in earlier imports, by index.
        """
        scope = self.scope
        for index in order:
            node = self.source.node[index]
            for name in filter(None, node.input):
                self.value_of(scope, name)  # reads initializers, and notes a problem with one here
            if not scope.failed.isdisjoint((*node.input, *captured(node))):
                scope.failed.update(filter(None, node.output))
                self.waiting.append(index)
                continue
            self.emit.answer((answers or {}).get(index, ()))
            before = len(self.emit.host_results)
            try:
                self.import_node(scope, node, names[index])
            except HostValueError as error:
                scope.failed.update(filter(None, node.output))
                self.asked[index] = error
                self.waiting.append(index)
            except VerifyError as error:
                scope.failed.update(filter(None, node.output))
                self.problems.append(_problem(node, names[index], error))
            self.host_results[index] = self.emit.host_results[before:]

    def finish(self) -> tuple[Graph, dict[str, int]]:
        """Return the graph, whose outputs are those of the model; see `run`."""
        scope = self.scope
        flat: list[tuple[str, Value]] = []
        lengths: dict[str, int] = {}
        for name in (v.name for v in self.source.output):
            value = self.value_of(scope, name)
            if isinstance(value, TensorList) and not value.present:
                self.problems.append(f"output {name!r} is an optional value without an element")
            elif isinstance(value, TensorList):
                lengths[name] = len(value.items)
                flat += [(f"{name}[{i}]", item) for i, item in enumerate(value.items)]
            elif value is not None:
                flat.append((name, value))
            elif name not in scope.failed:
                self.problems.append(f"output {name!r} is not computed: its node gives fewer results")
        if self.problems or self.asked:
            raise self.report()
        self.close([v for _, v in flat], [name for name, _ in flat])
        return self.graph, lengths

    def close(self, values: Sequence[Value], names: Sequence[str]) -> None:
        """Give the graph its outputs, drop what they do not need, and verify it. Raises ModelError if it is wrong."""
        self.graph.set_outputs(values, names)
        self.graph.prune()
        try:
            self.graph.verify()
        except VerifyError as error:
            raise ModelError(f"{self.file}: {error}") from error
        self._warn()

    def value(self, name: str) -> ModelValue | None:
        """Return the value of a name of the model; None if it has none yet."""
        return self.value_of(self.scope, name)

    @property
    def has_strings(self) -> bool:
        """Tell if inputs or outputs of the model are strings."""
        outputs = (self.value(declared.name) for declared in self.source.output)
        values = (*self.graph.inputs, *(value for value in outputs if isinstance(value, Value)))
        return any(value.type.dtype is DType.STRING for value in values)

    def _warn(self) -> None:
        """Warn the user of the notes that no earlier import of this model has shown."""
        for what, places in self.emit.notes.items():
            if what not in self.noted:
                self.noted.add(what)
                warnings.warn(f"{self.file}: {abridged(list(places))}: {what}", stacklevel=2)

    def _bind(self, bound: Mapping[str, Bound]) -> None:
        for name, given in bound.items():
            try:
                if given is None:
                    self.scope.values[name] = TensorList((), present=False)
                elif isinstance(given, np.ndarray | Literal):
                    literal = given if isinstance(given, Literal) else Literal.of_host(given)
                    value = self.emit.literal(literal, name)
                    check(self.scope, name, value, self.emit)
                    self.scope.values[name] = value
                else:
                    items = [self.emit.literal(Literal.of(a), f"{name}[{i}]") for i, a in enumerate(given)]
                    self.scope.values[name] = TensorList(tuple(items))
            except VerifyError as error:
                self.scope.failed.add(name)
                self.problems.append(f"input {name!r}: {error}")

    def report(self) -> ModelError:
        """Return one error that lists all problems, and the nodes that need values."""
        asked = [_problem(self.source.node[i], node_names(self.source.node)[i], e) for i, e in self.asked.items()]
        needed: set[str] = set()
        for error in self.asked.values():
            needed |= _inputs_above(error.decisive)
        text = str(report(self.file, [*self.problems, *asked]))
        if not self.asked:
            return ModelError(text)
        error = InputsNeededError(f"{text}\n({NO_HOST_STEPS})")
        error.inputs = frozenset(needed)
        return error


def _problem(node: NodeProto, name: str, error: VerifyError) -> str:
    return f"node {name!r} ({printable(node.op_type)}): {error}"


def _inputs_above(values: Sequence[Value]) -> set[str]:
    """Return the names of the graph inputs that values are computed from."""
    seen, stack, names = set(values), list(values), set[str]()
    while stack:
        current = stack.pop()
        if current.node is None:
            names.add(current.name)
            continue
        for operand in current.node.operands:
            if operand not in seen:
                seen.add(operand)
                stack.append(operand)
    return names
