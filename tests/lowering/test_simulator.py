"""Test the simulator: it reads only the description, rounds stored values, and stays inside its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import assert_close
from hypothesis import given
from hypothesis import strategies as st

from fusec.errors import ExecutionError
from fusec.ir import DType
from fusec.lowering.cudnn_graph import Attribute, CudnnCall, CudnnGraph, CudnnTensor
from fusec.lowering.simulator import extent, simulate, view

Array = np.ndarray[Any, Any]
F32, F16, BF16 = DType.F32, DType.F16, DType.BF16


def packed(dims: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    strides, step = [0] * len(dims), 1
    for dim in reversed(order or range(len(dims))):
        strides[dim] = step
        step *= dims[dim]
    return tuple(strides)


def nhwc(dims: Sequence[int]) -> tuple[int, ...]:
    return packed(dims, (0, *range(2, len(dims)), 1))


def tensor(
    uid: int, dims: Sequence[int], dtype: DType = F32, strides: Sequence[int] | None = None, virtual: bool = False
) -> CudnnTensor:
    return CudnnTensor(uid, tuple(dims), tuple(packed(dims) if strides is None else strides), dtype, virtual)


def scalar(uid: int, value: float, rank: int = 3) -> CudnnTensor:
    return CudnnTensor(uid, (1,) * rank, (1,) * rank, F32, value=value)


def call(op: str, inputs: Sequence[int], output: int, mode: str = "", /, **attributes: Attribute) -> CudnnCall:
    return CudnnCall(op, tuple(inputs), (output,), mode, tuple(attributes.items()))


def run(graph: CudnnGraph, *inputs: Array) -> list[Array]:
    """Outputs as arrays of their logical dims; buffers larger than needed and poisoned stay so beyond the tensors."""
    buffers: dict[int, Array] = {}
    for t, array in zip(graph.inputs, inputs, strict=True):
        buffers[t.uid] = np.full(extent(t) + 3, _poison(t.dtype), t.dtype.numpy)
        view(t, buffers[t.uid])[...] = array
    before = {uid: b.copy() for uid, b in buffers.items()}
    for t in graph.outputs:
        buffers[t.uid] = np.full(extent(t) + 3, _poison(t.dtype), t.dtype.numpy)
    simulate(graph, buffers)
    for uid, old in before.items():
        assert buffers[uid].tobytes() == old.tobytes(), "an input was written to"
    for t in graph.outputs:
        touched = np.zeros(extent(t) + 3, bool)
        np.lib.stride_tricks.as_strided(touched, t.dims, t.strides)[...] = True
        left = buffers[t.uid][~touched]
        assert left.tobytes() == np.full(left.shape, _poison(t.dtype), t.dtype.numpy).tobytes(), (
            "written next to a tensor"
        )
    return [view(t, buffers[t.uid]).copy() for t in graph.outputs]


def _poison(dtype: DType) -> Any:
    return np.nan if dtype.is_float else True if dtype is DType.BOOL else 77


def normal(rng: np.random.Generator, dims: Sequence[int], dtype: DType = F32) -> Array:
    return rng.normal(size=dims).astype(dtype.numpy)


# buffers ----------------------------------------------------------------------------------------------


def test_extent() -> None:
    assert extent(tensor(1, (2, 3, 4))) == 24
    assert extent(tensor(1, (2, 3, 4), strides=(100, 4, 1))) == 100 + 8 + 3 + 1
    assert extent(tensor(1, (2, 3, 4), strides=(0, 0, 1))) == 4
    assert extent(tensor(1, (2, 0, 4))) == 0
    assert extent(tensor(1, ())) == 1


RELU = CudnnGraph((tensor(1, (1, 2, 4)), tensor(2, (1, 2, 4))), (call("pointwise", [1], 2, "relu"),))


@pytest.mark.parametrize(
    ("uid", "buffer", "said"),
    [
        (1, np.zeros(7, np.float32), r"tensor 1 needs 8 elements of f32, the buffer is float32\[7\]"),
        (1, np.zeros(8, np.float16), r"tensor 1 needs 8 elements of f32, the buffer is float16\[8\]"),
        (1, np.zeros((2, 4), np.float32), r"tensor 1 needs 8 elements of f32, the buffer is float32\[2, 4\]"),
        (2, np.zeros(7, np.float32), r"tensor 2 needs 8 elements of f32, the buffer is float32\[7\]"),
        (2, np.zeros(8, np.int32), r"tensor 2 needs 8 elements of f32, the buffer is int32\[8\]"),
    ],
)
def test_buffers_that_do_not_fit(uid: int, buffer: Array, said: str) -> None:
    buffers = {1: np.zeros(8, np.float32), 2: np.zeros(8, np.float32), uid: buffer}
    with pytest.raises(ExecutionError, match=said):
        simulate(RELU, buffers)


@pytest.mark.parametrize("uid", [1, 2])
def test_a_missing_buffer_is_named(uid: int) -> None:
    buffers = {1: np.zeros(8, np.float32), 2: np.zeros(8, np.float32)}
    del buffers[uid]
    with pytest.raises(ExecutionError, match=f"no buffer for tensor {uid}"):
        simulate(RELU, buffers)


def test_a_result_of_other_dims_than_declared() -> None:
    graph = CudnnGraph((tensor(1, (1, 2, 4)), tensor(2, (1, 4, 5)), tensor(3, (1, 2, 6))), (call("matmul", [1, 2], 3),))
    with pytest.raises(ExecutionError, match=r"matmul : gives \[1, 2, 5\], declared \[1, 2, 6\]"):
        run(graph, np.ones((1, 2, 4)), np.ones((1, 4, 5)))


def test_an_output_with_gaps_leaves_them(rng: np.random.Generator) -> None:
    graph = CudnnGraph(
        (tensor(1, (1, 2, 4), strides=(40, 17, 3)), tensor(2, (1, 2, 4), strides=(1, 10, 2))),
        (call("pointwise", [1], 2, "relu"),),
    )
    x = normal(rng, (1, 2, 4))
    np.testing.assert_array_equal(run(graph, x)[0], np.maximum(x, 0))


# rounding ---------------------------------------------------------------------------------------------


def chain(dtype: DType, middle: DType, virtual: bool = True) -> CudnnGraph:
    """exp, then tanh: x and y of `dtype`, the value between them of `middle`."""
    dims = (1, 1, 64)
    return CudnnGraph(
        (tensor(1, dims, dtype), tensor(2, dims, middle, virtual=virtual), tensor(3, dims, dtype)),
        (call("pointwise", [1], 2, "exp"), call("pointwise", [2], 3, "tanh")),
    )


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_two_chained_ops_round_once(dtype: DType, rng: np.random.Generator) -> None:
    x = normal(rng, (1, 1, 64), dtype)
    once = np.tanh(np.exp(x.astype(np.float32))).astype(dtype.numpy)
    twice = np.tanh(np.exp(x.astype(np.float32)).astype(dtype.numpy).astype(np.float32)).astype(dtype.numpy)
    assert (once != twice).any()
    np.testing.assert_array_equal(run(chain(dtype, F32), x)[0], once)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_virtual_tensor_declared_in_sixteen_bits_is_rounded(dtype: DType, rng: np.random.Generator) -> None:
    x = normal(rng, (1, 1, 64), dtype)
    middle = np.exp(x.astype(np.float32)).astype(dtype.numpy)
    twice = np.tanh(middle.astype(np.float32)).astype(dtype.numpy)
    np.testing.assert_array_equal(run(chain(dtype, dtype), x)[0], twice)


def test_a_stored_tensor_is_rounded_in_memory_but_not_in_its_register(rng: np.random.Generator) -> None:
    """Within one kernel the next call reads the register, not the stored value."""
    x = normal(rng, (1, 1, 64), F16)
    middle, y = run(chain(F16, F16, virtual=False), x)
    wide = np.exp(x.astype(np.float32))
    np.testing.assert_array_equal(middle, wide.astype(np.float16))
    np.testing.assert_array_equal(y, np.tanh(wide).astype(np.float16))


def test_overflow_of_sixteen_bits_is_infinite_and_silent() -> None:
    x = np.full((1, 1, 64), 12.0, np.float16)
    graph = CudnnGraph((tensor(1, (1, 1, 64), F16), tensor(2, (1, 1, 64), F16)), (call("pointwise", [1], 2, "exp"),))
    assert np.isinf(run(graph, x)[0]).all()


# calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [packed, nhwc])
def test_convolution(layout: Any, rng: np.random.Generator) -> None:
    """Groups from the dims, asymmetric pads, strides and dilations; against a sum written out."""
    n, c, k, h, w, r, s = 2, 4, 6, 6, 5, 3, 2
    attributes: dict[str, Attribute] = {
        "pre_padding": (1, 0),
        "post_padding": (2, 1),
        "stride": (2, 1),
        "dilation": (1, 2),
    }
    p, q = (h + 3 - 2 - 1) // 2 + 1, (w + 1 - 2 - 1) // 1 + 1
    x, f = normal(rng, (n, c, h, w)), normal(rng, (k, c // 2, r, s))
    graph = CudnnGraph(
        (
            tensor(1, x.shape, strides=layout(x.shape)),
            tensor(2, f.shape, strides=layout(f.shape)),
            tensor(3, (n, k, p, q), strides=layout((n, k, p, q))),
        ),
        (call("conv_fprop", [1, 2], 3, **attributes),),
    )
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 2), (0, 1)))
    want = np.zeros((n, k, p, q))
    for out in range(k):
        group = slice(2 * (out // 3), 2 * (out // 3) + 2)
        for i in range(p):
            for j in range(q):
                patch = padded[:, group, 2 * i : 2 * i + r, j : j + 2 * s - 1 : 2]
                want[:, out, i, j] = (patch * f[out]).sum(axis=(1, 2, 3))
    assert_close(run(graph, x, f)[0], want, 1e-6)


def test_transposed_convolution_is_the_gradient(rng: np.random.Generator) -> None:
    """<conv(x, f), dy> = <x, dgrad(dy, f)>, with a size the strides alone do not tell."""
    attributes: dict[str, Attribute] = {
        "pre_padding": (1, 0),
        "post_padding": (0, 1),
        "stride": (2, 3),
        "dilation": (1, 1),
    }
    x, f = normal(rng, (2, 4, 6, 7)), normal(rng, (6, 2, 2, 3))
    dims = (2, 6, (6 + 1 - 2) // 2 + 1, (7 + 1 - 3) // 3 + 1)
    dy = normal(rng, dims)
    forward = CudnnGraph(
        (tensor(1, x.shape), tensor(2, f.shape), tensor(3, dims)), (call("conv_fprop", [1, 2], 3, **attributes),)
    )
    backward = CudnnGraph(
        (tensor(1, dims), tensor(2, f.shape), tensor(3, x.shape)), (call("conv_dgrad", [1, 2], 3, **attributes),)
    )
    left, right = (run(forward, x, f)[0] * dy).sum(), (x * run(backward, dy, f)[0]).sum()
    assert left == pytest.approx(right, rel=1e-4)


def test_matmul_broadcasts_its_batch(rng: np.random.Generator) -> None:
    a, b = normal(rng, (3, 2, 4)), normal(rng, (1, 4, 5))
    graph = CudnnGraph(
        (tensor(1, a.shape), tensor(2, b.shape, strides=(20, 1, 4)), tensor(3, (3, 2, 5))), (call("matmul", [1, 2], 3),)
    )
    assert_close(run(graph, a, b)[0], a.astype(np.float64) @ b, 1e-6)


@pytest.mark.parametrize(
    ("clips", "low", "high"),
    [
        ({}, 0.0, np.inf),
        ({"lower_clip": 0.0, "upper_clip": 1.0}, 0.0, 1.0),
        ({"lower_clip": -0.5, "upper_clip": 0.5}, -0.5, 0.5),
        ({"upper_clip": 0.25}, 0.0, 0.25),
        ({"lower_clip": -1.0}, -1.0, np.inf),
    ],
)
def test_clipped_relu(clips: dict[str, Attribute], low: float, high: float, rng: np.random.Generator) -> None:
    x = normal(rng, (1, 2, 32))
    graph = CudnnGraph((tensor(1, x.shape), tensor(2, x.shape)), (call("pointwise", [1], 2, "relu", **clips),))
    np.testing.assert_array_equal(run(graph, x)[0], np.clip(x, low, high).astype(np.float32))


def test_leaky_relu_takes_its_slope(rng: np.random.Generator) -> None:
    x = normal(rng, (1, 2, 32))
    graph = CudnnGraph(
        (tensor(1, x.shape), tensor(2, x.shape)), (call("pointwise", [1], 2, "leaky_relu", negative_slope=0.3),)
    )
    assert_close(run(graph, x)[0], np.where(x > 0, x, 0.3 * x), 1e-6)


@pytest.mark.parametrize("mode", ["gelu_approx_tanh", "gelu_approx_tanh_backward"])
def test_modes_with_names_of_cudnn_alone(mode: str, rng: np.random.Generator) -> None:
    x, dy = normal(rng, (1, 2, 32)), normal(rng, (1, 2, 32))
    backward = mode.endswith("backward")
    inputs = [dy, x] if backward else [x]
    tensors = tuple(tensor(i + 1, x.shape) for i in range(len(inputs) + 1))
    graph = CudnnGraph(tensors, (call("pointwise", range(1, len(tensors)), len(tensors), mode),))

    def gelu(v: Array) -> Array:
        return 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3)))

    wide = x.astype(np.float64)
    want = dy * (gelu(wide + 1e-6) - gelu(wide - 1e-6)) / 2e-6 if backward else gelu(wide)
    assert_close(run(graph, *inputs)[0], want, 1e-6)


def test_operands_broadcast_and_scalars_are_read(rng: np.random.Generator) -> None:
    x, row = normal(rng, (1, 3, 4)), normal(rng, (1, 3, 1))
    graph = CudnnGraph(
        (
            tensor(1, x.shape),
            tensor(2, row.shape),
            scalar(3, 2.5),
            tensor(4, x.shape, virtual=True),
            tensor(5, x.shape),
        ),
        (call("pointwise", [1, 2], 4, "add"), call("pointwise", [4, 3], 5, "mul")),
    )
    np.testing.assert_array_equal(run(graph, x, row)[0], (x + row) * np.float32(2.5))


def test_select(rng: np.random.Generator) -> None:
    x, y = normal(rng, (1, 3, 4)), normal(rng, (1, 3, 4))
    graph = CudnnGraph(
        (
            tensor(1, x.shape),
            tensor(2, x.shape),
            tensor(3, x.shape, DType.BOOL, virtual=True),
            tensor(4, x.shape),
        ),
        (call("pointwise", [1, 2], 3, "cmp_gt"), call("pointwise", [1, 2, 3], 4, "binary_select")),
    )
    np.testing.assert_array_equal(run(graph, x, y)[0], np.maximum(x, y))


def test_gen_index() -> None:
    graph = CudnnGraph((tensor(1, (1, 3, 4)), tensor(2, (1, 3, 4))), (call("pointwise", [1], 2, "gen_index", axis=1),))
    np.testing.assert_array_equal(run(graph, np.ones((1, 3, 4)))[0][0, :, 0], [0, 1, 2])


@pytest.mark.parametrize("mode", ["add", "mul", "min", "max", "amax"])
@pytest.mark.parametrize("dims", [(1, 3, 1), (2, 1, 1), (1, 1, 1), (2, 3, 4)])
def test_reductions(mode: str, dims: tuple[int, ...], rng: np.random.Generator) -> None:
    x = normal(rng, (2, 3, 4))
    graph = CudnnGraph((tensor(1, x.shape), tensor(2, dims)), (call("reduction", [1], 2, mode),))
    axes = tuple(i for i in range(3) if dims[i] == 1)
    if mode == "amax":
        want = np.abs(x).max(axis=axes, keepdims=True)
    else:
        want = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}[mode].reduce(
            x.astype(np.float64), axis=axes, keepdims=True
        )
    assert_close(run(graph, x)[0], want, 1e-6)


@pytest.mark.parametrize("mode", ["add", "mul", "min", "max", "amax"])
def test_reductions_of_sixteen_bits_accumulate_in_f32(mode: str, rng: np.random.Generator) -> None:
    x = np.abs(normal(rng, (1, 1, 4096), F16)) + np.float16(0.5)
    graph = CudnnGraph((tensor(1, x.shape, F16), tensor(2, (1, 1, 1), F32)), (call("reduction", [1], 2, mode),))
    (got,) = run(graph, x)
    if mode == "add":
        assert_close(got, x.astype(np.float64).sum(keepdims=True), 1e-6)
    assert got.dtype == np.float32


def _standard(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    centred = x - x.mean(axis=axes, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=axes, keepdims=True) + epsilon)


def _norm(op: str, x: Array, parameters: Sequence[Array], epsilon: float) -> Array:
    tensors = [tensor(1, x.shape), *(tensor(i + 2, p.shape) for i, p in enumerate(parameters))]
    last = len(tensors) + 1
    tensors += [scalar(last, epsilon, x.ndim), tensor(last + 1, x.shape)]
    graph = CudnnGraph(tuple(tensors), (call(op, range(1, last + 1), last + 1),))
    return run(graph, x, *parameters)[0]


@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_layernorm(epsilon: float, rng: np.random.Generator) -> None:
    x = normal(rng, (4, 6, 5, 1)) * 2 + 1
    scale, bias = normal(rng, (1, 6, 5, 1)), normal(rng, (1, 6, 5, 1))
    want = _standard(x.astype(np.float64), (1, 2, 3), epsilon) * scale + bias
    assert_close(_norm("layernorm", x, [scale, bias], epsilon), want, 1e-6)


@pytest.mark.parametrize("biased", [False, True])
def test_rmsnorm(biased: bool, rng: np.random.Generator) -> None:
    x = normal(rng, (4, 6, 1, 1)) * 2 + 1
    parameters = [normal(rng, (1, 6, 1, 1)) for _ in range(1 + biased)]
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 0.1) * parameters[0]
    want = want + parameters[1] if biased else want
    assert_close(_norm("rmsnorm", x, parameters, 0.1), want, 1e-6)


def test_instancenorm(rng: np.random.Generator) -> None:
    x = normal(rng, (2, 3, 4, 5)) * 2 + 1
    scale, bias = normal(rng, (1, 3, 1, 1)), normal(rng, (1, 3, 1, 1))
    want = _standard(x.astype(np.float64), (2, 3), 1e-3) * scale + bias
    assert_close(_norm("instancenorm", x, [scale, bias], 1e-3), want, 1e-6)


def test_batchnorm_updates_running_statistics(rng: np.random.Generator) -> None:
    """The variance that is saved is that of the batch, and the running one that of a sample."""
    shape, channels = (4, 3, 5, 2), (1, 3, 1, 1)
    x, scale, bias, mean, variance = (normal(rng, s) for s in (shape, *[channels] * 4))
    tensors = [tensor(1, shape, strides=nhwc(shape)), *(tensor(uid, channels) for uid in range(2, 6))]
    tensors += [
        scalar(6, 0.1, 4),
        scalar(7, 0.25, 4),
        tensor(8, shape),
        *(tensor(uid, channels) for uid in range(9, 13)),
    ]
    graph = CudnnGraph(tuple(tensors), (CudnnCall("batchnorm", tuple(range(1, 8)), tuple(range(8, 13))),))
    y, *statistics = run(graph, x, scale, bias, mean, variance)
    wide, axes = x.astype(np.float64), (0, 2, 3)
    own, spread = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)
    assert_close(y, (wide - own) / np.sqrt(spread + 0.1) * scale + bias, 1e-6)
    sample = wide.var(axes, keepdims=True, ddof=1)
    wanted = (own, 1 / np.sqrt(spread + 0.1), 0.75 * mean + 0.25 * own, 0.75 * variance + 0.25 * sample)
    for got, want in zip(statistics, wanted, strict=True):
        assert_close(got, want, 1e-6)


def test_batchnorm_backward_is_the_slope_of_batchnorm(rng: np.random.Generator) -> None:
    shape, channels = (4, 2, 3, 2), (1, 2, 1, 1)
    dy, x, scale = (normal(rng, s) for s in (shape, shape, channels))
    axes = (0, 2, 3)
    wide = x.astype(np.float64)
    mean, inverse = wide.mean(axes, keepdims=True), 1 / np.sqrt(wide.var(axes, keepdims=True) + 0.1)
    tensors = [tensor(1, shape), tensor(2, shape, strides=nhwc(shape)), *(tensor(uid, channels) for uid in range(3, 6))]
    tensors += [tensor(6, shape), tensor(7, channels), tensor(8, channels)]
    graph = CudnnGraph(tuple(tensors), (CudnnCall("batchnorm_backward", tuple(range(1, 6)), (6, 7, 8)),))
    dx, dscale, dbias = run(graph, dy, x, scale, mean, inverse)

    def loss(at: Array, by: Array) -> Any:
        spread = at.var(axes, keepdims=True) + 0.1
        return (dy * ((at - at.mean(axes, keepdims=True)) / np.sqrt(spread) * by)).sum()

    for place in ((0, 0, 0, 0), (3, 1, 2, 1), (1, 1, 0, 1)):
        step = np.zeros(shape)
        step[place] = 1e-5
        slope = (loss(wide + step, scale) - loss(wide - step, scale)) / 2e-5
        assert_close(dx[place], slope, 1e-4)
    assert_close(dscale, (dy * (wide - mean) * inverse).sum(axes, keepdims=True), 1e-5)
    assert_close(dbias, dy.astype(np.float64).sum(axes, keepdims=True), 1e-5)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=4))
def test_views_stay_inside_their_extent(dims: list[tuple[int, int]]) -> None:
    """The last element is the last of the buffer, and one fewer is refused."""
    t = tensor(1, [d for d, _ in dims], strides=[s for _, s in dims])
    buffer = np.arange(extent(t), dtype=np.float32)
    last = view(t, buffer)[tuple(d - 1 for d, _ in dims)]
    assert last == buffer[-1]
    with pytest.raises(ExecutionError):
        view(t, buffer[:-1])


def test_bf16_is_that_of_ml_dtypes() -> None:
    t = tensor(1, (1, 1, 2), BF16)
    assert view(t, np.zeros(2, ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16


def test_attention_gives_zeros_to_a_query_without_keys() -> None:
    """As cuDNN does on an H200; the other queries see what the mask shows them."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 3, 8)).astype(np.float16) for _ in range(3))
    bias = np.zeros((1, 1, 3, 3), np.float16)
    bias[..., 1, :] = -np.inf
    bias[..., 2, 1:] = -np.inf
    heads, mask = (1, 2, 3, 8), (1, 1, 3, 3)
    tensors = (*(tensor(uid, heads, F16) for uid in (1, 2, 3)), tensor(4, mask, F16), tensor(5, heads, F16))
    attributes: dict[str, Any] = {"attn_scale": 0.5, "use_causal_mask": False}
    (y,) = run(CudnnGraph(tensors, (call("sdpa", (1, 2, 3, 4), 5, **attributes),)), q, k, v, bias)
    assert not y[:, :, 1].any()
    assert_close(y[:, :, 2], v[:, :, 0], 1e-3)
    assert np.isfinite(y).all() and y[:, :, 0].any()


