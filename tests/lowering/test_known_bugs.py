"""Test the rules for graphs that cuDNN misreads or crashes on, each with a similar graph that is right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fusec.ir import DType, TensorType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor
from fusec.lowering.known_bugs import MAX_ELEMENTS, deadly, misread, two_of_three, wrong_plan
from fusec.lowering.known_bugs.graph_rules import CALL_RULES, GRAPH_RULES, OPERAND_RULES
from fusec.lowering.known_bugs.plan_rules import RULES as PLAN_RULES

WINDOW = (("pre_padding", (0, 0)), ("post_padding", (0, 0)), ("stride", (1, 1)), ("dilation", (1, 1)))


def tensor(uid: int, dims: Sequence[int], dtype: DType = DType.F16, virtual: bool = False) -> CudnnTensor:
    strides, step = [0] * len(dims), 1
    for dim in reversed(range(len(dims))):
        strides[dim] = step
        step *= max(dims[dim], 1)
    return CudnnTensor(uid, tuple(dims), tuple(strides), dtype, virtual)


def number(uid: int, rank: int) -> CudnnTensor:
    return CudnnTensor(uid, (1,) * rank, (1,) * rank, DType.F32, value=2.0)


def pointwise(result: Sequence[int], *operands: Sequence[int], mode: str = "add") -> CudnnGraph:
    tensors = [tensor(i + 1, dims) for i, dims in enumerate([*operands, result])]
    uids = tuple(t.uid for t in tensors)
    return CudnnGraph(tuple(tensors), (CudnnCall("pointwise", uids[:-1], uids[-1:], mode),))


def convolution(operand: Sequence[int]) -> CudnnGraph:
    """conv, then an add of `operand`."""
    y = (2, 8, 4, 4)
    return CudnnGraph(
        (tensor(1, y), tensor(2, (8, 8, 1, 1)), tensor(3, y, virtual=True), tensor(4, operand), tensor(5, y)),
        (CudnnCall("conv_fprop", (1, 2), (3,), "", WINDOW), CudnnCall("pointwise", (3, 4), (5,), "add")),
    )


def product(operand: Sequence[int]) -> CudnnGraph:
    """matmul, then an add of `operand`."""
    return CudnnGraph(
        (
            tensor(1, (2, 3, 4)),
            tensor(2, (2, 4, 5)),
            tensor(3, (2, 3, 5), virtual=True),
            tensor(4, operand),
            tensor(5, (2, 3, 5)),
        ),
        (CudnnCall("matmul", (1, 2), (3,)), CudnnCall("pointwise", (3, 4), (5,), "add")),
    )


# misread ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operand", [(2, 8, 4, 4), (1, 8, 1, 1), (2, 1, 4, 4), (1, 1, 1, 1)])
def test_epilogues_of_convolutions_that_are_right(operand: tuple[int, ...]) -> None:
    assert misread(convolution(operand)) is None


@pytest.mark.parametrize("place", [3, 5])
def test_a_result_with_gaps_next_to_another(place: int) -> None:
    graph = convolution((1, 8, 1, 1))
    stored = replace(graph, tensors=tuple(replace(t, virtual=False) for t in graph.tensors))
    gaps = tuple(replace(t, strides=(2 * 128, 16, 4, 1)) if t.uid == place else t for t in stored.tensors)
    assert misread(stored) is None
    reason = misread(replace(stored, tensors=gaps))
    assert reason is not None and "within a larger tensor" in reason
    alone = tuple(replace(t, strides=(2 * 128, 16, 4, 1)) if t.uid == 5 else t for t in graph.tensors)
    assert misread(replace(graph, tensors=alone)) is None


@pytest.mark.parametrize(
    "operand", [(2, 8, 1, 1), (2, 1, 1, 1), (1, 8, 4, 4), (1, 1, 4, 4), (1, 8, 4, 1), (2, 1, 4, 1)]
)
def test_epilogues_of_convolutions_that_are_misread(operand: tuple[int, ...]) -> None:
    reason = misread(convolution(operand))
    assert reason is not None
    assert f"a convolution's epilogue with an operand {list(operand)} for [2, 8, 4, 4]" in reason


def test_dims_of_one_do_not_count_as_broadcast() -> None:
    """For one image, (1, 8, 4, 4) is full and (1, 1, 4, 4) is per pixel."""
    for operand, wrong in {(1, 8, 4, 4): False, (1, 1, 4, 4): False, (1, 1, 4, 1): True}.items():
        graph = convolution(operand)
        one = tuple(replace(t, dims=(1, *t.dims[1:])) if t.uid in (1, 3, 5) else t for t in graph.tensors)
        assert bool(misread(replace(graph, tensors=one))) == wrong


def converted_product(n: int, left: DType | None = DType.I8) -> CudnnGraph:
    """A matmul whose right operand is converted from rows of n numbers of 8 bits, and the left one from `left`."""
    tensors = [tensor(1, (2, 11, 17), left or DType.F16), tensor(3, (2, 17, n), DType.I8)]
    tensors += [tensor(2, (2, 11, 17), virtual=True), tensor(4, (2, 17, n), virtual=True), tensor(5, (2, 11, n))]
    calls = [CudnnCall("pointwise", (1,), (2,), "identity")] if left is not None else []
    convert, product = CudnnCall("pointwise", (3,), (4,), "identity"), CudnnCall("matmul", (2 if left else 1, 4), (5,))
    return CudnnGraph(tuple(t for t in tensors if left is not None or t.uid != 2), (*calls, convert, product))


@pytest.mark.parametrize("left", [DType.I8, DType.F16, DType.F32])
def test_a_matmul_of_a_prologue_and_odd_rows_converted_from_8_bits(left: DType) -> None:
    """Measured: rows of 1, 5, 6, 7 or 10 numbers fault, rows of 4, 12 or 20 do not."""
    assert misread(converted_product(12, left)) is misread(converted_product(20, left)) is None
    for n in (1, 5, 6, 10):
        assert "in rows that are no multiple of 4" in str(misread(converted_product(n, left)))
        assert misread(converted_product(n, None)) is None, "without a prologue on the left operand it is right"
    turned = with_tensor(converted_product(4, left), 3, strides=(68, 1, 17))
    assert misread(turned) is not None, "rows of 17 numbers"


def test_an_epilogue_operand_that_is_a_part_by_rows() -> None:
    fine = convolution((2, 8, 4, 4))
    last = with_tensor(with_tensor(fine, 3, strides=(128, 1, 32, 8)), 5, strides=(128, 1, 32, 8))
    by_channels = with_tensor(last, 4, strides=(16 * 24, 1, 4 * 24, 24))
    by_rows = with_tensor(last, 4, strides=(160, 1, 32, 8))
    assert misread(by_channels) is None
    assert "part of a larger tensor: it is read by the result's strides" in str(misread(by_rows))


def test_an_epilogue_operand_that_stores_width_before_height() -> None:
    for dims in ((2, 8, 4, 4), (2, 1, 4, 4)):
        fine = convolution(dims)
        last = with_tensor(fine, 4, strides=(dims[1] * 16, 1, 4 * dims[1], dims[1]))
        assert misread(fine) is None and misread(last) is None
        turned = with_tensor(fine, 4, strides=(dims[1] * 16, 16, 1, 4))
        assert "in the result's order of pixels" in str(misread(turned))


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_maximum_that_starts_from_a_finite_number(mode: str) -> None:
    fine = reduction((2, 3, 5), (2, 1, 5))
    assert misread(fine) is None
    reason = misread(replace(fine, calls=(replace(fine.calls[0], mode=mode),)))
    assert reason is not None and f"a reduction by {mode}: it starts from the largest finite number" in reason


@pytest.mark.parametrize(("dims", "strides"), [((2, 1, 5), (1, 2, 2)), ((2, 3, 1), (1, 2, 1)), ((2, 1, 5), (1, 10, 2))])
def test_an_addend_of_a_matmul_in_another_order(dims: tuple[int, ...], strides: tuple[int, ...]) -> None:
    fine = product(dims)
    assert misread(fine) is None
    reason = misread(with_tensor(fine, 4, strides=strides))
    assert reason is not None and f"a matmul's epilogue with an operand {list(dims)} by strides" in reason


def attention(bias: Sequence[int]) -> CudnnGraph:
    heads = (2, 4, 8, 16)
    tensors = (*(tensor(uid, heads) for uid in (1, 2, 3)), tensor(4, bias), tensor(5, heads))
    return CudnnGraph(tensors, (CudnnCall("sdpa", (1, 2, 3, 4), (5,)),))


@pytest.mark.parametrize("bias", [(2, 4, 8, 8), (2, 1, 1, 8), (1, 4, 1, 1), (2, 1, 1, 1), (2, 4, 8, 1)])
def test_biases_of_attention_that_are_right(bias: tuple[int, ...]) -> None:
    assert misread(attention(bias)) is None


def test_a_bias_with_one_number_for_each_image_and_head() -> None:
    reason = misread(attention((2, 4, 1, 1)))
    assert reason is not None and "one number for each image and head" in reason


def test_a_prologue_on_one_of_two_equal_operands() -> None:
    def scaled(other: int) -> CudnnGraph:
        dims = (1, 4, 4)
        tensors = (tensor(1, dims), number(2, 3), tensor(3, dims, virtual=True), tensor(4, dims), tensor(5, dims))
        calls = (CudnnCall("pointwise", (1, 2), (3,), "mul"), CudnnCall("matmul", (3, other), (5,)))
        return CudnnGraph(tensors, calls)

    assert misread(scaled(4)) is None
    assert "the result of its own prologue" in str(misread(scaled(1)))


def test_scalars_by_value_are_read_right() -> None:
    graph = convolution((2, 8, 1, 1))
    assert misread(graph) is not None
    tensors = tuple(number(4, 4) if t.uid == 4 else t for t in graph.tensors)
    assert misread(replace(graph, tensors=tensors)) is None


@pytest.mark.parametrize(
    ("operand", "wrong"),
    [((1, 1, 5), True), ((1, 3, 1), True), ((2, 1, 1), True), ((2, 1, 5), False), ((1, 1, 1), False)],
)
def test_pointwise_operands_broadcast_along_two_of_three_dims(operand: tuple[int, ...], wrong: bool) -> None:
    reason = misread(pointwise((2, 3, 5), (2, 3, 5), operand))
    assert (reason is not None) == wrong
    assert not wrong or f"an operand {list(operand)} broadcast along two dims of [2, 3, 5]" in str(reason)
    assert two_of_three(operand, (2, 3, 5)) == wrong
    assert misread(product(operand if operand[0] == 1 else (1, 1, 5))) is None, "a matmul's epilogue reads it right"


def test_two_wide_dims_are_safe() -> None:
    assert misread(pointwise((1, 3, 5), (1, 3, 5), (1, 1, 5))) is None
    assert not two_of_three((1, 1, 1), (1, 3, 5)), "one element is no row"


def test_bools_in_memory_are_misread_and_virtual_ones_are_not() -> None:
    dims = (1, 3, 5)
    compare = CudnnCall("pointwise", (1, 2), (3,), "cmp_gt")
    select = CudnnCall("pointwise", (1, 2, 3), (4,), "binary_select")
    tensors = (tensor(1, dims), tensor(2, dims), tensor(3, dims, DType.BOOL, virtual=True), tensor(4, dims))
    assert misread(CudnnGraph(tensors, (compare, select))) is None
    stored = (*tensors[:2], tensor(3, dims, DType.BOOL), tensors[3])
    assert "a boolean tensor in memory" in str(misread(CudnnGraph(stored, (compare, select))))
    assert "a boolean tensor in memory" in str(misread(CudnnGraph(stored, (select,)))), "as an input too"


# deadly -----------------------------------------------------------------------------------------------


def with_tensor(graph: CudnnGraph, uid: int, /, **changes: object) -> CudnnGraph:
    return replace(
        graph,
        tensors=tuple(replace(t, **changes) if t.uid == uid else t for t in graph.tensors),
    )


FINE = pointwise((2, 3, 5), (2, 3, 5), (2, 3, 5))
LARGE = pointwise((1, 2**15, 2**16 - 1), (1, 2**15, 2**16 - 1), mode="relu")


def window(image: Sequence[int], weight: Sequence[int], result: Sequence[int], op: str = "conv_fprop") -> CudnnGraph:
    tensors = (tensor(1, image), tensor(2, weight), tensor(3, result))
    return CudnnGraph(tensors, (CudnnCall(op, (1, 2), (3,), "", WINDOW),))


def reduction(dims: Sequence[int], result: Sequence[int]) -> CudnnGraph:
    return CudnnGraph((tensor(1, dims), tensor(2, result)), (CudnnCall("reduction", (1,), (2,), "add"),))


def instancenorm(parameter: Sequence[int]) -> CudnnGraph:
    x = (2, 8, 4, 4)
    tensors = (tensor(1, x), tensor(2, (1, 8, 1, 1)), tensor(3, parameter), number(4, 4), tensor(5, x))
    return CudnnGraph(tensors, (CudnnCall("instancenorm", (1, 2, 3, 4), (5,)),))


def fed_matmul(op: str) -> CudnnGraph:
    """`op`, then relu, then matmul."""
    dims = (1, 4, 4, 4)
    first = {"conv_fprop": CudnnCall("conv_fprop", (1, 2), (3,), "", WINDOW)}.get(
        op, CudnnCall("pointwise", (1, 2), (3,), "add")
    )
    weight = (4, 4, 1, 1) if op == "conv_fprop" else dims
    return CudnnGraph(
        (
            tensor(1, dims),
            tensor(2, weight),
            tensor(3, dims, virtual=True),
            tensor(4, dims, virtual=True),
            tensor(5, dims),
            tensor(6, dims),
        ),
        (first, CudnnCall("pointwise", (3,), (4,), "relu"), CudnnCall("matmul", (4, 5), (6,))),
    )


PAIRS = [
    ("uids", FINE, with_tensor(FINE, 2, uid=1), "two tensors have one uid"),
    ("outputs", FINE, with_tensor(FINE, 3, virtual=True), "no output"),
    ("empty", FINE, pointwise((2, 0, 5), (2, 0, 5)), "a tensor of size zero, [2, 0, 5]"),
    ("negative", FINE, with_tensor(FINE, 1, strides=(15, -5, 1)), "negative strides [15, -5, 1]"),
    (
        "too large",
        LARGE,
        pointwise((1, 2**15, 2**16), (1, 2**15, 2**16), mode="relu"),
        "a tensor of 2147483648 elements; cuDNN indexes with 32 bits",
    ),
    ("overlap", with_tensor(FINE, 3, strides=(16, 5, 1)), with_tensor(FINE, 3, strides=(15, 4, 1)), "share memory"),
    ("overlap by broadcast", with_tensor(FINE, 2, strides=(0, 5, 1)), with_tensor(FINE, 3, strides=(0, 5, 1)), "share"),
    (
        "groups",
        window((1, 8, 4, 4), (6, 4, 1, 1), (1, 6, 4, 4)),
        window((1, 8, 4, 4), (5, 4, 1, 1), (1, 5, 4, 4)),
        "a convolution of 8 channels by filters [5, 4, 1, 1]: no whole number of groups",
    ),
    (
        "channels",
        window((1, 8, 4, 4), (6, 8, 1, 1), (1, 6, 4, 4)),
        window((1, 8, 4, 4), (6, 3, 1, 1), (1, 6, 4, 4)),
        "a convolution of 8 channels by filters [6, 3, 1, 1]: no whole number of groups",
    ),
    (
        "transposed",
        window((1, 8, 4, 4), (8, 3, 1, 1), (1, 6, 4, 4), "conv_dgrad"),
        window((1, 8, 4, 4), (6, 3, 1, 1), (1, 6, 4, 4), "conv_dgrad"),
        "a transposed convolution of 8 channels by filters [6, 3, 1, 1]",
    ),
    (
        "transposed groups",
        window((1, 8, 4, 4), (8, 3, 1, 1), (1, 3, 4, 4), "conv_dgrad"),
        window((1, 8, 4, 4), (8, 3, 1, 1), (1, 4, 4, 4), "conv_dgrad"),
        "a transposed convolution of 8 channels",
    ),
    (
        "operand",
        pointwise((2, 3, 5), (2, 3, 5), (1, 3, 5)),
        pointwise((2, 3, 5), (2, 3, 5), (1, 3, 4)),
        "a pointwise operand [1, 3, 4] for a result [2, 3, 5]",
    ),
    (
        "operand's rank",
        pointwise((2, 3, 5), (2, 3, 5), (1, 3, 5)),
        pointwise((2, 3, 5), (2, 3, 5), (3, 5)),
        "a pointwise operand [3, 5] for a result [2, 3, 5]",
    ),
    (
        "result larger than its operands",
        pointwise((2, 3, 5), (2, 3, 1), (1, 1, 5)),
        pointwise((2, 3, 5), (2, 3, 1), (1, 3, 1)),
        "a pointwise result [2, 3, 5] larger than its operands [[2, 3, 1], [1, 3, 1]]",
    ),
    ("reduction", reduction((2, 3, 5), (2, 1, 5)), reduction((2, 3, 5), (2, 2, 5)), "a reduction of [2, 3, 5] to"),
    ("reduction's rank", reduction((2, 3, 5), (1, 1, 1)), reduction((2, 3, 5), (2, 5)), "a reduction of [2, 3, 5] to"),
    (
        "instance norm",
        instancenorm((1, 8, 1, 1)),
        instancenorm((1, 8, 4, 4)),
        "an instance norm of [2, 8, 4, 4] with parameters [[1, 8, 1, 1], [1, 8, 4, 4]]",
    ),
    ("conv into matmul", fed_matmul("pointwise"), fed_matmul("conv_fprop"), "a convolution that feeds a matmul"),
]


@pytest.mark.parametrize(("fine", "bad", "said"), [p[1:] for p in PAIRS], ids=[p[0] for p in PAIRS])
def test_deadly_graphs_and_their_siblings(fine: CudnnGraph, bad: CudnnGraph, said: str) -> None:
    assert deadly(fine) is None
    reason = deadly(bad)
    assert reason is not None
    assert said in reason


def test_the_limit_of_elements_is_that_of_32_bits() -> None:
    assert MAX_ELEMENTS == 2**31 - 1
    assert max(t.dims[1] * t.dims[2] for t in LARGE.tensors) < MAX_ELEMENTS


def test_inputs_may_share_memory_and_outputs_may_have_gaps() -> None:
    assert deadly(with_tensor(FINE, 1, strides=(0, 0, 1))) is None
    assert deadly(with_tensor(FINE, 3, strides=(1, 60, 7))) is None


def test_strides_of_dims_of_one_do_not_matter() -> None:
    graph = pointwise((1, 3, 5), (1, 3, 5), mode="relu")
    assert deadly(with_tensor(graph, 2, strides=(1, 5, 1))) is None
    assert deadly(with_tensor(graph, 2, strides=(0, 5, 1))) is None


def test_pointwise_graphs_larger_than_a_launch_grid_are_refused() -> None:
    for good, bad in (((65535, 2, 3), (65536, 2, 3)), ((1, 2, 65535 * 128), (1, 2, 65535 * 128 + 1))):
        assert misread(pointwise(good, good, good)) is None
        assert "launch grid" in str(misread(pointwise(bad, bad, bad)))
    assert misread(pointwise((1, 1 << 24, 2), (1, 1 << 24, 2), (1, 1 << 24, 2))) is None


# plans ------------------------------------------------------------------------------------------------


def conv_graph(order: tuple[int, ...], groups: int = 1, window: int = 1, dtype: DType = DType.F16) -> CudnnGraph:
    """A convolution of 8 channels stored in this order, by row-major filters."""
    x, w, y = (2, 8, 4, 4), (8, 8 // groups, window, window), (2, 8, 4, 4)
    tensors = (replace(tensor(1, x, dtype), strides=TensorType(x, dtype, order).strides), tensor(2, w), tensor(3, y))
    return CudnnGraph(tensors, (CudnnCall("conv_fprop", (1, 2), (3,), "", WINDOW),))


def dot_products(batch: int, addend: bool = True) -> CudnnGraph:
    """Rows by columns, perhaps with something added."""
    result = (batch, 1, 1)
    matmul = CudnnCall("matmul", (1, 2), (3,))
    operands = (tensor(1, (batch, 1, 8)), tensor(2, (batch, 8, 1)))
    if not addend:
        return CudnnGraph((*operands, tensor(3, result)), (matmul,))
    rest = (tensor(3, result, virtual=True), tensor(4, result), tensor(5, result))
    return CudnnGraph((*operands, *rest), (matmul, CudnnCall("pointwise", (3, 4), (5,), "add")))


def filter_gradient(per_group: int) -> CudnnGraph:
    """The gradient of a convolution's filters."""
    tensors = (tensor(1, (2, 8, 4, 4)), tensor(2, (2, 8, 4, 4)), tensor(3, (8, per_group, 1, 1)))
    return CudnnGraph(tensors, (CudnnCall("conv_wgrad", (1, 2), (3,), "", WINDOW),))


