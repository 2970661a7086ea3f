"""Graphs known in another size: what counts as the same, and which is taken of several."""

from __future__ import annotations

from dataclasses import replace

from gpu.cudnn_graphs import conv, matmul, nhwc, pointwise, rows

from fusec.gpu.cudnn.similar_graphs import SimilarGraphs, factor
from fusec.lowering.cudnn_graph import CudnnGraph, CudnnTensor


def batch(graph: CudnnGraph, size: int) -> CudnnGraph:
    """The graph with another batch: the first dim of images."""

    def resized(tensor: CudnnTensor) -> CudnnTensor:
        dims = (size, *tensor.dims[1:]) if tensor.dims[0] == 8 else tensor.dims
        return replace(tensor, dims=dims, strides=nhwc(dims))

    return replace(graph, tensors=tuple(map(resized, graph.tensors)))


def known(*graphs: CudnnGraph) -> SimilarGraphs:
    relatives = SimilarGraphs()
    for graph in graphs:
        relatives.add(graph)
    return relatives


def test_another_batch_of_the_same_graph() -> None:
    graph, twice = conv("bias", "relu"), batch(conv("bias", "relu"), 16)
    assert known(graph).of(twice) == graph
    assert factor(graph, twice) == 2
    assert factor(twice, graph) == 0.5
    assert known().of(twice) is None
    assert known(twice).of(graph) == twice


def test_of_several_the_one_with_the_fewest_other_dims_then_the_nearest() -> None:
    """A batch twice as large is no reason to take the layer with twice the channels."""
    narrow, wide = conv("bias", "relu"), conv("bias", "relu", filters=128)
    relatives = known(narrow, wide)
    assert relatives.of(batch(narrow, 16)) == narrow
    assert relatives.of(batch(wide, 16)) == wide
    relatives.add(batch(narrow, 40))
    assert relatives.of(batch(narrow, 64)) == batch(narrow, 40)
    assert relatives.of(batch(narrow, 9)) == narrow


def test_what_is_no_relative() -> None:
    graph = conv("bias", "relu")
    relatives = known(graph)
    for other in (
        batch(conv("bias", "relu", size=14), 9),  # two dims that have changed by different factors
        conv("relu"),
        batch(conv("bias", "swish"), 9),
        batch(graph, 1),  # a dim of one is broadcast
    ):
        assert relatives.of(other) is None, str(other)
    assert relatives.of(graph) is None, "it is itself, not another"
    relatives.remove(graph)
    assert relatives.of(batch(graph, 9)) is None
    relatives.remove(graph)


def test_rows_and_products_scale_as_a_whole() -> None:
    small = matmul((8, 16, 64), (8, 64, 16), (8, 16, 16))
    large = matmul((24, 16, 64), (24, 64, 16), (24, 16, 16))
    assert known(small).of(large) == small
    flat = [pointwise("gelu", dims, result=dims) for dims in ((1, 12, 64), (1, 18, 64), (1, 18, 96))]
    assert known(flat[0]).of(flat[1]) == flat[0]
    assert known(flat[0]).of(flat[2]) == flat[0], "both dims, by one factor"
    assert rows((1, 18, 64)) == flat[1].tensors[0].strides
