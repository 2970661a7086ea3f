"""Insert QuantizeLinear and DequantizeLinear into an ONNX model, next to the nodes that are quantised.

Names follow onnxruntime's quantiser: `x_QuantizeLinear`, `x_DequantizeLinear`, `w_quantized`, `x_scale`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from fusec.frontends.onnx.model_file.functions import all_nodes
from fusec.frontends.onnx.model_file.structure import captured
from fusec.frontends.onnx.standalone import fresh_name
from fusec.ir import HostArray
from fusec.quantization.model_constants import tensor_of
from fusec.quantization.number_formats import NumberFormat
from fusec.quantization.placement import QuantizedLayer
from fusec.quantization.weights import QuantizedWeight
from fusec.system.dataclass import dataclass

Attributes = Mapping[str, Any]


@dataclass(frozen=True)
class QuantizedOperands:
    """Everything that the quantised operands of a model need.

    format: the format of activations, and the format of weights.
    scales: scale of each activation, by tensor name.
    weights: quantised weight of each layer, by layer name.
    """

    format: NumberFormat
    scales: Mapping[str, HostArray]
    weights: Mapping[str, QuantizedWeight]


def insert_qdq(
    model: ModelProto,
    layers: Iterable[QuantizedLayer],
    operands: QuantizedOperands,
    switches: Mapping[str, str] | None = None,
) -> ModelProto:
    """Return a copy of a model in which the operands of some layers are quantised.

    switches: inputs to add, by layer name: a bool each that says if the layer reads quantised operands. Measurements
        use them to try sets of layers with one program.
    """
    inserter = _Inserter(model, operands)
    chosen = {layer.name: layer for layer in layers}
    for node in model.graph.node:
        copy = NodeProto()
        copy.CopyFrom(node)
        if (layer := chosen.get(node.name)) is not None:
            switch = (switches or {}).get(layer.name, "")
            inserter.quantize_operands(layer, copy, switch)
        inserter.nodes.append(copy)
    made = inserter.model()
    for name in (switches or {}).values():
        made.graph.input.append(helper.make_tensor_value_info(name, TensorProto.BOOL, ()))
    return made


class _Inserter:
    """Writer of the nodes and initializers of the new model."""

    def __init__(self, model: ModelProto, operands: QuantizedOperands):
        self.source = model
        self.operands = operands
        self.nodes: list[NodeProto] = []
        self._initializers: list[TensorProto] = []
        nodes = list(all_nodes(model.graph.node))  # also of bodies, which see the names of the graph
        self._taken = {name for node in nodes for name in (node.name, *node.input, *node.output)}
        self._taken.update(tensor.name for tensor in model.graph.initializer)
        self._restored: dict[tuple[str, int, int], str] = {}  # tensor, axis and block -> name after DequantizeLinear

    def quantize_operands(self, layer: QuantizedLayer, node: NodeProto, switch: str) -> None:
        """Make a node read quantised operands: always, or if `switch` is true at run time."""
        places = [(index, self._activation(node.input[index])) for index in layer.activations]
        if layer.weight is not None:
            name = node.input[layer.weight]
            places.append((layer.weight, self._weight(name, self.operands.weights[layer.name])))
        for index, restored in places:
            name = restored
            if switch:
                name = self._fresh(f"{node.input[index]}_switched")
                self._add("Where", [switch, restored, node.input[index]], name, {})
            node.input[index] = name

    def _activation(self, name: str) -> str:
        key = (name, -1, 0)
        if key not in self._restored:
            scale = self._initializer(self.operands.scales[name], f"{name}_scale")
            zero = self._initializer(np.zeros((), self.operands.format.dtype.numpy), f"{name}_zero_point")
            codes = self._fresh(f"{name}_QuantizeLinear_Output")
            self._add("QuantizeLinear", [name, scale, zero], codes, {}, f"{name}_QuantizeLinear")
            self._restored[key] = self._fresh(f"{name}_DequantizeLinear_Output")
            self._add("DequantizeLinear", [codes, scale, zero], self._restored[key], {}, f"{name}_DequantizeLinear")
        return self._restored[key]

    def _weight(self, name: str, weight: QuantizedWeight) -> str:
        key = (name, weight.axis, weight.block)
        if key not in self._restored:
            operands = [
                self._initializer(weight.codes, f"{name}_quantized"),
                self._initializer(weight.scale, f"{name}_scale"),
            ]
            attributes: dict[str, Any] = {"axis": weight.axis}
            if weight.block:
                attributes["block_size"] = weight.block
            else:
                zeros = np.zeros(weight.scale.shape, weight.codes.dtype)
                operands.append(self._initializer(zeros, f"{name}_zero_point"))
            restored = self._fresh(f"{name}_DequantizeLinear_Output")
            self._add("DequantizeLinear", operands, restored, attributes, f"{name}_DequantizeLinear")
            if weight.codes.shape != weight.restored.shape:
                shape = self._initializer(np.array(weight.restored.shape, np.int64), f"{name}_shape")
                flat, restored = restored, self._fresh(f"{name}_Reshape_Output")
                self._add("Reshape", [flat, shape], restored, {}, f"{name}_Reshape")
            self._restored[key] = restored
        return self._restored[key]

    def _add(self, op: str, inputs: list[str], output: str, attributes: Attributes, name: str = "") -> None:
        self.nodes.append(helper.make_node(op, inputs, [output], self._fresh(name or f"{output}_{op}"), **attributes))

    def _initializer(self, array: HostArray, hint: str) -> str:
        name = self._fresh(hint)
        self._initializers.append(tensor_of(array, name))
        return name

    def _fresh(self, hint: str) -> str:
        return fresh_name(hint, self._taken)

    def model(self) -> ModelProto:
        """Return the new model, without the nodes and initializers that nothing reads any more."""
        made = ModelProto()
        made.CopyFrom(self.source)
        graph = made.graph
        del graph.node[:]
        left, wanted = list[NodeProto](), {value.name for value in graph.output}
        for node in reversed(self.nodes):
            if wanted.intersection(node.output):
                left.append(node)
                wanted.update(node.input)
                wanted |= captured(node)
        graph.node.extend(reversed(left))
        old = list(graph.initializer)
        del graph.initializer[:]
        graph.initializer.extend(t for t in (*old, *self._initializers) if t.name in wanted)
        defined = {name for node in graph.node for name in node.output}
        infos = [value for value in graph.value_info if value.name in defined]
        del graph.value_info[:]
        graph.value_info.extend(infos)
        return made