def transposed() -> CudnnGraph:
    """A transposed convolution."""
    x, w, y = (2, 8, 4, 4), (8, 8, 1, 1), (2, 8, 4, 4)
    tensors = (tensor(1, x), tensor(2, w), tensor(3, y))
    return CudnnGraph(tensors, (CudnnCall("conv_dgrad", (1, 2), (3,), "", WINDOW),))


NHWC, NCHW = (0, 2, 3, 1), ()


@pytest.mark.parametrize(
    ("graph", "engine", "tile", "wrong"),
    [
        (conv_graph(NCHW), 7, 29, True),
        (conv_graph(NCHW), 7, 30, True),
        (conv_graph(NHWC), 7, 30, False),
        (conv_graph(NCHW), 7, 21, False),
        (conv_graph(NHWC), 7, 29, False),
        (conv_graph(NCHW), 4, 29, True),
        (conv_graph(NHWC), 4, 29, False),
        (conv_graph(NCHW, groups=2), 7, 29, True),
        (conv_graph(NCHW, groups=2), 7, 21, False),
        (conv_graph(NHWC, window=3), 7, 29, True),
        (conv_graph(NHWC, window=3), 7, 30, True),
        (conv_graph(NHWC, window=3, dtype=DType.F32), 7, 29, True),
        (conv_graph(NHWC, window=3), 7, 21, False),
        (product((2, 3, 5)), 2, 0, True),
        (product((2, 3, 5)), 7, 0, False),
        (product((2, 3, 5)), 0, 0, False),
        (dot_products(2), 0, 0, True),
        (dot_products(2), 7, 0, False),
        (dot_products(1), 0, 0, True),
        (dot_products(2, addend=False), 0, 0, False),
        (dot_products(1, addend=False), 0, 0, False),
        (filter_gradient(4), 20, 0, True),
        (filter_gradient(4), 1, 0, True),
        (filter_gradient(4), 0, 0, False),
        (filter_gradient(8), 20, 0, True),
        (filter_gradient(8), 1, 0, False),
        (transposed(), 25, 0, True),
        (transposed(), 22, 0, False),
        (pointwise((2, 3), (2, 3), (2, 3)), 2, 0, False),
    ],
)
def test_plans_that_compute_wrongly(graph: CudnnGraph, engine: int, tile: int, wrong: bool) -> None:
    assert bool(wrong_plan(graph, engine, {12: tile})) == wrong
    assert misread(graph) is None


