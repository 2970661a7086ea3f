"""Build an ONNX model: its nodes, initializers and names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from fusec.exporters.onnx_element_types import ELEMENT_TYPES
from fusec.ir import Constant, DType, Graph, HostArray, Node, TensorType

OPSET = 21  # GroupNormalization with a scale per channel, Gelu, AveragePool with dilations
IR_VERSION = 10

Notes = Mapping[Node, Mapping[str, str]]


class Exporter:
    """Writer of a graph as an ONNX model.

    table: export function of each op.
    notes: metadata for the operators of some nodes.
    """

    def __init__(self, graph: Graph, table: Mapping[str, Export], notes: Notes):
        self.graph = graph
        self.table = table
        self.notes = notes
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.taken = {*graph.output_names, *(v.name for v in graph.inputs)}
        self.names: dict[Any, str] = {v: v.name for v in graph.inputs}
        for name, value in zip(graph.output_names, graph.outputs, strict=True):
            made = value.node is not None and value.literal is None
            if made and value not in self.names and name not in (v.name for v in graph.inputs):
                self.names[value] = name

    def model(self, properties: Mapping[str, str]) -> ModelProto:
        """Export the graph. `properties`: metadata of the model."""
        graph = self.graph
        for node in graph.nodes:
            self._export(node)
        outputs: list[Any] = []
        for name, value in zip(graph.output_names, graph.outputs, strict=True):
            if self.names[value] != name:
                self.nodes.append(helper.make_node("Identity", [self.names[value]], [name]))
            outputs.append(_value_info(name, value.type))
        inputs = [_value_info(v.name, v.type) for v in graph.inputs]
        made = helper.make_graph(self.nodes, graph.name or "graph", inputs, outputs, self.initializers)
        model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="fusec")
        model.ir_version = IR_VERSION
        helper.set_model_props(model, dict(properties))
        if self.notes:
            known = {v.name for v in (*inputs, *outputs)}
            values = {self.names[v]: v.type for v in graph.values() if v.literal is None and v in self.names}
            model.graph.value_info.extend(_value_info(name, type) for name, type in values.items() if name not in known)
        return model

    def body(self, graph: Graph, captured: Sequence[str], in_loop: bool) -> GraphProto:
        """Export the body of a loop as a subgraph. Its names differ from all others of the model.

        captured: names in this model of the last inputs, which the body reads by these names.
        in_loop: add the number of the step and a condition to the inputs, and the condition to the outputs.
        """
        inner = Exporter(Graph(graph.name), self.table, {})
        inner.taken = self.taken
        count = len(graph.inputs) - len(captured)
        inner.names = dict(zip(graph.inputs[count:], captured, strict=True))
        inputs: list[ValueInfoProto] = []
        outputs: list[ValueInfoProto] = []
        if in_loop:
            number, goes_on = self.fresh("step"), self.fresh("goes_on")
            inputs += [_value_info(number, TensorType((), DType.I64)), _value_info(goes_on, TensorType((), DType.BOOL))]
            outputs.append(_value_info(inner.op("Identity", goes_on), TensorType((), DType.BOOL)))
        for value in graph.inputs[:count]:
            inner.names[value] = self.fresh(value.name)
            inputs.append(_value_info(inner.names[value], value.type))
        for node in graph.nodes:
            inner._export(node)
        # through Identity, because one may be an input, a constant, or given twice
        outputs += [_value_info(inner.op("Identity", inner.names[value]), value.type) for value in graph.outputs]
        return helper.make_graph(inner.nodes, graph.name or "body", inputs, outputs, inner.initializers)

    def _export(self, node: Node) -> None:
        """Export a node as one or more ONNX operators, whose results get the names of the graph."""
        for value in node.results:
            if value not in self.names:
                self.names[value] = self.fresh(value.name)
        if isinstance(node.op, Constant):
            self.initializer(node.op.literal.array, self.names[node.result])
            return
        first = len(self.nodes)
        results = self.table[node.op.name](self, node, [self.names[v] for v in node.operands])
        # rename the results to the names of the graph; a result that no new operator makes goes through Identity
        renamed = dict(zip(results, (self.names[v] for v in node.results), strict=True))
        made = {name for n in self.nodes[first:] for name in n.output}
        for n in self.nodes[first:]:
            for names in (n.input, n.output):
                for i, name in enumerate(names):
                    if name in made and name in renamed:
                        names[i] = renamed[name]
        for result, name in renamed.items():
            if result not in made:
                self.nodes.append(helper.make_node("Identity", [result], [name]))
        for n in self.nodes[first:] if node in self.notes else ():
            n.name = n.output[0]
            for key, text in self.notes[node].items():
                n.metadata_props.add(key=key, value=text)

    def fresh(self, hint: str) -> str:
        """Return a new name that starts with `hint`."""
        name, count = hint, 0
        while name in self.taken:
            count += 1
            name = f"{hint}_{count}"
        self.taken.add(name)
        return name

    def initializer(self, array: HostArray, name: str) -> str:
        """Add an array as an initializer, and return its name."""
        dtype = DType.of(array.dtype)
        tensor = TensorProto(name=name, data_type=ELEMENT_TYPES[dtype], dims=array.shape)
        tensor.raw_data = _bytes(np.ascontiguousarray(array).reshape(-1), dtype.bits)
        self.initializers.append(tensor)
        return name

    def ints(self, values: Sequence[int] | HostArray) -> str:
        """Add i64 integers, for example a shape or axes, and return their name."""
        return self.initializer(np.array(values, np.int64), self.fresh("const"))

    def number(self, value: float, node: Node, operand: int = 0) -> str:
        """Add a scalar of the dtype of an operand of the node, and return its name."""
        return self.initializer(np.array(value).astype(node.operands[operand].type.dtype.numpy), self.fresh("const"))

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator with one result, and return the name of the result."""
        return self.several(kind, inputs, 1, attributes)[0]

    def several(self, kind: str, inputs: Sequence[str], count: int, attributes: Mapping[str, Any]) -> list[str]:
        """Add an operator with `count` results, and return their names."""
        results = [self.fresh("t") for _ in range(count)]
        self.nodes.append(helper.make_node(kind, inputs, results, **attributes))
        return results


