"""Quantise an ONNX model dynamically, as onnxruntime's `quantize_dynamic` does, which the GPU machines do not have."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

NARROW = 127  # the largest integer of weights


def quantized_dynamically(data: bytes) -> bytes:
    """Run each product with a constant matrix in integers; activations get scale and zero point at run time."""
    model = onnx.load_from_string(data)
    graph = model.graph
    weights = {each.name: each for each in graph.initializer if each.data_type == TensorProto.FLOAT}
    nodes: list[onnx.NodeProto] = []
    quantized: dict[str, str] = {}  # by activation: what its results' names begin with
    for node in graph.node:
        if node.op_type != "MatMul" or node.input[1] not in weights or len(weights[node.input[1]].dims) != 2:
            nodes.append(node)
            continue
        (x, w), (y,) = node.input, node.output
        if x not in quantized:
            quantized[x] = q = f"{x}_dynamic"
            nodes.append(helper.make_node("DynamicQuantizeLinear", [x], [q, f"{q}_scale", f"{q}_zero"]))
        q, array = quantized[x], numpy_helper.to_array(weights[w])
        step = np.asarray(np.abs(array).max() / NARROW, np.float32)
        integers = np.rint(array / step).astype(np.int8)
        graph.initializer.extend([numpy_helper.from_array(integers, f"{y}_w"), numpy_helper.from_array(step, f"{y}_s")])
        nodes += [
            helper.make_node("MatMulInteger", [q, f"{y}_w", f"{q}_zero"], [f"{y}_sums"]),
            helper.make_node("Cast", [f"{y}_sums"], [f"{y}_float"], to=TensorProto.FLOAT),
            helper.make_node("Mul", [f"{q}_scale", f"{y}_s"], [f"{y}_scale"]),
            helper.make_node("Mul", [f"{y}_float", f"{y}_scale"], [y]),
        ]
    del graph.node[:]
    graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input}
    left = [each for each in graph.initializer if each.name in read]
    del graph.initializer[:]
    graph.initializer.extend(left)
    return model.SerializeToString()
