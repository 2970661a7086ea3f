"""An ONNX model in the making: its nodes, initializers and names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from fusec.ir import Constant, DType, Graph, Node

Array = np.ndarray[Any, Any]
OPSET = 21  # GroupNormalization with a scale per channel, Gelu, AveragePool with dilations
IR_VERSION = 10

TYPES: Mapping[DType, int] = {
    DType.F64: TensorProto.DOUBLE,
    DType.F32: TensorProto.FLOAT,
    DType.F16: TensorProto.FLOAT16,
    DType.BF16: TensorProto.BFLOAT16,
    DType.I64: TensorProto.INT64,
    DType.I32: TensorProto.INT32,
    DType.I16: TensorProto.INT16,
    DType.I8: TensorProto.INT8,
    DType.U64: TensorProto.UINT64,
    DType.U32: TensorProto.UINT32,
    DType.U16: TensorProto.UINT16,
    DType.U8: TensorProto.UINT8,
    DType.BOOL: TensorProto.BOOL,
    DType.F8E4M3: TensorProto.FLOAT8E4M3FN,
    DType.F8E4M3FNUZ: TensorProto.FLOAT8E4M3FNUZ,
    DType.F8E5M2: TensorProto.FLOAT8E5M2,
    DType.F8E5M2FNUZ: TensorProto.FLOAT8E5M2FNUZ,
    DType.F8E8M0: TensorProto.FLOAT8E8M0,
    DType.F4E2M1: TensorProto.FLOAT4E2M1,
    DType.I4: TensorProto.INT4,
    DType.U4: TensorProto.UINT4,
    DType.I2: TensorProto.INT2,
    DType.U2: TensorProto.UINT2,
}

Notes = Mapping[Node, Mapping[str, str]]


class Exporter:
    """Writes a graph with what a table says of each op."""

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
        """The whole of it."""
        graph = self.graph
        for node in graph.nodes:
            self._export(node)
        outputs: list[Any] = []
        for name, value in zip(graph.output_names, graph.outputs, strict=True):
            if self.names[value] != name:
                self.nodes.append(helper.make_node("Identity", [self.names[value]], [name]))
            outputs.append(helper.make_tensor_value_info(name, TYPES[value.type.dtype], value.type.shape))
        inputs = [helper.make_tensor_value_info(v.name, TYPES[v.type.dtype], v.type.shape) for v in graph.inputs]
        made = helper.make_graph(self.nodes, graph.name or "graph", inputs, outputs, self.initializers)
        model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="fusec")
        model.ir_version = IR_VERSION
        helper.set_model_props(model, dict(properties))
        if self.notes:
            known = {v.name for v in (*inputs, *outputs)}
            values = {self.names[v]: v.type for v in graph.values() if v.literal is None and v in self.names}
            model.graph.value_info.extend(
                helper.make_tensor_value_info(name, TYPES[type.dtype], type.shape)
                for name, type in values.items()
                if name not in known
            )
        return model

    def _export(self, node: Node) -> None:
        for value in node.results:
            if value not in self.names:
                self.names[value] = self.fresh(value.name)
        if isinstance(node.op, Constant):
            self.initializer(node.op.literal.array, self.names[node.result])
            return
        first = len(self.nodes)
        results = self.table[node.op.name](self, node, [self.names[v] for v in node.operands])
        # the nodes that gave the results get their names; a result that is no node's goes through Identity
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
        """A name that nothing has."""
        name, count = hint, 0
        while name in self.taken:
            count += 1
            name = f"{hint}_{count}"
        self.taken.add(name)
        return name

    def initializer(self, array: Array, name: str) -> str:
        """Keep an array under a name; the name."""
        held = np.ascontiguousarray(array)
        tensor = TensorProto(name=name, data_type=TYPES[DType.of(held.dtype)], dims=array.shape)
        tensor.raw_data = held.tobytes()
        self.initializers.append(tensor)
        return name

    def ints(self, values: Sequence[int] | Array) -> str:
        """Integers, as operators take them that are shapes or axes."""
        return self.initializer(np.array(values, np.int64), self.fresh("const"))

    def number(self, value: float, node: Node, operand: int = 0) -> str:
        """A scalar of the dtype of an operand."""
        return self.initializer(np.array(value).astype(node.operands[operand].type.dtype.numpy), self.fresh("const"))

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator with one result; its name."""
        return self.several(kind, inputs, 1, attributes)[0]

    def several(self, kind: str, inputs: Sequence[str], count: int, attributes: Mapping[str, Any]) -> list[str]:
        """Add an operator with some results; their names."""
        results = [self.fresh("t") for _ in range(count)]
        self.nodes.append(helper.make_node(kind, inputs, results, **attributes))
        return results


Export = Callable[[Exporter, Node, list[str]], list[str]]


def operator(kind: str, *keep: str, **fixed: Any) -> Export:
    """An operator of the same operands; `keep` names attributes that both call alike."""

    def export(e: Exporter, node: Node, x: list[str]) -> list[str]:
        return [e.op(kind, *x, **{k: node.op.attributes[k] for k in keep}, **fixed)]

    return export


def formula(build: Callable[..., str]) -> Export:
    """A composition: `build(e, node, *operands)`."""
    return lambda e, node, x: [build(e, node, *x)]
