"""Test that equal steps of a graph share one written kernel, which is the one that each would get for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES

from fusec.gpu.kernels.attention.attention_forward import attention_forward
from fusec.gpu.kernels.codegen import equal_steps
from fusec.gpu.kernels.codegen.kernel import Kernel
from fusec.gpu.kernels.convolution.split_k import split_k
from fusec.gpu.kernels.norm.row_reduction import row_reduction
from fusec.gpu.kernels.product.thin_product import thin_product
from fusec.ir import DType, Graph, Node, TensorType, Value, channels_last
from fusec.ops import Attention, Cast, Conv, LayerNorm, MatMul, pw
from fusec.schedule.program import outputs_of

F16, F32 = DType.F16, DType.F32
IMAGE = TensorType((2, 64, 8, 8), F16, channels_last(4))


def rows(graph: Graph, number: float) -> list[Node]:
    x = graph.add_input(f"x{len(graph.inputs)}", TensorType((1024, 64), F16))
    w = graph.constant(np.ones((64, 64), np.float16), f"w{len(graph.inputs)}")
    y = graph.add(MatMul(), x, w)
    return nodes_of(graph.add(pw("mul"), y, graph.constant(np.array(number, np.float16))))


def image(graph: Graph, number: float) -> list[Node]:
    x = graph.add_input(f"x{len(graph.inputs)}", IMAGE)
    w = graph.constant(np.ones((64, 64, 3, 3), np.float16), f"w{len(graph.inputs)}")
    y = graph.add(Conv((1, 1), (1, 1, 1, 1), (1, 1), 1), x, w)
    graph.set_type(y, IMAGE)
    z = graph.add(pw("mul"), y, graph.constant(np.array(number, np.float16)))
    graph.set_type(z, IMAGE)
    return nodes_of(z)


def norm(graph: Graph, number: float) -> list[Node]:
    x = graph.add_input(f"x{len(graph.inputs)}", TensorType((64, 256), F16))
    scale, bias = (graph.add_input(f"{name}{len(graph.inputs)}", TensorType((256,), F16)) for name in ("s", "b"))
    y = graph.add(
        LayerNorm(1, 1e-5), graph.add(pw("add"), x, graph.constant(np.array(number, np.float16))), scale, bias
    )
    return nodes_of(y)


def attention(graph: Graph, number: float) -> list[Node]:
    q, k, v = (graph.add_input(f"{name}{len(graph.inputs)}", TensorType((2, 4, 64, 64), F16)) for name in "qkv")
    return nodes_of(graph.add(Attention(number), q, k, v))


def nodes_of(result: Value) -> list[Node]:
    """The nodes that compute a result, without constants, in order."""
    found: list[Node] = []
    value: Value | None = result
    while value is not None and value.node is not None:
        found.insert(0, value.node)
        value = next((v for v in value.node.operands if v.node is not None and v.literal is None), None)
    return found


FAMILIES: list[tuple[Any, Callable[[Graph, float], list[Node]]]] = [
    (thin_product, rows),
    (split_k, image),
    (row_reduction, norm),
    (attention_forward, attention),
]


@pytest.mark.parametrize(("family", "build"), FAMILIES)
def test_an_equal_step_has_the_kernel_that_it_would_get_for_itself(
    family: Any, build: Callable[[Graph, float], list[Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph()
    steps = [build(graph, number) for number in (0.5, 0.5, 0.25)]
    graph.set_outputs([step[-1].result for step in steps])
    asked: list[int] = []

    def found(step: list[Node]) -> Kernel:
        kernel = family(step, outputs_of(step), FIGURES)
        assert kernel is not None
        return kernel

    with_values = equal_steps._with_values
    monkeypatch.setattr(equal_steps, "_with_values", lambda *given: asked.append(1) or with_values(*given))
    first, second, other = map(found, steps)
    assert asked, "kernels are given to equal steps"
    for kernel, step in ((first, steps[0]), (second, steps[1]), (other, steps[2])):
        assert kernel == family.__wrapped__(step, outputs_of(step), FIGURES)
    assert second.launches[0].source is first.launches[0].source, "it was written once"
    assert first.launches[0].arguments != second.launches[0].arguments
    assert other.key != first.key, "the number is part of the source"


def test_steps_that_differ_in_wiring_types_or_constants_have_kernels_of_their_own() -> None:
    graph = Graph()
    x, z = (graph.add_input(name, TensorType((1024, 64), F16)) for name in "xz")
    w = graph.constant(np.ones((64, 64), np.float16), "w")
    v = graph.add_input("v", TensorType((64, 64), F16))
    y = graph.add(MatMul(), x, w)
    steps = [
        nodes_of(graph.add(pw("add"), y, x)),
        nodes_of(graph.add(pw("add"), graph.add(MatMul(), z, w), x)),
        nodes_of(graph.add(pw("add"), x, graph.add(MatMul(), x, w)))[-1:],
        nodes_of(graph.add(Cast(F32), graph.add(MatMul(), x, w))),
        nodes_of(graph.add(pw("relu"), graph.add(MatMul(), x, v))),
        nodes_of(graph.add(pw("clip", min=0.0, max=1.0), graph.add(MatMul(), x, w))),
        nodes_of(graph.add(pw("clip", min=-0.0, max=1.0), graph.add(MatMul(), x, w))),
    ]
    graph.set_outputs([step[-1].result for step in steps])
    for step in steps:
        for outputs in (outputs_of(step), (step[0].result, *outputs_of(step))):
            assert thin_product(step, outputs, FIGURES) == thin_product.__wrapped__(step, outputs, FIGURES)  # type: ignore[attr-defined]


def test_steps_of_other_types_than_floats_are_written_each(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType((1024, 64), F16))
    y = graph.add(pw("cmp_gt"), x, graph.constant(np.array(0, np.float16)))
    graph.set_outputs([y])
    assert equal_steps._structure(tuple(n for n in graph.nodes if n.operands), (y,), {}) is None
