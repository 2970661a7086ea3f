"""Export LSTM, GRU and RNN.

The op reads the product of its input with the input weights, so those of the ONNX operator are the identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx import TensorProto

from fusec.exporters.onnx_element_types import ELEMENT_TYPES
from fusec.exporters.onnx_emit import Export, Exporter
from fusec.ir import Node
from fusec.ops import Recurrent
from fusec.ops.recurrent import ACTIVATIONS


def _recurrent(e: Exporter, node: Node, x: list[str]) -> list[str]:
    """Export a recurrent op. Its input is multiplied by weights already, so ONNX's weights are an identity."""
    op = node.op
    assert isinstance(op, Recurrent)
    type, count, states = node.operands[0].type, op.directions, op.states
    size = node.operands[1].type.shape[2]
    width = op.gates * size
    parameter, lengths = (None if at is None else x[at] for at in op.places([v.type.dtype for v in node.operands]))
    square = e.op("ConstantOfShape", e.ints((count * width, count * width)))
    identity = e.op("EyeLike", square, dtype=ELEMENT_TYPES[type.dtype])
    weights = e.op("Reshape", identity, e.ints((count, width, count * width)))
    bias = ""
    if op.cell == "gru" and parameter is not None:  # the bias of h @ r is the last of six
        bias = e.op("Pad", parameter, e.ints((0, 5 * size, 0, 0)))
    ends = e.op("Cast", lengths, to=TensorProto.INT32) if lengths is not None else ""
    operands = [x[0], weights, x[1], bias, ends, *x[2 : 2 + states]]
    if op.cell == "lstm" and parameter is not None:
        operands.append(parameter)
    attributes: dict[str, Any] = {"hidden_size": size, "direction": op.direction, **_functions(op)}
    if op.clip:
        attributes["clip"] = op.clip
    if op.input_forget:
        attributes["input_forget"] = 1
    if op.linear_before_reset:
        attributes["linear_before_reset"] = 1
    y, *last = e.several(op.cell.upper(), operands, 1 + states, attributes)
    swapped = e.op("Transpose", y, perm=(0, 2, 1, 3))
    return [e.op("Reshape", swapped, e.ints(node.results[0].type.shape), allowzero=1), *last]


def _functions(op: Recurrent) -> dict[str, list[str] | list[float]]:
    """Return the attributes that name activations. ONNX lists numbers of the functions that have one."""
    if not op.activations:
        return {}
    every = [f for each in op.functions() for f in each]
    alphas = [alpha for name, alpha, _ in every if ACTIVATIONS[name][0] is not None]
    betas = [beta for name, _, beta in every if ACTIVATIONS[name][1] is not None]
    named: dict[str, list[str] | list[float]] = {
        "activations": [_ONNX.get(name, name.capitalize()) for name, _, _ in every]
    }
    return named | {f"activation_{k}": v for k, v in (("alpha", alphas), ("beta", betas)) if v}


_ONNX: Mapping[str, str] = {
    "leaky_relu": "LeakyRelu",
    "thresholded_relu": "ThresholdedRelu",
    "scaled_tanh": "ScaledTanh",
    "hard_sigmoid": "HardSigmoid",
}
RECURRENT: Mapping[str, Export] = {"recurrent": _recurrent}
