"""Split a training step at its gradients: one graph computes them, and another one updates the parameters.

Between the two, workers replace their gradients by the mean over all workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusec.builder import Builder, Tensor
from fusec.errors import ModelError
from fusec.ir import Graph, Value, quote
from fusec.system.dataclass import dataclass
from fusec.training.loss_scaling import narrowest

PREFIX = "gradient of "


@dataclass(frozen=True)
class HalfStep:
    """One of the two graphs. state: inputs that stay on the device, with the outputs that replace them."""

    graph: Graph
    state: Mapping[str, str]


@dataclass(frozen=True)
class SplitStep:
    """A training step in two graphs.

    backward: from a batch to the gradients, which are state of both graphs, named by `gradients`.
    update: from the gradients to new parameters.
    """

    backward: HalfStep
    update: HalfStep
    gradients: tuple[str, ...]


def split_step(builder: Builder) -> SplitStep:
    """Split the graph of a builder at the gradients that `fusec.backward` added to it.

    Raises ModelError if there are no gradients. Also if the update reads a value that depends on the batch in another
    way than through the gradients, because it would differ between workers.
    """
    if not builder.gradients:
        raise builder.error("data parallel training needs gradients of parameters: call fusec.backward first")
    marks = {PREFIX + name: narrowest(gradient) for name, gradient in builder.gradients.items()}
    return _Cut(builder, builder.graph(also=marks), marks).split()


class _Cut:
    """The graph of a step, with sets of its values.

    gradients: the values to split at, by name.
    from_batch: values that depend on the inputs that the gradients depend on.
    after: values that depend on gradients.
    """

    def __init__(self, builder: Builder, graph: Graph, marks: Iterable[str | Tensor]):
        self.graph = graph
        self.outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
        self.state = {name: builder.updates.get(name, "") for name in builder.parameters}
        found = {str(name): self.outputs.pop(str(name)) for name in marks}
        needed = self._ancestors(found.values())
        batch = {v for v in graph.inputs if v in needed and v.name not in self.state}
        self.from_batch = self._descendants(batch)
        named = {value: name for name, value in found.items() if value in self.from_batch}  # each value once
        self.gradients = {name: value for value, name in named.items()}
        self.after = self._descendants(set(self.gradients.values())) - set(self.gradients.values())

    def split(self) -> SplitStep:
        updates = {output: name for name, output in self.state.items() if output}
        early: dict[str, Value] = {}  # outputs of the first graph
        late: dict[str, Value] = {}
        for name, value in self.outputs.items():
            waits = value in self.after or (name in updates and value not in self.from_batch)
            (late if waits else early)[name] = value
        self._require_agreement(late, {updates[name] for name in early if name in updates})
        backward = self._half({**early, **self.gradients}, {})
        for name, value in self.gradients.items():
            backward.graph.add_input(name, value.type)
        renamed = [f"{n}.next" if n in self.gradients else n for n in backward.graph.output_names]
        backward.graph.set_outputs(backward.graph.outputs, renamed)
        state = {**backward.state, **{name: f"{name}.next" for name in self.gradients}}
        return SplitStep(
            HalfStep(backward.graph, state),
            self._half(late, {value: name for name, value in self.gradients.items()}),
            tuple(self.gradients),
        )

    def _half(self, outputs: Mapping[str, Value], given: Mapping[Value, str]) -> HalfStep:
        """Extract the graph of some outputs. given: values that become inputs, with their names."""
        needed = self._ancestors(outputs.values(), given)
        nodes = [node for node in self.graph.nodes if any(v in needed and v not in given for v in node.results)]
        inputs = [*(v for v in self.graph.inputs if v in needed or self.state.get(v.name, "") in outputs), *given]
        half = self.graph.extract(inputs, nodes, list(outputs.values()), list(outputs))
        for value, name in zip(half.inputs[len(inputs) - len(given) :], given.values(), strict=True):
            half.rename(value, name)
        held = {v.name: self.state[v.name] for v in half.inputs if v.name in self.state}
        state = {name: output if output in outputs else "" for name, output in held.items()}
        return HalfStep(half, {**state, **dict.fromkeys(given.values(), "")})

    def _require_agreement(self, late: Mapping[str, Value], early_updates: set[str]) -> None:
        """Raise ModelError if the second graph would compute with values that differ between workers."""
        given = set(self.gradients.values())
        for value in self._ancestors(late.values(), given):
            differs = value in self.from_batch and value not in self.after and value not in given
            if differs or (value.node is None and value.name in early_updates):
                raise ModelError(
                    f"the update reads {quote(value.name)}, which depends on the batch but is no gradient, so it would "
                    "differ between workers"
                )

    def _ancestors(self, values: Iterable[Value], stop: Iterable[Value] = ()) -> set[Value]:
        """Return the values with all that they are computed from, up to those in `stop`."""
        found, stack, ends = set[Value](), list(values), set(stop)
        while stack:
            value = stack.pop()
            if value not in found:
                found.add(value)
                stack += value.node.operands if value.node is not None and value not in ends else ()
        return found

    def _descendants(self, values: set[Value]) -> set[Value]:
        """Return the values with all that is computed from them."""
        found = set(values)
        for node in self.graph.nodes:
            if any(v in found for v in node.operands):
                found.update(node.results)
        return found
