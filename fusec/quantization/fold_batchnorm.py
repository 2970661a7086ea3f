"""Fold batch norms into the convolutions before them, so that quantised weights hold their factors.

Calibration comes after it: `conv → Q` shall see the range that the folded convolution stores.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from onnx import ModelProto, NodeProto

from fusec.frontends.onnx.standalone import fresh_name
from fusec.quantization.model_constants import ModelConstants, tensor_of

EPSILON = 1e-5  # ONNX's default


def fold_batchnorm(model: ModelProto) -> int:
    """Fold each `bn(conv(x, w, b))` with constant parameters into `conv(x, w * f, (b - mean) * f + beta)`.

    f = gamma / sqrt(variance + epsilon), per channel. The convolution takes the batch norm's result as its own. Only a
    convolution whose result nothing else reads is folded.

    model: changed in place. Returns the number of batch norms folded.
    """
    graph, constants = model.graph, ModelConstants(model)
    readers = Counter(name for node in graph.node for name in node.input)
    readers.update(value.name for value in graph.output)
    taken = {t.name for t in graph.initializer} | {name for n in graph.node for name in (*n.input, *n.output)}
    convs = {node.output[0]: node for node in graph.node if node.op_type == "Conv" and node.domain == ""}
    folded: list[NodeProto] = []
    for norm in graph.node:
        conv = convs.get(norm.input[0]) if norm.op_type == "BatchNormalization" and norm.domain == "" else None
        if conv is None or readers[norm.input[0]] != 1 or any(norm.output[1:]):
            continue
        if not all(name in constants for name in (*norm.input[1:], *conv.input[1:])):
            continue
        attributes = {attribute.name: attribute for attribute in norm.attribute}
        if "training_mode" in attributes and attributes["training_mode"].i:
            continue
        gamma, beta, mean, variance = (constants.array(name).astype(np.float64) for name in norm.input[1:5])
        epsilon = attributes["epsilon"].f if "epsilon" in attributes else EPSILON
        weight = constants.array(conv.input[1])
        bias = constants.array(conv.input[2]) if len(conv.input) > 2 and conv.input[2] else np.zeros(len(weight))
        factor = gamma / np.sqrt(variance + epsilon)
        scaled = weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
        shift = (bias.astype(np.float64) - mean) * factor + beta
        names = [fresh_name(f"{conv.input[1]}_folded", taken), fresh_name(f"{norm.input[2]}_folded", taken)]
        for array, name in zip((scaled, shift), names, strict=True):
            graph.initializer.append(tensor_of(array.astype(weight.dtype), name))
        del conv.input[1:]
        conv.input.extend(names)
        conv.output[0] = norm.output[0]
        folded.append(norm)
    for norm in folded:
        graph.node.remove(norm)
    return len(folded)
