"""Find residual additions: sums of a convolution's result and a value from a shortcut.

The convolution's result is not quantised, because its epilogue adds before anything is rounded. The shortcut is read
from memory, so it is quantised. In float it would take as long to read as the convolution saves.
"""

from __future__ import annotations

from collections import Counter

from onnx import ModelProto, NodeProto

from fusec.quantization.model_constants import ModelConstants

FOLLOWS = "an addition whose convolution stays in float"
_EPILOGUE = {"Add", "BatchNormalization", "Identity", "Mul"}  # with constants, between a convolution and the sum


class Residuals:
    """Finder of the shortcut among the operands of an addition."""

    def __init__(self, model: ModelProto, constants: ModelConstants):
        self._constants = constants
        self._producers = {name: node for node in model.graph.node for name in node.output if name}
        self._readers = Counter(name for node in model.graph.node for name in node.input)
        self._readers.update(value.name for value in model.graph.output)
        self._depth: dict[str, int] = {}
        for node in model.graph.node:  # sorted
            depth = 1 + max((self._depth.get(name, 0) for name in node.input), default=0)
            self._depth.update(dict.fromkeys(node.output, depth))

    def residual_input(self, node: NodeProto, quantised: set[str]) -> tuple[int, str] | str:
        """Return the place of the shortcut among the inputs, and the name of the convolution that computes the other.

        A text is the reason why the shortcut is not quantised; it is empty for a bias.

        quantised: names of the nodes that are quantised so far.
        """
        computed = [index for index, name in enumerate(node.input) if name not in self._constants]
        if len(node.input) != 2 or len(computed) != 2:
            return ""  # a bias, which stays in float as part of its layer
        convs = [self.convolution(name) for name in node.input]
        if not any(convs):
            return "an addition without a convolution that could compute it"
        if all(convs):
            # the convolution on the longer branch runs last, so the sum goes into its epilogue
            own = max((0, 1), key=lambda index: self._depth[node.input[index]])
        else:
            own = 0 if convs[0] else 1
        conv = convs[own]
        if conv is None or conv.name not in quantised:
            return FOLLOWS
        return 1 - own, conv.name

    def convolution(self, name: str) -> NodeProto | None:
        """Return the convolution that computes a value, followed by nothing but arithmetic with constants."""
        while (node := self._producers.get(name)) is not None and self._readers[name] == 1:
            if node.op_type == "Conv":
                return node
            computed = [operand for operand in node.input if operand and operand not in self._constants]
            if node.op_type not in _EPILOGUE or len(computed) != 1:
                return None
            (name,) = computed
        return None