def test_an_image_of_one_channel_has_no_order() -> None:
    graph = conv_graph(NCHW)
    one = replace(graph, tensors=(tensor(1, (2, 1, 4, 4)), tensor(2, (8, 1, 1, 1)), graph.tensors[2]))
    assert wrong_plan(one, 7, {12: 29}) is None


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("mode", ["relu_backward", "gelu_approx_tanh_backward"])
def test_a_backward_mode_wants_whole_operands(mode: str, which: int) -> None:
    operands = [(2, 3, 5), (2, 3, 5)]
    assert misread(pointwise((2, 3, 5), *operands, mode=mode)) is None
    operands[which] = (2, 3, 1)
    assert "with a broadcast operand" in str(misread(pointwise((2, 3, 5), *operands, mode=mode)))
    assert misread(pointwise((2, 3, 5), *operands)) is None


def test_true_fp32_has_no_matmul() -> None:
    graph = product((2, 3, 5))
    assert "tf32" in str(misread(replace(graph, tensor_cores=False)))


def test_a_copy_of_a_value_used_elsewhere_is_not_written() -> None:
    def graph(copied: int) -> CudnnGraph:
        base = convolution((2, 8, 4, 4))
        copy = CudnnCall("pointwise", (copied,), (6,), "identity")
        return CudnnGraph((*base.tensors, tensor(6, (2, 8, 4, 4), DType.F32)), (*base.calls, copy))

    assert "does not write the copy" in str(misread(graph(3)))
    assert misread(graph(5)) is None  # a copy of what is stored anyway
    stored = graph(3)
    assert "does not write the copy" in str(misread(with_tensor(stored, 3, virtual=False)))


