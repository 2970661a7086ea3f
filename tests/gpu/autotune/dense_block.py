"""A dense block (G. Huang et al., Densely Connected Convolutional Networks, 2017) as a graph, for tests and timing."""

from __future__ import annotations

import numpy as np

from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Concat, Conv, MaxPool, pw


def dense_block(
    batch: int = 2, channels: int = 64, side: int = 16, growth: int = 32, layers: int = 3, seed: int = 0
) -> Graph:
    """A pool, layers that each read all before them (scale, shift, relu, 1x1, relu, 3x3), and a 1x1 after."""
    rng = np.random.default_rng(seed)
    graph = Graph("dense_block")

    def constant(*shape: int) -> Value:
        scale = 1.0 / np.sqrt(np.prod(shape[1:])) if len(shape) == 4 else 1.0
        return graph.constant((rng.standard_normal(shape) * scale).astype(np.float32))

    def convolved(x: Value, filters: int, size: int) -> Value:
        pads = (size // 2,) * 4
        return graph.add(Conv((1, 1), pads, (1, 1)), x, constant(filters, x.type.shape[1], size, size))

    def normed(x: Value) -> Value:
        scaled = graph.add(pw("mul"), x, constant(x.type.shape[1], 1, 1))
        return graph.add(pw("relu"), graph.add(pw("add"), scaled, constant(x.type.shape[1], 1, 1)))

    x = graph.add_input("x", TensorType((batch, channels, 2 * side, 2 * side), DType.F32))
    kept = [graph.add(MaxPool((2, 2), (2, 2), (0, 0, 0, 0), (1, 1)), x)]
    for _ in range(layers):
        joined = kept[0] if len(kept) == 1 else graph.add(Concat(1), *kept)
        inner = graph.add(pw("relu"), convolved(normed(joined), 4 * growth, 1))
        kept.append(convolved(inner, growth, 3))
    graph.set_outputs([convolved(normed(graph.add(Concat(1), *kept)), channels, 1)], ["y"])
    graph.verify()
    return graph
