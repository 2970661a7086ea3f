"""Test the rules for plans that compute wrong results: they tell epilogues from prologues and independent ops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusec.ir import DType, TensorType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor
from fusec.lowering.known_bugs import wrong_plan

DIMS, LAST = (2, 8, 4, 4), (0, 2, 3, 1)
WINDOW = (("pre_padding", (0, 0)), ("post_padding", (0, 0)), ("stride", (1, 1)), ("dilation", (1, 1)))


def tensor(uid: int, virtual: bool = False, order: tuple[int, ...] = LAST) -> CudnnTensor:
    return CudnnTensor(uid, DIMS, TensorType(DIMS, DType.F16, order).strides, DType.F16, virtual)


def graph(
    *calls: tuple[str, tuple[int, ...], int], stored: tuple[int, ...], order: tuple[int, ...] = LAST
) -> CudnnGraph:
    """Make pointwise calls around a convolution of tensor 1, or of a value computed from it, by filters 2."""
    made = {out for _, _, out in calls}
    uids = sorted({uid for _, inputs, out in calls for uid in (*inputs, out)} - {2})
    tensors = [tensor(uid, uid in made and uid not in stored, order) for uid in uids]
    weight = CudnnTensor(2, (8, 8, 1, 1), TensorType((8, 8, 1, 1), DType.F16, LAST).strides, DType.F16)
    named = [
        CudnnCall("conv_fprop", inputs, (out,), "", WINDOW)
        if mode == "conv"
        else CudnnCall("pointwise", inputs, (out,), mode)
        for mode, inputs, out in calls
    ]
    return CudnnGraph((*tensors, weight), tuple(named))


CONV = ("conv", (1, 2), 3)
INDEPENDENT = {
    "an epilogue": (graph(CONV, ("relu", (3,), 4), stored=(4,)), False),
    "a longer one, with a residual": (graph(CONV, ("add", (3, 5), 6), ("relu", (6,), 4), stored=(4,)), False),
    "a prologue of two ops": (graph(("relu", (1,), 5), ("abs", (5,), 6), ("conv", (6, 2), 3), stored=(3,)), False),
    "an op on the residual": (graph(CONV, ("relu", (5,), 6), ("add", (3, 6), 4), stored=(4,)), True),
    "two ops on it": (graph(CONV, ("relu", (5,), 6), ("abs", (6,), 7), ("add", (3, 7), 4), stored=(4,)), True),
}


@pytest.mark.parametrize("what", INDEPENDENT)
def test_engine_8_and_what_does_not_depend_on_the_convolution(what: str) -> None:
    found, wrong = INDEPENDENT[what]
    reason = wrong_plan(found, 8, {})
    assert (reason is not None) == wrong
    assert reason is None or "an epilogue op that does not depend on the convolution" in reason
    assert wrong_plan(found, 7, {12: 21}) is None


GRADIENTS = {
    "at the convolution's result": (graph(CONV, ("swish_backward", (5, 3), 4), stored=(4,)), True),
    "at a value computed from it": (
        graph(CONV, ("add", (3, 6), 7), ("relu_backward", (5, 7), 8), ("mul", (8, 6), 4), stored=(4,)),
        True,
    ),
    "of the convolution's result": (graph(CONV, ("swish_backward", (3, 5), 4), stored=(4,)), False),
    "of a value computed from it, at the result": (
        graph(CONV, ("mul", (3, 5), 6), ("swish_backward", (6, 3), 4), stored=(4,)),
        False,
    ),
    "of a sigmoid, at another value": (graph(CONV, ("sigmoid_backward", (3, 5), 4), stored=(4,)), False),
    "before the convolution": (graph(("swish_backward", (5, 1), 6), ("conv", (6, 2), 3), stored=(3,)), False),
}


@pytest.mark.parametrize("what", GRADIENTS)
def test_engine_8_and_the_gradient_of_an_activation(what: str) -> None:
    found, wrong = GRADIENTS[what]
    reason = wrong_plan(found, 8, {})
    assert (reason is not None) == wrong
    assert reason is None or "gradient" in reason
    assert wrong_plan(found, 7, {12: 21}) is None


def test_engine_8_and_a_gradient_at_the_result_of_a_transposed_convolution() -> None:
    forward = graph(CONV, ("relu_backward", (5, 3), 4), stored=(4,))
    transposed = replace(forward, calls=(replace(forward.calls[0], op="conv_dgrad"), forward.calls[1]))
    assert "gradient of an activation" in str(wrong_plan(transposed, 8, {}))


def test_engine_52_wants_one_result_and_an_image_stored_channels_last() -> None:
    plain = graph(CONV, ("relu", (3,), 4), stored=(4,))
    assert wrong_plan(plain, 52, {}) is None
    two = graph(CONV, ("relu", (3,), 4), stored=(3, 4))
    turned = graph(CONV, ("relu", (3,), 4), stored=(4,), order=())
    for bad in (two, turned):
        assert "engine 52 with an image" in str(wrong_plan(bad, 52, {}))


@pytest.mark.parametrize(
    ("channels", "dtype", "wrong"), [(2, DType.F16, True), (8, DType.F16, False), (2, DType.F32, False)]
)
def test_engine_1_and_the_gradient_of_filters_of_two_channels(channels: int, dtype: DType, wrong: bool) -> None:
    def stored(uid: int, count: int, of: DType = dtype) -> CudnnTensor:
        dims = (4, count, 5, 5)
        return CudnnTensor(uid, dims, TensorType(dims, of, LAST).strides, of)

    gradient = CudnnCall("conv_wgrad", (1, 2), (3,), "", WINDOW)
    found = CudnnGraph((stored(1, channels), stored(2, 4), stored(3, channels, DType.F32)), (gradient,))
    assert ("channels are no multiple of 4" in str(wrong_plan(found, 1, {12: 3}))) == wrong
    assert wrong_plan(found, 9, {}) is None


def test_engine_8_and_a_result_of_8_bits_next_to_another() -> None:
    fine = graph(CONV, ("relu", (3,), 4), stored=(3, 4))
    rounded = replace(fine, tensors=tuple(replace(t, dtype=DType.I8) if t.uid == 4 else t for t in fine.tensors))
    assert wrong_plan(fine, 8, {}) is None and wrong_plan(rounded, 7, {12: 21}) is None
    assert wrong_plan(rounded, 8, {}) == "engine 8 with a result of 8 bits rounds the other one, too"


def test_engine_4_and_an_image_converted_from_8_bits() -> None:
    fine = graph(("identity", (1,), 5), ("conv", (5, 2), 3), stored=(3,))
    converted = replace(fine, tensors=tuple(replace(t, dtype=DType.I8) if t.uid == 1 else t for t in fine.tensors))
    assert wrong_plan(fine, 4, {}) is None and wrong_plan(converted, 7, {12: 21}) is None
    assert wrong_plan(converted, 4, {}) == "engine 4 converts an image or filters of 8 bits wrongly"
    added = graph(CONV, ("add", (3, 5), 4), stored=(4,))
    bytes_added = tuple(replace(t, dtype=DType.I8) if t.uid == 5 else t for t in added.tensors)
    assert wrong_plan(replace(added, tensors=bytes_added), 4, {}) is None, "the image is no integer"


def test_an_image_of_one_pixel_has_no_order() -> None:
    small = graph(CONV, stored=(3,), order=())
    tensors = tuple(t if t.uid == 2 else replace(t, dims=(2, 8, 1, 1), strides=(8, 1, 1, 1)) for t in small.tensors)
    assert wrong_plan(replace(small, tensors=tensors), 52, {}) is None


@pytest.mark.parametrize("engine", [0, 11, 12, 26, 29, 33, 44, 51, 53])
def test_engines_that_write_one_result(engine: int) -> None:
    calls = (CONV, ("add", (3, 5), 6), ("relu", (6,), 4))
    assert wrong_plan(graph(*calls, stored=(4,)), engine, {}) is None
    both = graph(*calls, stored=(4, 6))
    assert wrong_plan(both, engine, {}) == f"engine {engine} with two results: it writes one"
    assert wrong_plan(both, 4, {}) is None


def matmul(mode: str, **attributes: float) -> CudnnGraph:
    dims = (2, 8, 8)
    tensors = [CudnnTensor(uid, dims, (64, 8, 1), DType.F16, uid == 3) for uid in (1, 2, 3, 4)]
    epilogue = CudnnCall("pointwise", (3,), (4,), mode, tuple(attributes.items()))
    return CudnnGraph(tuple(tensors), (CudnnCall("matmul", (1, 2), (3,)), epilogue))


UNLIKE = [
    matmul("relu", lower_clip=0.0, upper_clip=6.0),
    matmul("leaky_relu", negative_slope=0.25),
    matmul("gelu"),
]


@pytest.mark.parametrize("bad", UNLIKE, ids=lambda g: g.calls[-1].mode)
def test_engine_0_runs_another_activation(bad: CudnnGraph) -> None:
    assert f"engine 0 computes another function than {bad.calls[-1].mode}" == wrong_plan(bad, 0, {})
    assert wrong_plan(bad, 7, {}) is None


@pytest.mark.parametrize("mode", ["relu", "gelu_approx_tanh"])
def test_engine_0_runs_the_activations_of_cublaslt(mode: str) -> None:
    assert wrong_plan(matmul(mode), 0, {}) is None


@pytest.mark.parametrize(("dtype", "wrong"), [(DType.F8E4M3, True), (DType.F16, False)])
def test_engine_5_and_a_layer_norm_of_8_bits(dtype: DType, wrong: bool) -> None:
    """An H200 reported an illegal access for 6304 rows of 768."""
    rows, one = (6304, 768, 1, 1), (1, 768, 1, 1)
    strides = (768, 1, 768, 768)
    x, scale, bias = (CudnnTensor(uid, dims, strides, DType.F16) for uid, dims in ((1, rows), (2, one), (3, one)))
    epsilon = CudnnTensor(4, (1, 1, 1, 1), (1, 1, 1, 1), DType.F32, value=1e-6)
    normed, y = CudnnTensor(5, rows, strides, DType.F32, True), CudnnTensor(6, rows, strides, dtype)
    calls = (
        CudnnCall("layernorm", (1, 2, 3, 4), (5,)),
        CudnnCall("pointwise", (5,), (6,), "identity"),
    )
    found = CudnnGraph((x, scale, bias, epsilon, normed, y), calls)
    assert (wrong_plan(found, 5, {12: 0}) is not None) == wrong
    assert wrong_plan(found, 4, {}) is None