def test_a_number_added_to_the_result_of_one_filter_is_read_as_a_bias() -> None:
    def graph(filters: int) -> CudnnGraph:
        y = (2, filters, 4, 4)
        tensors = (tensor(1, (2, 8, 4, 4)), tensor(2, (filters, 8, 1, 1)), tensor(3, y, virtual=True), number(4, 4))
        calls = (CudnnCall("conv_fprop", (1, 2), (3,), "", WINDOW), CudnnCall("pointwise", (3, 4), (5,), "add"))
        return CudnnGraph((*tensors, tensor(5, y)), calls)

    assert "one filter" in str(misread(graph(1)))
    assert misread(graph(2)) is None


def with_order(graph: CudnnGraph, uid: int, order: tuple[int, ...]) -> CudnnGraph:
    def stored(t: CudnnTensor) -> CudnnTensor:
        return replace(t, strides=TensorType(t.dims, t.dtype, order).strides) if t.uid == uid else t

    return replace(graph, tensors=tuple(map(stored, graph.tensors)))


@pytest.mark.parametrize(
    ("order", "wrong"), [((), False), ((0, 2, 3, 1), False), ((0, 1, 3, 2), True), ((2, 3, 0, 1), True)]
)
def test_filters_are_stored_in_one_of_two_orders(order: tuple[int, ...], wrong: bool) -> None:
    base = conv_graph(NHWC)
    graph = replace(base, tensors=(base.tensors[0], tensor(2, (8, 8, 3, 5)), base.tensors[2]))
    assert bool(misread(with_order(graph, 2, order))) == wrong