def test_gradients_of_attention_leave_out_a_query_without_keys() -> None:
    """As cuDNN does on an H200: its gradient is zero, and it adds nothing to those of keys and values."""
    rng = np.random.default_rng(0)
    dy, q, k, v = (rng.standard_normal((1, 2, 3, 8)).astype(np.float16) for _ in range(4))
    bias = np.zeros((1, 1, 3, 3), np.float16)
    bias[..., 1, :] = -np.inf
    heads, mask, one = (1, 2, 3, 8), (1, 1, 3, 3), (1, 2, 3, 1)
    attributes = {"attn_scale": 0.5, "use_causal_mask": False}
    parts = (*(tensor(uid, heads, F16) for uid in (1, 2, 3)), tensor(4, mask, F16))
    train = CudnnCall("sdpa_train", (1, 2, 3, 4), (5, 6), "", tuple(attributes.items()))
    y, sums = run(CudnnGraph((*parts, tensor(5, heads, F16), tensor(6, one)), (train,)), q, k, v, bias)
    assert not y[:, :, 1].any() and np.isneginf(sums[:, :, 1]).all() and np.isfinite(sums[:, :, [0, 2]]).all()
    given = [tensor(uid, heads, F16) for uid in (1, 2, 3, 4, 5)] + [tensor(6, one), tensor(7, mask, F16)]
    made = [tensor(uid, heads, F16) for uid in (8, 9, 10)]
    backward = CudnnCall("sdpa_backward", (1, 2, 3, 4, 5, 6, 7), (8, 9, 10), "", tuple(attributes.items()))

    def gradients(loss: Array) -> list[Array]:
        return run(CudnnGraph((*given, *made), (backward,)), loss, q, k, v, y, sums, bias)

    dq, dk, dv = gradients(dy)
    assert not dq[:, :, 1].any() and dq[:, :, 0].any()
    assert np.isfinite(dk).all() and np.isfinite(dv).all()
    others = dy.copy()
    others[:, :, 1] = 100.0
    assert all(np.array_equal(a, b) for a, b in zip((dq, dk, dv), gradients(others), strict=True))


@pytest.mark.parametrize(
    ("mode", "x", "y", "want"),
    [
        ("max", [np.nan, 1.0, 1.0], [2.0, np.nan, 2.0], [2.0, 1.0, 2.0]),
        ("min", [np.nan, 1.0, 1.0], [2.0, np.nan, 2.0], [2.0, 1.0, 1.0]),
        ("div", [6.0, 3e38, np.inf], [2.0, 3e38, -3e38], [3.0, 0.0, np.nan]),
        ("relu_backward", [5.0, 5.0, 5.0], [np.nan, -1.0, 1.0], [5.0, 0.0, 5.0]),
    ],
)
def test_modes_treat_edge_values_as_the_gpu_does(mode: str, x: list[float], y: list[float], want: list[float]) -> None:
    """Measured on an H200: docs/hazards.md."""
    graph = CudnnGraph(
        (tensor(1, (1, 1, 3)), tensor(2, (1, 1, 3)), tensor(3, (1, 1, 3))), (call("pointwise", (1, 2), 3, mode),)
    )
    (got,) = run(graph, np.array([[x]], np.float32), np.array([[y]], np.float32))
    np.testing.assert_array_equal(got.reshape(-1), np.array(want, np.float32))
