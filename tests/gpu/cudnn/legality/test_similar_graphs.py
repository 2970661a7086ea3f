"""Test which graphs are similar, which of several is found, and which graphs build because others did."""

from __future__ import annotations

from dataclasses import replace

from gpu.cudnn_graphs import conv, matmul, nhwc, pointwise, rows

from fusec.gpu.cudnn.legality.proof_graphs import build_seconds, call_kinds, kind_of
from fusec.gpu.cudnn.legality.similar_graphs import BuiltPlans, SimilarGraphs, factor
from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor
from fusec.lowering.known_bugs import deadly, misread


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


def test_the_graph_with_the_fewest_other_dims_and_then_the_nearest_is_found() -> None:
    """A batch twice as large is no reason to take the layer with twice the channels."""
    narrow, wide = conv("bias", "relu"), conv("bias", "relu", filters=128)
    relatives = known(narrow, wide)
    assert relatives.of(batch(narrow, 16)) == narrow
    assert relatives.of(batch(wide, 16)) == wide
    relatives.add(batch(narrow, 40))
    assert relatives.of(batch(narrow, 64)) == batch(narrow, 40)
    assert relatives.of(batch(narrow, 9)) == narrow


def test_graphs_that_are_not_similar() -> None:
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


PLAN = (1, ((12, 35),))


def chain(*modes: str, dims: tuple[int, ...] = (1, 8, 64), dtype: DType = DType.F32) -> CudnnGraph:
    """A sequence of pointwise calls of one operand."""
    tensors = (CudnnTensor(uid, dims, (dims[1] * dims[2], dims[2], 1), dtype) for uid in range(1, len(modes) + 2))
    calls = (CudnnCall("pointwise", (uid,), (uid + 1,), mode) for uid, mode in enumerate(modes, 1))
    return CudnnGraph(tuple(tensors), tuple(calls))


def test_a_plan_builds_in_other_sizes() -> None:
    built, graph = BuiltPlans(), conv("bias", "relu")
    built.add(graph, [PLAN])
    assert built.of(batch(graph, 16)) == ([PLAN], [])
    assert built.of(conv("relu")) == ([], [])


def test_a_pointwise_graph_builds_once_each_of_its_calls_was_built() -> None:
    built = BuiltPlans()
    built.add(chain("relu", "exp"), [PLAN])
    assert built.of(chain("exp", "relu", "exp", dims=(1, 4, 8))) == ([], [1])
    assert built.of(chain("exp", "tanh")) == ([], []), "tanh was never compiled"
    built.add(chain("tanh"), [PLAN])
    assert built.of(chain("exp", "tanh")) == ([], [1])
    assert built.of(chain("exp", "tanh", dtype=DType.F64)) == ([], []), "cuDNN lists plans for f64, and compiles none"
    assert built.of(conv("relu")) == ([], []), "a convolution is no pointwise graph"


def test_few_graphs_are_compiled_for_the_others() -> None:
    built = BuiltPlans()
    graphs = [chain("relu"), chain("exp"), chain("tanh", "exp", "relu"), chain("neg"), chain("neg", dims=(1, 2, 2))]
    first, second = built.rounds([*graphs, conv("relu"), batch(conv("relu"), 16)])
    assert first == [conv("relu"), graphs[2], graphs[3]]
    assert len(first) + len(second) == 7
    built.add(graphs[2], [PLAN])
    assert built.rounds(graphs[:3]) == [[graphs[2], graphs[0], graphs[1]]]


def test_graphs_that_compile_fast_are_compiled_for_those_that_do_not() -> None:
    modes = ("relu", "exp", "tanh", "abs")
    slow = chain(*modes * 6)
    slow = replace(slow, tensors=tuple(replace(t, virtual=False) for t in slow.tensors))  # 25 tensors in memory
    fast = [chain(*modes[:2]), chain(*modes[2:])]
    assert build_seconds(slow) > 2 * sum(map(build_seconds, fast))
    first, second = BuiltPlans().rounds([slow, *fast])
    assert (first, second) == (fast, [slow])
    assert BuiltPlans().rounds([slow]) == [[slow]], "nothing else shows that it builds"


def test_one_sequence_of_calls_is_built_for_graphs_that_take_longer() -> None:
    graphs = [chain(*("relu", "exp") * 6), chain(*("tanh", "neg", "relu") * 4)]
    built = BuiltPlans()
    (proof,) = built.proofs(graphs)
    assert [call.mode for call in proof.calls] == ["exp", "neg", "relu", "tanh"]
    assert (len(proof.inputs), len(proof.outputs)) == (1, 1), "few tensors in memory"
    assert deadly(proof) is None and misread(proof) is None
    built.add(proof, [PLAN])
    assert all(built.of(graph) == ([], [1]) for graph in graphs)
    assert built.proofs(graphs) == []


def test_a_sequence_that_did_not_build_is_not_tried_again() -> None:
    graphs = [chain(*("relu", "exp") * 6), chain(*("tanh", "neg") * 6)]
    built = BuiltPlans()
    assert built.proofs(graphs[:1]) and built.proofs(graphs[:1]) == []
    (proof,) = built.proofs(graphs)
    assert [call.mode for call in proof.calls] == ["neg", "tanh"]


def test_graphs_that_build_as_fast_or_need_other_types_are_no_reason_for_a_sequence() -> None:
    assert BuiltPlans().proofs([chain("relu")]) == [], "it takes as long itself"
    assert BuiltPlans().proofs([chain(*("relu", "exp") * 6, dtype=DType.I64)]) == []
    exact = replace(chain(*("relu", "exp") * 6), tensor_cores=False)
    assert BuiltPlans().proofs([exact]) == [], "each plan is built where tensor cores are excluded"
    assert BuiltPlans().proofs([conv("relu"), conv("bias", "relu")]) == []


def test_a_sequence_reads_numbers_and_several_types() -> None:
    """A sum of fp16 that is stored in fp32, then a product with a number that is stored in fp16."""
    dims, strides = (1, 8, 64), (512, 64, 1)
    half = [CudnnTensor(uid, dims, strides, DType.F16) for uid in (1, 2, 5)]
    number = CudnnTensor(4, (1, 1, 1), (1, 1, 1), DType.F32, value=0.5)
    total = CudnnTensor(3, dims, strides, DType.F32)
    calls = (CudnnCall("pointwise", (1, 2), (3,), "add"), CudnnCall("pointwise", (3, 4), (5,), "mul"))
    graph = CudnnGraph((half[0], half[1], total, number, half[2]), calls)
    (proof,) = BuiltPlans().proofs([graph, chain("exp")])
    assert {kind_of(proof, call) for call in proof.calls} == call_kinds(graph) | call_kinds(chain("exp"))
    assert [t.value for t in proof.tensors if t.value is not None] == [0.5]
