"""Test that the kernel of a step is found once, also if it is asked for several times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpu.kernels.cases import FIGURES

from fusec.gpu import kernels
from fusec.gpu.kernels import GpuFigures
from fusec.gpu.kernels.codegen.kernel import Kernel
from fusec.ir import DType, Graph, TensorType
from fusec.ops import pw


def test_a_kernel_is_written_once_for_a_graph_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType((6, 8), DType.F32))
    y = graph.add(pw("relu"), x)
    z = graph.add(pw("neg"), y)
    graph.set_outputs([y, z])
    nodes = tuple(graph.nodes)
    asked: list[tuple[object, ...]] = []
    (family,) = [each for each in kernels.FAMILIES if each.__name__ == "pointwise"]

    def counted(nodes: tuple[object, ...], outputs: tuple[object, ...], figures: GpuFigures) -> Kernel | None:
        asked.append((*nodes, *outputs))
        return family(nodes, outputs, figures)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "FAMILIES", (counted,))
    both, one = kernels.find(nodes, (y, z), FIGURES), kernels.find(nodes, (z,), FIGURES)
    assert both is not None and one is not None and both.written == (y, z) and one.written == (z,)
    assert kernels.find(nodes, (y, z), FIGURES) is both and kernels.find(nodes, (z,), FIGURES) is one
    assert len(asked) == 2
    smaller = replace(FIGURES, processors=40)
    assert kernels.find(nodes, (z,), smaller) is not one and len(asked) == 3, "asked for each GPU"
    asked.pop()
    graph.set_type(z, TensorType((6, 8), DType.F32, (1, 0)))
    turned = kernels.find(nodes, (z,), FIGURES)
    assert turned is not None and turned.key != one.key, "it writes in another order"
    assert len(asked) == 3
    assert kernels.find(nodes[:1], (y,), FIGURES) is not None and len(asked) == 4
    monkeypatch.setattr(kernels, "FAMILIES", ())
    assert kernels.find(nodes[1:], (z,), FIGURES) is None
    monkeypatch.setattr(kernels, "FAMILIES", (counted,))
    assert kernels.find(nodes[1:], (z,), FIGURES) is None, "that there is none is known, too"


def test_a_family_has_the_name_of_its_file() -> None:
    """Results, coverage and findings name families."""
    for family in kernels.FAMILIES:
        assert family.__name__ == family.__module__.rpartition(".")[2]