def _bytes(flat: HostArray, bits: int) -> bytes:
    """Return an array as ONNX stores it. Types below 8 bits share bytes, the first in the low bits."""
    if bits >= 8:
        return flat.tobytes()
    each = 8 // bits
    codes = np.zeros(-(-flat.size // each) * each, np.uint8)
    codes[: flat.size] = flat.view(np.uint8) & ((1 << bits) - 1)
    return np.bitwise_or.reduce(codes.reshape(-1, each) << np.arange(0, 8, bits, dtype=np.uint8), axis=-1).tobytes()


def _value_info(name: str, type: TensorType) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, ELEMENT_TYPES[type.dtype], type.shape)


Export = Callable[[Exporter, Node, list[str]], list[str]]


def operator(kind: str, *same: str, **fixed: Any) -> Export:
    """Export an op as one ONNX operator of the same operands.

    same: attributes to copy, which have the same name in ONNX.
    fixed: further attributes.
    """

    def export(e: Exporter, node: Node, x: list[str]) -> list[str]:
        return [e.op(kind, *x, **{k: node.op.attributes[k] for k in same}, **fixed)]

    return export


def formula(build: Callable[..., str]) -> Export:
    """Export an op as several operators, which `build(e, node, *operands)` adds. It returns the name of the result."""
    return lambda e, node, x: [build(e, node, *x)]


def cast_to(e: Exporter, x: str, own: DType, wanted: DType) -> str:
    """Cast a value from its own dtype to the one that is wanted."""
    return x if own is wanted else e.op("Cast", x, to=ELEMENT_TYPES[wanted])
