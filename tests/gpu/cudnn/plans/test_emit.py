"""Compare the frontend's own JSON with the graph that was emitted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from gpu.cudnn_graphs import WINDOW, batch_norm, batch_norm_backward, conv, conv_with_sums, image, matmul, matrix, norm

from fusec.errors import LoweringError
from fusec.gpu.cudnn.without_driver.deviceless import bring_up
from fusec.ir import DType
from fusec.lowering.cudnn_graph import PORTS, CudnnCall, CudnnGraph, CudnnTensor
from fusec.targets.target import load

pytestmark = pytest.mark.cudnn
NAMES = {DType.F16: "HALF", DType.F32: "FLOAT", DType.BOOL: "BOOLEAN"}
TAGS = {
    "conv_fprop": ("CONV_FPROP", ("X", "W")),
    "conv_dgrad": ("CONV_DGRAD", ("DY", "W")),
    "conv_wgrad": ("CONV_WGRAD", ("X", "DY")),
    "matmul": ("MATMUL", ("A", "B")),
    "sdpa": ("SDPA", ("Q", "K", "V", "Bias")),
    "sdpa_train": ("SDPA", ("Q", "K", "V", "Bias")),
    "sdpa_backward": ("SDPA_BWD", ("dO", "Q", "K", "V", "O", "Stats", "Bias")),
    "pointwise": ("POINTWISE", ("IN_0", "IN_1", "IN_2")),
    "genstats": ("GENSTATS", ("X",)),
    "reduction": ("REDUCTION", ("X",)),
    "layernorm": ("LAYER_NORM", ("X", "SCALE", "BIAS", "EPSILON")),
    "rmsnorm": ("RMS_NORM", ("X", "SCALE", "BIAS", "EPSILON")),
    "instancenorm": ("INSTANCE_NORM", ("X", "SCALE", "BIAS", "EPSILON")),
    "batchnorm": ("BATCHNORM", ("X", "SCALE", "BIAS", "PREV_RUNNING_MEAN", "PREV_RUNNING_VAR", "EPSILON", "MOMENTUM")),
    "batchnorm_backward": ("DBN", ("DY", "X", "SCALE", "MEAN", "INV_VARIANCE")),
}
ACTIVATIONS = ("elu", "gelu", "gelu_approx_tanh", "relu", "sigmoid", "softplus", "swish", "tanh")
MODES = {
    "bias": "ADD",
    "scale": "MUL",
    "leaky_relu": "RELU_FWD",
    "leaky_relu_backward": "RELU_BWD",
    **{a: f"{a.upper()}_FWD" for a in ACTIVATIONS},
    **{f"{a}_backward": f"{a.upper()}_BWD" for a in ACTIVATIONS},
}


def frontend_json(graph: CudnnGraph) -> dict[str, Any]:
    bring_up(90)
    from fusec.gpu.cudnn.plans.emit import emit  # imports cudnn, which wants the driver library loaded

    emitted = emit(graph, target=load("h200"))
    emitted.validate()
    return json.loads(repr(emitted._lowered_graph))


def check(graph: CudnnGraph) -> dict[str, Any]:
    data = frontend_json(graph)
    tensors = {t["uid"]: t for t in data["tensors"]}
    assert sorted(tensors) == [t.uid for t in graph.tensors]
    for t in graph.tensors:
        found = tensors[t.uid]
        assert (tuple(found["dim"]), tuple(found["stride"])) == (t.dims, t.strides)
        assert (found["data_type"], found["is_virtual"]) == (NAMES[t.dtype], t.virtual)
        assert found["is_pass_by_value"] == (t.value is not None)
    assert len(data["nodes"]) == len(graph.calls)
    for node, call in zip(data["nodes"], graph.calls, strict=True):
        tag, ports = TAGS[call.op]
        if call.op == "rmsnorm" and len(call.inputs) == 3:
            ports = ("X", "SCALE", "EPSILON")
        assert node["tag"] == tag
        assert node["inputs"] == dict(zip(ports, call.inputs, strict=False))
        assert tuple(sorted(node["outputs"].values())) == call.outputs
        if not call.op.startswith("sdpa"):  # whose parts have a type of their own each
            assert node["compute_data_type"] == NAMES[call.compute]
        if call.op == "pointwise":
            assert node["mode"] == MODES.get(call.mode, call.mode.upper())
    return data


def test_convolution_with_epilogue_is_emitted_as_given() -> None:
    node = check(conv("z", "bias", "relu"))["nodes"][0]
    assert {k: tuple(node[k]) for k, _ in WINDOW} == dict(WINDOW)


def test_an_asymmetric_window_has_different_sides() -> None:
    window = (("pre_padding", (1, 0)), ("post_padding", (2, 1)), ("stride", (2, 1)), ("dilation", (1, 2)))
    tensors = (image(1, (1, 6, 12, 11)), image(2, (4, 3, 3, 2)), image(3, (1, 4, 7, 10)))
    node = check(CudnnGraph(tensors, (CudnnCall("conv_fprop", (1, 2), (3,), attributes=window),)))["nodes"][0]
    assert {k: tuple(node[k]) for k, _ in window} == dict(window)


def test_flipped_filters_are_a_mode_of_the_convolution() -> None:
    plain = conv("z", "relu")
    first = replace(plain.calls[0], attributes=(*WINDOW, ("flipped", True)))
    node = check(replace(plain, calls=(first, *plain.calls[1:])))["nodes"][0]
    assert node["math_mode"] == "CONVOLUTION" and {k: tuple(node[k]) for k, _ in WINDOW} == dict(WINDOW)
    assert check(plain)["nodes"][0]["math_mode"] == "CROSS_CORRELATION"


def test_transposed_convolution() -> None:
    tensors = (image(1, (8, 64, 28, 28)), image(2, (64, 32, 3, 3)), image(3, (8, 32, 28, 28)))
    check(CudnnGraph(tensors, (CudnnCall("conv_dgrad", (1, 2), (3,), attributes=WINDOW),)))


def test_gradient_of_filters() -> None:
    tensors = (image(1, (8, 64, 28, 28)), image(2, (8, 32, 28, 28)), image(3, (32, 64, 3, 3)))
    check(CudnnGraph(tensors, (CudnnCall("conv_wgrad", (1, 2), (3,), attributes=WINDOW),)))


def test_sums_after_a_convolution() -> None:
    node = check(conv_with_sums())["nodes"][1]
    assert node["outputs"] == {"SUM": 4, "SQ_SUM": 5}


def test_matmul_and_reduction() -> None:
    check(matmul((1, 8, 64), (1, 64, 4), (1, 8, 4)))
    tensors = (image(1, (64, 128, 1, 1)), image(2, (64, 1, 1, 1), DType.F32))
    for mode in ("add", "mul", "min", "max", "amax"):
        node = check(CudnnGraph(tensors, (CudnnCall("reduction", (1,), (2,), mode),)))["nodes"][0]
        assert node["mode"] == mode.upper()


@pytest.mark.parametrize("op", ["layernorm", "rmsnorm", "instancenorm"])
def test_norms(op: str) -> None:
    x = (8, 16, 4, 4) if op == "instancenorm" else (64, 16, 1, 1)
    check(norm(op, x, (1, 16, 1, 1)))


@pytest.mark.parametrize("make", [batch_norm, batch_norm_backward])
def test_batch_norm_in_training(make: Callable[..., CudnnGraph]) -> None:
    check(make((8, 16, 4, 4), (1, 16, 1, 1)))


def test_rms_norm_without_bias() -> None:
    full = norm("rmsnorm", (64, 16, 1, 1), (1, 16, 1, 1))
    check(CudnnGraph(tuple(t for t in full.tensors if t.uid != 3), (CudnnCall("rmsnorm", (1, 2, 4), (5,)),)))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(biased: bool, causal: bool) -> None:
    given = (("attn_scale", 0.25), ("use_causal_mask", causal))
    shapes = [(2, 4, 8, 16), (2, 2, 9, 16), (2, 2, 9, 16), *([(1, 4, 8, 9)] if biased else []), (2, 4, 8, 16)]
    tensors = tuple(matrix(i, dims) for i, dims in enumerate(shapes, 1))
    operands = tuple(range(1, len(shapes)))
    node = check(CudnnGraph(tensors, (CudnnCall("sdpa", operands, (len(shapes),), attributes=given),)))["nodes"][0]
    assert node["attn_scale_value"] == "3E800000"  # the frontend writes floats as their bits
    assert (node["right_bound"], node["diagonal_alignment"]) == (0 if causal else None, "TOP_LEFT")
    assert not node["generate_stats"]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_for_training(biased: bool, causal: bool) -> None:
    given = (("attn_scale", 0.25), ("use_causal_mask", causal))
    bias = [(1, 4, 8, 9)] if biased else []
    heads, keys, sums = (2, 4, 8, 16), (2, 2, 9, 16), (2, 4, 8, 1)

    def tensors(*shapes: tuple[int, ...]) -> tuple[CudnnTensor, ...]:
        kinds = (DType.F32 if dims == sums else DType.F16 for dims in shapes)
        return tuple(matrix(i, dims, kind) for i, (dims, kind) in enumerate(zip(shapes, kinds, strict=True), 1))

    shapes = (heads, keys, keys, *bias, heads, sums)
    count = 3 + biased
    forward = CudnnCall("sdpa_train", tuple(range(1, count + 1)), (count + 1, count + 2), attributes=given)
    node = check(CudnnGraph(tensors(*shapes), (forward,)))["nodes"][0]
    assert node["generate_stats"] and node["outputs"] == {"O": count + 1, "Stats": count + 2}

    shapes = (heads, heads, keys, keys, heads, sums, *bias, heads, keys, keys)
    count = 6 + biased
    results = (count + 1, count + 2, count + 3)
    backward = CudnnCall("sdpa_backward", tuple(range(1, count + 1)), results, attributes=given)
    node = check(CudnnGraph(tensors(*shapes), (backward,)))["nodes"][0]
    assert node["outputs"] == dict(zip(("dQ", "dK", "dV"), results, strict=True))
    assert node["right_bound"] == (0 if causal else None)


def mode_graph(mode: str, count: int) -> CudnnGraph:
    logical = mode.startswith("logical")
    operand = DType.BOOL if logical else DType.F16
    tensors = [matrix(i + 1, (1, 8, 64), operand) for i in range(count)]
    if mode == "binary_select":
        tensors[2] = matrix(3, (1, 8, 64), DType.BOOL)
    result = DType.BOOL if logical or mode.startswith("cmp") else DType.F16
    attributes: dict[str, tuple[tuple[str, float | int], ...]] = {
        "leaky_relu": (("negative_slope", 0.1),),
        "leaky_relu_backward": (("negative_slope", 0.1),),
        "gen_index": (("axis", 2),),
    }
    compute = DType.BOOL if logical else DType.F32
    inputs = tuple(range(1, count + 1))
    call = CudnnCall("pointwise", inputs, (count + 1,), mode, attributes.get(mode, ()), compute)
    return CudnnGraph((*tensors, matrix(count + 1, (1, 8, 64), result)), (call,))


def test_every_pointwise_mode_arrives_with_its_operands_in_order() -> None:
    bring_up(90)
    from fusec.gpu.cudnn.plans.emit import POINTWISE

    for mode, count in POINTWISE.items():
        check(mode_graph(mode, count))


def test_scalar_attributes_of_activations_arrive() -> None:
    def slots(call: CudnnCall) -> dict[str, Any]:
        return frontend_json(CudnnGraph((matrix(1, (1, 8, 64)), matrix(2, (1, 8, 64))), (call,)))["nodes"][0]

    clipped = slots(CudnnCall("pointwise", (1,), (2,), "relu", (("lower_clip", 0.0), ("upper_clip", 6.0))))
    assert clipped["relu_upper_clip"] == "40C00000"  # the frontend writes floats as their bits
    assert clipped["relu_lower_clip"] == "00000000"
    assert slots(CudnnCall("pointwise", (1,), (2,), "swish", (("beta", 2.0),)))["swish_beta"] == "40000000"
    leaky = slots(CudnnCall("pointwise", (1,), (2,), "leaky_relu", (("negative_slope", 0.5),)))
    assert leaky["relu_lower_clip_slope"] == "3F000000"
    index = slots(CudnnCall("pointwise", (1,), (2,), "gen_index", (("axis", 1),)))
    assert index["axis"] == 1


def test_ops_that_the_frontend_lacks_are_refused() -> None:
    pair = (matrix(1, (1, 8, 64)), matrix(2, (1, 8, 64)))
    for tensors, call, words in (
        (pair, CudnnCall("pointwise", (1,), (2,), "atan"), "no pointwise mode 'atan'"),
        (pair, CudnnCall("pointwise", (1,), (2,), "add"), "no pointwise mode 'add' of 1"),
        (pair, CudnnCall("resample", (1,), (2,)), "no operation 'resample'"),
        ((matrix(1, (1, 8, 64), DType.I16), pair[1]), CudnnCall("pointwise", (1,), (2,), "relu"), "element type i16"),
    ):
        with pytest.raises(LoweringError, match=words):
            frontend_json(CudnnGraph(tensors, (call,)))


def test_every_operation_of_the_ports_is_covered_here() -> None:
    assert set(TAGS) == set(PORTS)


def test_with_a_kernel_cache_the_next_size_is_not_compiled() -> None:
    """cuDNN compiles for all sizes what its runtime engine takes: the second size takes no compilation."""
    bring_up(90)
    import cudnn

    from fusec.gpu.cudnn.plans.emit import emit, kernel_cache

    kernels = kernel_cache()
    seconds: list[float] = []
    engines: list[int] = []
    for size in (28, 20, 27):
        emitted = emit(conv("bias", "sigmoid", "z", size=size), target=load("h200"), kernels=kernels)
        emitted.validate()
        emitted.build_operation_graph()
        emitted.create_execution_plans([cudnn.heur_mode.A])
        start = time.perf_counter()
        emitted.build_plan_at_index(0)
        seconds.append(time.perf_counter() - start)
        engines.append(emitted.get_engine_and_knobs_at_index(0)[0])
    assert len(set(engines)) == 1
    assert max(seconds[1:]) < 0.1 * seconds[0], seconds
