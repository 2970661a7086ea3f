"""Read the values of a model that depend on no input: initializers, and what nodes compute from them."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from fusec import frontends
from fusec.exporters.onnx_element_types import ELEMENT_TYPES
from fusec.frontends.onnx.model_file.structure import bodies
from fusec.frontends.onnx.model_file.tensors import Tensors
from fusec.ir import DType
from fusec.reference import evaluate

Array = np.ndarray[Any, Any]


class ModelConstants:
    """The constant values of a model in which every initializer is embedded."""

    def __init__(self, model: ModelProto):
        self._model = model
        self._initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        self._known = {*self._initializers, *(t.values.name for t in model.graph.sparse_initializer)}
        for node in model.graph.node:  # sorted, so operands come first
            if all(not name or name in self._known for name in node.input) and not any(bodies(node)):
                self._known.update(filter(None, node.output))

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def array(self, name: str) -> Array:
        """Return the value of a constant. Raises ModelError if it cannot be computed."""
        if name in self._initializers:
            return Tensors().literal(self._initializers[name]).array
        part = ModelProto(ir_version=self._model.ir_version)
        part.opset_import.extend(self._model.opset_import)
        part.graph.name = name
        part.graph.node.extend(_needed(self._model, name))
        read = {operand for node in part.graph.node for operand in node.input}
        part.graph.initializer.extend(t for t in self._model.graph.initializer if t.name in read)
        part.graph.sparse_initializer.extend(
            t for t in self._model.graph.sparse_initializer if t.values.name in {*read, name}
        )
        part.graph.output.add(name=name)
        return evaluate(frontends.load(part), {})[name]


def _needed(model: ModelProto, name: str) -> list[NodeProto]:
    """List the nodes that compute a constant, in order."""
    wanted, found = {name}, list[NodeProto]()
    for node in reversed(model.graph.node):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            found.append(node)
    return found[::-1]


def tensor_of(array: Array, name: str) -> TensorProto:
    """Return an array as an initializer. Elements of 4 bits are packed in pairs, the first in the low half."""
    dtype = DType.of(array.dtype)
    tensor = TensorProto(name=name, data_type=ELEMENT_TYPES[dtype], dims=array.shape)
    flat = np.ascontiguousarray(array).reshape(-1)
    if dtype is DType.I4:
        nibbles = np.append(flat.astype(np.int8).view(np.uint8) & 15, np.zeros(flat.size % 2, np.uint8))
        tensor.raw_data = (nibbles[::2] | nibbles[1::2] << 4).tobytes()
    else:
        tensor.raw_data = flat.tobytes()
    return tensor
