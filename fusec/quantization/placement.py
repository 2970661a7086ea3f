"""Choose the nodes of a model that are quantised, and give the reason for each that stays in float.

The defaults are the habits of NVIDIA's Model Optimizer: convolutions, products by a weight, and residual inputs are
quantised. Biases, norms, attention and work that is too narrow for Tensor Cores stay in float.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto, NodeProto

from fusec.ir import HostArray
from fusec.quantization.model_constants import ModelConstants
from fusec.quantization.residual import FOLLOWS, Residuals
from fusec.system.dataclass import dataclass

CHANNELS = 16  # Tensor Cores multiply 16 channels of 8 bits at a time
FLOATS = ("float16", "bfloat16", "float32")  # QuantizeLinear takes no float64


@dataclass(frozen=True)
class QuantizedLayer:
    """A node whose operands are quantised.

    activations: places among the node's inputs of the computed operands that are quantised.
    weight: place of the constant operand, or None.
    channel_axis, sum_axis: axes of the weight that count the results' channels, and that the node sums over.
    follows: the convolution that computes an addition, by name. If it stays in float, so does the addition.
    """

    node: NodeProto
    activations: tuple[int, ...]
    weight: int | None = None
    channel_axis: int = 0
    sum_axis: int = 0
    follows: str = ""

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def tensors(self) -> tuple[str, ...]:
        """Return the names of the quantised activations."""
        return tuple(self.node.input[index] for index in self.activations)


@dataclass(frozen=True)
class FloatNode:
    """A node that stays in float, and the reason."""

    name: str
    op: str
    reason: str


_NORMS = ("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization")
_REASONS: Mapping[str, str] = {
    **dict.fromkeys((*_NORMS, "SimplifiedLayerNormalization", "LpNormalization"), "a norm: its sums need float"),
    **dict.fromkeys(("Attention", "MultiHeadAttention"), "attention: the ranges of its products vary with each input"),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), "a recurrent layer: errors of its state add up"),
    "Softmax": "a softmax: its exponentials need float",
    "ConvTranspose": "a transposed convolution: cuDNN has no 8-bit form",
    "Einsum": "written as Einsum: write it as MatMul to quantise it",
}


class Placement:
    """Finder of the layers to quantise. `layers` and `floats` hold the result, in the order of the nodes.

    activations: also quantise activations, not only weights.
    grouped: quantise convolutions of few channels a group, such as depthwise ones.
    attention: quantise the two products of attention as well.
    """

    def __init__(self, model: ModelProto, *, activations: bool, grouped: bool, attention: bool):
        self.constants = ModelConstants(model)
        self.layers: list[QuantizedLayer] = []
        self.floats: list[FloatNode] = []
        self._activations, self._grouped, self._attention = activations, grouped, attention
        residuals = Residuals(model, self.constants)
        quantised: set[str] = set()
        for node in model.graph.node:
            if node.domain not in ("", "ai.onnx") or all(name in self.constants for name in filter(None, node.output)):
                continue
            found: QuantizedLayer | str
            if node.op_type == "Conv":
                found = self._convolution(node)
            elif node.op_type in ("MatMul", "Gemm"):
                found = self._product(node)
            elif node.op_type in ("Add", "Sum") and activations:
                place = residuals.residual_input(node, quantised)
                found = place if isinstance(place, str) else QuantizedLayer(node, (place[0],), follows=place[1])
            else:
                found = _REASONS.get(node.op_type, "")
            if isinstance(found, QuantizedLayer):
                quantised.add(node.name)
                self.layers.append(found)
            elif found:
                self.floats.append(FloatNode(node.name, node.op_type, found))

    def _convolution(self, node: NodeProto) -> QuantizedLayer | str:
        if node.input[1] not in self.constants:
            return "its filters are computed, not constant"
        weight = self.constants.array(node.input[1])
        groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
        outputs, inputs = weight.shape[0], weight.shape[1]
        if self._activations and min(outputs, inputs * groups) < CHANNELS:
            side = "output" if outputs < inputs * groups else "input"
            return f"{min(outputs, inputs * groups)} {side} channels: Tensor Cores need {CHANNELS}"
        if self._activations and groups > 1 and inputs < CHANNELS and not self._grouped:
            return f"{inputs} channels a group: no fp8 kernel is that narrow"
        if reason := self._refused(weight):
            return reason
        return QuantizedLayer(node, (0,) if self._activations else (), 1, 0, 1)

    def _product(self, node: NodeProto) -> QuantizedLayer | str:
        known = [name in self.constants for name in node.input[:2]]
        if not any(known):
            if not self._attention:
                return "a product of two computed values, as in attention"
            return QuantizedLayer(node, (0, 1)) if self._activations else "has no weight"
        place = known.index(True)
        weight = self.constants.array(node.input[place])
        if weight.ndim < 2 or (self._activations and 1 in weight.shape[-2:]):
            return "a matrix-vector product: bound by memory, not by arithmetic"
        if reason := self._refused(weight):
            return reason
        flag = ("transA", "transB")[place]
        transposed = any(attribute.name == flag and attribute.i for attribute in node.attribute)
        rows, columns = (weight.ndim - 1, weight.ndim - 2) if transposed else (weight.ndim - 2, weight.ndim - 1)
        channel, summed = (rows, columns) if place == 0 else (columns, rows)
        return QuantizedLayer(node, (1 - place,) if self._activations else (), place, channel, summed)

    def _refused(self, weight: HostArray) -> str:
        if weight.dtype.name not in FLOATS:
            return f"its weights are {weight.dtype.name}"
        return "" if weight.size else "its weights are empty"

    def leave_in_float(self, reasons: Mapping[str, str]) -> None:
        """Move layers, by name, from `layers` to `floats`, and with them the additions that follow them."""
        for layer in self.layers:
            reason = reasons.get(layer.name) or (FOLLOWS if layer.follows in reasons else "")
            if reason:
                self.floats.append(FloatNode(layer.name, layer.node.op_type, reason))
        self.layers = [layer for layer in self.layers if layer.name not in reasons and layer.follows not in reasons]


def vector_products(layers: list[QuantizedLayer], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the products with a weight whose activations are one row in the calibration data, with the reason."""
    found: dict[str, str] = {}
    for layer in layers:
        if layer.weight is None or layer.node.op_type == "Conv":
            continue
        shape = shapes[layer.tensors[0]]
        transposed = any(a.name == ("transA", "transB")[1 - layer.weight] and a.i for a in layer.node.attribute)
        summed = len(shape) - 1 if (layer.weight == 1) != transposed else len(shape) - 2
        rows = 1
        for axis, size in enumerate(shape):
            rows *= size if axis != summed else 1
        if rows == 1:
            found[layer.name] = "a matrix-vector product with this batch size: bound by memory, not by arithmetic"
    return found
