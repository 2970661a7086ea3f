"""fusec as a backend of onnx: `onnx.backend.base.Backend` over the front end and the reference semantics on the CPU.

Shapes are concrete in fusec, so a model is imported for the shapes of the inputs it is run with. Where a shape or a
branch depends on the *value* of an input (Reshape's operand as a graph input), that input alone is made a constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from onnx import ModelProto, NodeProto, helper
from onnx.backend.base import Backend, BackendRep

from fusec.errors import ExecutionError
from fusec.frontends.onnx.importer import Bound, InputsNeededError
from fusec.frontends.onnx.load import load_bound
from fusec.ir import Graph
from fusec.printable import printable
from fusec.reference import evaluate

Array = np.ndarray[Any, Any]


class FusecBackendRep(BackendRep):
    """A model to be run; `graph` is what the last call ran."""

    def __init__(self, model: ModelProto):
        self.model = model
        self.graph: Graph | None = None
        held = {t.name for t in model.graph.initializer} | {t.values.name for t in model.graph.sparse_initializer}
        self.inputs = [v.name for v in model.graph.input if v.name not in held]

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Outputs in the model's order, arrays or lists of arrays; inputs in its order or by name."""
        given = self.named(inputs)
        graph, lengths = self.compiled(given)
        self.graph = graph
        arrays = {v.name: given[v.name] for v in graph.inputs}
        results = evaluate(graph, arrays)
        return tuple(
            [results[f"{v.name}[{i}]"] for i in range(lengths[v.name])] if v.name in lengths else results[v.name]
            for v in self.model.graph.output
        )

    def compiled(self, given: Mapping[str, Bound]) -> tuple[Graph, dict[str, int]]:
        """The graph for these inputs, and the lengths of the outputs that are sequences."""
        bound = {name: value for name, value in given.items() if not isinstance(value, np.ndarray)}
        while True:
            shapes = {n: cast("Array", v).shape for n, v in given.items() if n not in bound}
            try:
                return load_bound(self.model, shapes, bound, "<model>")
            except InputsNeededError as error:
                more = {name: given[name] for name in error.inputs if name not in bound}
                if not more:
                    raise
                bound |= more

    def named(self, inputs: Any) -> dict[str, Any]:
        """The inputs by name, as arrays or lists of them."""
        if isinstance(inputs, Mapping):
            given = dict(cast("Mapping[str, Any]", inputs))
        else:
            listed: Sequence[Any] = inputs if isinstance(inputs, list | tuple) else [inputs]
            names = self.inputs
            if len(listed) == len(self.model.graph.input):
                names = [v.name for v in self.model.graph.input]
            if len(listed) != len(names):
                raise ExecutionError(
                    f"{len(listed)} inputs given, the model takes {len(names)}: {printable(', '.join(names))}"
                )
            given = dict(zip(names, listed, strict=True))
        if missing := [name for name in self.inputs if name not in given]:
            raise ExecutionError(f"no array for input {missing[0]!r}")
        return {n: v if isinstance(v, list) else np.asarray(v) for n, v in given.items() if n in self.inputs}


class FusecBackend(Backend):
    """`prepare(model).run(inputs)`, `run_model` and `run_node`, as onnx's own test suite calls them."""

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> FusecBackendRep:
        """Something to run; the model is imported when the shapes of its inputs are known, at the first run."""
        _require_cpu(device)
        return FusecBackendRep(model)

    @classmethod
    def run_model(cls, model: ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """One node as a model of its own, in the newest opset unless `opset_version` says another."""
        arrays = [np.asarray(a) for a in inputs]
        names = [n for n in dict.fromkeys(node.input) if n]
        infos = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in zip(names, arrays, strict=True)
        ]
        outputs = [helper.make_empty_tensor_value_info(n) for n in node.output if n]
        graph = helper.make_graph([node], node.name or node.op_type, infos, outputs)
        opset = kwargs.get("opset_version")
        imports = [helper.make_opsetid(node.domain, opset)] if opset else None
        return cls.run_model(helper.make_model(graph, opset_imports=imports), arrays, device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device.split(":")[0].upper() == "CPU"


def _require_cpu(device: str) -> None:
    if not FusecBackend.supports_device(device):
        raise ExecutionError(f"the backend runs on the CPU, not on {device!r}")


prepare = FusecBackend.prepare
run_model = FusecBackend.run_model
run_node = FusecBackend.run_node
supports_device = FusecBackend.supports_device