@pytest.mark.parametrize(
    ("dims", "order", "wrong"),
    [
        ((2, 6, 5), (), False),
        ((2, 6, 5), (0, 2, 1), True),
        ((2, 1, 5), (), False),
        ((2, 1, 5), (2, 0, 1), True),
        ((2, 1, 1), (2, 1, 0), False),
    ],
)
def test_pointwise_operands_have_one_memory_order(dims: tuple[int, ...], order: tuple[int, ...], wrong: bool) -> None:
    reason = misread(with_order(pointwise((2, 6, 5), (2, 6, 5), dims), 2, order))
    assert ("two memory orders" in str(reason)) == wrong


def test_engine_52_wants_channels_last_and_one_output() -> None:
    assert wrong_plan(conv_graph(NCHW), 52, {}) is not None
    assert wrong_plan(conv_graph(NHWC), 52, {}) is None
    base = conv_graph(NHWC)
    copy = CudnnCall("pointwise", (3,), (4,), "relu")
    two = CudnnGraph((*base.tensors, tensor(4, (2, 8, 4, 4))), (*base.calls, copy))
    assert wrong_plan(two, 52, {}) is not None


@pytest.mark.parametrize("engine", [7, 71])
@pytest.mark.parametrize(("order", "strides"), [(NCHW, (256, 16, 4, 1)), (NHWC, (256, 1, 32, 8))])
def test_engines_that_read_a_part_of_an_image_as_packed(
    engine: int, order: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    whole = conv_graph(order)
    image, *others = whole.tensors
    part = replace(whole, tensors=(replace(image, strides=strides), *others))
    assert wrong_plan(whole, engine, {}) is None
    assert (wrong_plan(part, engine, {}) is not None) == (order == NCHW)
    assert wrong_plan(part, 45, {}) is None


@pytest.mark.parametrize("engine", [0, 28])
def test_engines_that_add_up_integers_wrongly(engine: int) -> None:
    graph = conv_graph(NHWC)
    image, filters, result = graph.tensors
    integers = tuple(replace(t, dtype=DType.I8) for t in (image, filters))
    sums = replace(graph, tensors=(*integers, replace(result, dtype=DType.I32)))
    assert wrong_plan(sums, engine, {}) is not None
    assert wrong_plan(sums, 71, {}) is None
    assert wrong_plan(graph, engine, {}) is None


@pytest.mark.parametrize("engine", [7, 52, 71])
@pytest.mark.parametrize("uid", [1, 3])
def test_engines_that_take_one_channel_of_several_as_packed(engine: int, uid: int) -> None:
    graph = conv_graph(NHWC)
    dims = {1: (2, 1, 4, 4), 2: (1, 1, 1, 1), 3: (2, 1, 4, 4)}
    alone = replace(graph, tensors=tuple(replace(tensor(u, d), strides=(16, 1, 4, 1)) for u, d in dims.items()))
    part = with_tensor(alone, uid, strides=(64, 1, 4, 1))
    assert wrong_plan(alone, engine, {}) is None
    assert wrong_plan(part, engine, {}) is not None
    assert wrong_plan(part, 45, {}) is None


@pytest.mark.parametrize("engine", [3, 6])
def test_engines_that_compute_16_bit_convolutions_by_transforms(engine: int) -> None:
    alone = conv_graph(NHWC)
    assert wrong_plan(alone, engine, {}) is not None
    assert wrong_plan(transposed(), engine, {}) is None
    image, filters, result = alone.tensors
    tensors = (image, filters, replace(result, virtual=True), tensor(4, result.dims))
    with_relu = CudnnGraph(tensors, (*alone.calls, CudnnCall("pointwise", (3,), (4,), "relu")))
    assert wrong_plan(with_relu, engine, {}) is None


@pytest.mark.parametrize("engine", [7, 52])
def test_variants_that_copy_nothing_want_filters_stored_channels_last(engine: int) -> None:
    filters = (8, 8, 3, 3)
    graph = conv_graph(NHWC)
    graph = replace(graph, tensors=(graph.tensors[0], tensor(2, filters), *graph.tensors[2:]))
    assert wrong_plan(graph, engine, {12: 29}) is not None
    assert wrong_plan(with_order(graph, 2, NHWC), engine, {12: 29}) is None


def in_fp32(graph: CudnnGraph) -> CudnnGraph:
    return replace(graph, tensors=tuple(replace(t, dtype=DType.F32) for t in graph.tensors))


@pytest.mark.parametrize("engine", [3, 12, 26, 29])
def test_engines_that_compute_fp32_convolutions_inexactly(engine: int) -> None:
    assert wrong_plan(in_fp32(conv_graph(NHWC)), engine, {}) is not None
    assert engine == 3 or wrong_plan(conv_graph(NHWC), engine, {}) is None
    assert wrong_plan(in_fp32(transposed()), engine, {}) is None


def test_an_fp32_operand_within_a_larger_tensor() -> None:
    y = (2, 8, 4, 4)
    tensors = (tensor(1, y), tensor(2, (8, 8, 1, 1)), tensor(3, y, virtual=True), tensor(4, y), tensor(5, y))
    conv = CudnnCall("conv_fprop", (1, 2), (3,), "", WINDOW)
    whole = CudnnGraph(tensors, (conv, CudnnCall("pointwise", (3, 4), (5,), "mul")))
    part = replace(whole, tensors=(*tensors[:3], replace(tensors[3], strides=(384, 16, 4, 1)), tensors[4]))
    assert misread(in_fp32(whole)) is None
    assert "within a larger tensor" in str(misread(in_fp32(part)))
    assert "part of a larger tensor" in str(misread(part)), "the images of a row-major part lie apart, too"


def test_engine_70_wants_image_and_loss_channels_last() -> None:
    rows = filter_gradient(8)
    assert wrong_plan(rows, 70, {}) is not None
    assert wrong_plan(with_order(rows, 1, NHWC), 70, {}) is not None
    assert wrong_plan(with_order(with_order(rows, 1, NHWC), 2, NHWC), 70, {}) is None
    assert wrong_plan(rows, 71, {}) is None


@pytest.mark.parametrize("engine", [17, 18])
def test_engines_that_compute_fp32_filter_gradients_inexactly(engine: int) -> None:
    assert wrong_plan(in_fp32(filter_gradient(8)), engine, {}) is not None
    assert wrong_plan(filter_gradient(8), engine, {}) is None
    assert wrong_plan(in_fp32(filter_gradient(8)), 71, {}) is None


def test_engine_20_sums_filter_gradients_in_16_bits() -> None:
    graph = filter_gradient(8)
    assert wrong_plan(graph, 20, {}) is not None
    wide = replace(graph, tensors=(*graph.tensors[:2], replace(graph.tensors[2], dtype=DType.F32)))
    assert wrong_plan(wide, 20, {}) is None


def test_engine_8_wants_operands_stored_as_its_result() -> None:
    y = (2, 8, 4, 4)
    tensors = (tensor(1, y), tensor(2, (8, 8, 1, 1)), tensor(3, y, virtual=True), tensor(4, y), tensor(5, y))
    conv = CudnnCall("conv_fprop", (1, 2), (3,), "", WINDOW)
    graph = CudnnGraph(tensors, (conv, CudnnCall("pointwise", (3, 4), (5,), "mul")))
    assert wrong_plan(graph, 8, {}) is None
    part = replace(tensors[3], strides=(384, 16, 4, 1))  # 8 of 24 channels
    graph = replace(graph, tensors=(*tensors[:3], part, tensors[4]))
    assert wrong_plan(graph, 8, {}) is not None
    assert wrong_plan(graph, 0, {}) is None


def test_grouped_volumes_want_channels_last() -> None:
    x, w, y = (2, 8, 2, 4, 4), (8, 4, 1, 1, 1), (2, 8, 2, 4, 4)
    window = tuple((k, (0, 0, 0) if "pad" in k else (1, 1, 1)) for k, _ in WINDOW)
    rows = CudnnGraph((tensor(1, x), tensor(2, w), tensor(3, y)), (CudnnCall("conv_fprop", (1, 2), (3,), "", window),))
    assert wrong_plan(rows, 7, {12: 21}) is not None
    assert wrong_plan(with_order(rows, 1, (0, 2, 3, 4, 1)), 7, {12: 21}) is None


@pytest.mark.parametrize("kind", ["epilogue", "prologue", "side", "side before"])
def test_engine_8_wants_a_chain(kind: str) -> None:
    y = (2, 8, 4, 4)
    conv = CudnnCall("conv_fprop", (1, 2), (3,), "", WINDOW)
    base = (tensor(1, y), tensor(2, (8, 8, 1, 1)), tensor(3, y, virtual=True))
    last = CudnnCall("pointwise", (3, 4), (5,), "add")
    if kind == "epilogue":
        graph = CudnnGraph((*base, tensor(4, y), tensor(5, y)), (conv, last))
    elif kind == "prologue":
        before = CudnnCall("pointwise", (6,), (1,), "relu")
        image = replace(base[0], virtual=True)
        graph = CudnnGraph((image, *base[1:], tensor(4, y), tensor(5, y), tensor(6, y)), (before, conv, last))
    else:
        side = CudnnCall("pointwise", (6,), (4,), "relu")
        calls = (conv, side, last) if kind == "side" else (side, conv, last)
        graph = CudnnGraph((*base, tensor(4, y, virtual=True), tensor(5, y), tensor(6, y)), calls)
    assert (wrong_plan(graph, 8, {}) is not None) == kind.startswith("side")
    assert wrong_plan(graph, 7, {}) is None


def test_pow_is_left_out_of_epilogues() -> None:
    base = convolution((2, 8, 4, 4))
    graph = replace(base, calls=(base.calls[0], replace(base.calls[1], mode="pow")))
    assert "pow next to a product" in str(misread(graph))
    assert misread(pointwise((2, 3), (2, 3), (2, 3), mode="pow")) is None


@pytest.mark.parametrize("mode", ["tanh", "tanh_backward"])
def test_tanh_is_left_out_of_the_epilogues_of_convolutions(mode: str) -> None:
    for base in (convolution((2, 8, 4, 4)), product((2, 3, 5))):
        graph = replace(base, calls=(base.calls[0], replace(base.calls[1], mode=mode)))
        reason = misread(graph)
        assert (reason is not None and "NaN where they overflow" in reason) == (base.calls[0].op == "conv_fprop")


def test_a_matmul_of_a_tensor_with_itself() -> None:
    base = product((2, 3, 5))
    square = tensor(1, (2, 3, 3))
    calls = (CudnnCall("matmul", (1, 1), (3,)), base.calls[1])
    tensors = (square, tensor(3, (2, 3, 3), virtual=True), tensor(4, (2, 3, 3)), tensor(5, (2, 3, 3)))
    assert "with itself" in str(misread(CudnnGraph(tensors, calls)))
    assert misread(base) is None


def test_the_page_names_every_rule() -> None:
    """docs/hazards.md has at least one row for each rule, and none for a rule that is gone."""
    page = (Path(__file__).parents[2] / "docs" / "hazards.md").read_text()
    tables = page.partition("## Which graphs")[2].partition("## Who applies")[0]
    named = set(re.findall(r"\| `([a-z_0-9]+)` \|$", tables, re.MULTILINE))
    rules = [fires for fires, _ in (*GRAPH_RULES, *CALL_RULES, *OPERAND_RULES)] + [rule.fires for rule in PLAN_RULES]
    assert named == {rule.__name__.lstrip("_") for rule in rules} | {"deadly"}
