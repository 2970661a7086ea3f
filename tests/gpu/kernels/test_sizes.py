"""Test kernels of another batch: the same source, given how much there is to do."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES
from gpu.kernels.emulator import Emulator, needs_compiler
from helpers import assert_close

from fusec.gpu import kernels
from fusec.gpu.kernels.codegen.kernel import Kernel
from fusec.ir import Constant, Graph, Node
from fusec.reference import evaluate
from fusec.text import parse

CASES = {
    "pointwise": "%y = gelu(%x)",
    "pooling": "%y = max_pool(%x) {window=[2,2], strides=[2,2], pads=[0,0,0,0], dilations=[1,1]}",
    "softmax": "%y = softmax(%x) {axis=1}",
    "transpose": "%y = relayout(%x) {order=[0,1,2,3]}",
    "pad": '%y = pad(%x) {pads=[0,0,1,0,0,0,0,1], mode="constant", value=0.5}',
}


def made(batch: int, line: str) -> tuple[Graph, Kernel]:
    graph = parse(f'graph "g" (%x: f32[{batch},8,4,4]{{0,2,3,1}}) {{\n  {line}\n  return %y\n}}')
    nodes: list[Node] = [node for node in graph.nodes if not isinstance(node.op, Constant)]
    kernel = kernels.find(nodes, graph.outputs, FIGURES)
    assert kernel is not None
    return graph, kernel


@needs_compiler
@pytest.mark.parametrize("title", CASES)
def test_another_batch_needs_no_other_source(title: str) -> None:
    found = [made(batch, CASES[title]) for batch in (64, 70, 200)]
    sources = [[launch.source for launch in kernel.launches] for _, kernel in found]
    assert sources[0] == sources[1] == sources[2]
    assert len({kernel.key for _, kernel in found}) == 3, "equal keys are equal work"
    emulator = Emulator([found[0][1]])
    for graph, kernel in found:
        x = np.random.default_rng(4).standard_normal(graph.inputs[0].type.shape).astype(np.float32)
        (got,) = emulator.run(kernel, {graph.inputs[0]: x}, graph.outputs)
        assert_close(got, evaluate(graph, {"x": x})["y"], 1e-5)
