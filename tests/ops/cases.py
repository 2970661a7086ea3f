"""Cases of every op, each with an oracle of its own: onnxruntime where ONNX has the op, else a formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import scipy.signal
from ops.onnx_oracle import Array, Oracle, onnx_op, run
from ops.recurrent_cases import ends, onnxruntime_of, shapes, weights
from ops.scan_cases import (
    accumulated,
    average,
    layer,
    moving_average,
    paths,
    running_maximum,
    summed_paths,
    weighted,
)

from fusec.ir import DType, Op
from fusec.ops import (
    AllFinite,
    Attention,
    AttentionBackward,
    AttentionTrain,
    AvgPool,
    BatchNorm,
    BatchNormBackward,
    BatchNormBySums,
    BatchNormTrain,
    Cast,
    ChannelSums,
    Concat,
    Conv,
    ConvTranspose,
    ConvWgrad,
    Cumulate,
    DeformConv,
    Dilate,
    Expand,
    FlippedConv,
    Gather,
    GridSample,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LayerNormBackward,
    LinearScan,
    LocalResponseNorm,
    MatMul,
    MaxPool,
    MaxPoolBackward,
    MaxPoolTrain,
    NonMaxSuppression,
    PackedMatMul,
    Pad,
    RandomBits,
    Recurrent,
    Reduce,
    Relayout,
    Reshape,
    Resize,
    RmsNorm,
    RoiAlign,
    RoiPool,
    Rotary,
    Scatter,
    Slice,
    Softmax,
    Split,
    TopK,
    Transpose,
    pw,
)
from fusec.ops.convolution import windows_along
from fusec.ops.pooling import Pool

Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]


@dataclass(frozen=True)
class Case:
    """An op, shapes of its operands, how to draw them (one draw for all, or one each), and its oracle.

    retyped: makes the op for operands of another precision. Only ops with a body, which has types, need it.
    """

    op: Op
    shapes: tuple[tuple[int, ...], ...]
    oracle: Oracle
    draw: Draw | tuple[Draw, ...]
    rounds: bool = True  # False: the results are bit for bit the oracle's
    retyped: Callable[[DType], Op] | None = None

    def op_of(self, dtype: DType) -> Op:
        """Return the op for floats of this type."""
        return self.op if self.retyped is None or not dtype.is_float else self.retyped(dtype)

    def arrays(self, rng: np.random.Generator) -> list[Array]:
        draws = self.draw if isinstance(self.draw, tuple) else (self.draw,) * len(self.shapes)
        return [draw(rng, shape) for draw, shape in zip(draws, self.shapes, strict=True)]


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Both signs, around three."""
    return (3 * rng.standard_normal(shape)).astype(np.float32)


def positive(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.uniform(0.1, 5.0, shape).astype(np.float32)


def with_infinities(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Often infinite or NaN somewhere."""
    array = normal(rng, shape)
    odd = np.where(rng.random(shape) < 0.5, np.float32(np.nan), np.float32(-np.inf))
    return np.where(rng.random(shape) < 0.05, odd, array)


def unit(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.uniform(-0.95, 0.95, shape).astype(np.float32)


def above_one(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.uniform(1.1, 5.0, shape).astype(np.float32)


def regions(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Corners x1, y1, x2, y2 of regions in and around a small image."""
    first = rng.uniform(-2, 8, (shape[0], 2))
    return np.concatenate([first, first + rng.uniform(0.5, 12, (shape[0], 2))], 1).astype(np.float32)


def narrow(name: str) -> Draw:
    """All codes of an integer type below 8 bits."""
    dtype = DType(name).numpy
    low = int(ml_dtypes.iinfo(dtype).min)
    return lambda rng, shape: rng.integers(low, low + 16, shape).astype(dtype)


def eight_bits(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """All finite numbers of E4M3."""
    codes = rng.integers(0, 127, shape) | 128 * rng.integers(0, 2, shape)
    return codes.astype(np.uint8).view(DType.F8E4M3.numpy)


def wide_product(a: Array, b: Array) -> list[Array]:
    """Sums in float64, rounded to fp32 once."""
    return [(a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)]


def by_blocks(block: int) -> Oracle:
    """A product with weights in blocks, by the sums of each block."""

    def product(x: Array, codes: Array, scales: Array, zeros: Array | None = None) -> list[Array]:
        total = np.zeros((*x.shape[:-1], len(codes)))
        for number, start in enumerate(range(0, x.shape[-1], block)):
            part = codes[:, start : start + block].astype(np.float64)
            if zeros is not None:
                part -= zeros[:, number : number + 1].astype(np.float64)
            total += np.einsum("...k,nk->...n", x[..., start : start + block], part) * scales[:, number]
        return [total.astype(np.float32)]

    return product


def coarse(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Halves, with many ties between operands."""
    return (rng.integers(-6, 7, shape) / 2).astype(np.float32)


def special(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.choice(np.array([np.nan, np.inf, -np.inf, 0.0, 1.5], np.float32), shape)


def bools(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.random(shape) < 0.5


def integers(low: int, high: int, dtype: Any = np.int64) -> Draw:
    return lambda rng, shape: rng.integers(low, high, shape).astype(dtype)


def formula(compute: Callable[..., Array]) -> Oracle:
    """An oracle in float64, for what ONNX lacks."""
    return lambda *arrays: [compute(*(a.astype(np.float64) if a.dtype.kind == "f" else a for a in arrays))]


def slope(name: str, **attributes: float) -> Oracle:
    """dy times the central difference of the forward op, in float64."""
    forward, h = pw(name, **attributes), 1e-6

    def compute(dy: Array, x: Array) -> Array:
        (high,), (low,) = forward.reference(np, x + h), forward.reference(np, x - h)
        return dy * (high - low) / (2 * h)

    return formula(compute)


ONE, TWO = ((2, 3, 5),), ((2, 3, 5), (3, 1))


def unary(oracle: Oracle, draw: Draw = normal, *, rounds: bool = True, **attributes: float) -> Callable[[str], Case]:
    return lambda name: Case(pw(name, **attributes), ONE, oracle, draw, rounds)


def binary(
    oracle: Oracle, draw: Draw | tuple[Draw, ...] = normal, *, rounds: bool = True, **attributes: float
) -> Callable[[str], Case]:
    return lambda name: Case(pw(name, **attributes), TWO, oracle, draw, rounds)


def clip_oracle(low: float, high: float) -> Oracle:
    return lambda x: run("Clip", [x, np.array(low, x.dtype), np.array(high, x.dtype)])


POINTWISE: dict[str, Sequence[Callable[[str], Case]]] = {
    "abs": [unary(onnx_op("Abs"), rounds=False), unary(onnx_op("Abs"), integers(-9, 9), rounds=False)],
    "ceil": [unary(onnx_op("Ceil"), rounds=False)],
    "cos": [unary(onnx_op("Cos"))],
    "erf": [unary(onnx_op("Erf"))],
    "exp": [unary(onnx_op("Exp"))],
    "floor": [unary(onnx_op("Floor"), rounds=False)],
    "identity": [unary(onnx_op("Identity"), rounds=False), unary(onnx_op("Identity"), bools, rounds=False)],
    "log": [unary(onnx_op("Log"), positive)],
    "neg": [unary(onnx_op("Neg"), rounds=False), unary(onnx_op("Neg"), integers(-9, 9, np.int8), rounds=False)],
    "reciprocal": [unary(onnx_op("Reciprocal"), positive)],
    "relu": [unary(onnx_op("Relu"), rounds=False), unary(onnx_op("Relu"), integers(-9, 9, np.int32), rounds=False)],
    "rsqrt": [unary(formula(lambda x: x**-0.5), positive)],
    "sigmoid": [unary(onnx_op("Sigmoid"))],
    "sin": [unary(onnx_op("Sin"))],
    "softplus": [unary(onnx_op("Softplus"))],
    "sqrt": [unary(onnx_op("Sqrt"), positive)],
    "tan": [unary(onnx_op("Tan"), unit)],
    "tanh": [unary(onnx_op("Tanh"))],
    "elu": [unary(onnx_op("Elu", alpha=0.7), alpha=0.7)],
    "gelu": [unary(onnx_op("Gelu"))],
    "gelu_tanh": [unary(onnx_op("Gelu", approximate="tanh"))],
    "swish": [
        unary(formula(lambda x: x / (1 + np.exp(-x)))),
        unary(formula(lambda x: x / (1 + np.exp(-2 * x))), beta=2),
    ],
    "leaky_relu": [unary(onnx_op("LeakyRelu", alpha=0.2), alpha=0.2)],
    "logical_not": [unary(onnx_op("Not"), bools, rounds=False)],
    "gen_index": [
        unary(formula(lambda x: np.indices(x.shape)[1].astype(x.dtype)), axis=1, rounds=False),
        unary(formula(lambda x: np.indices(x.shape)[2]), integers(0, 9, np.int32), axis=2, rounds=False),
    ],
    "clip": [
        unary(clip_oracle(-1.25, 2.5), min=-1.25, max=2.5, rounds=False),
        unary(clip_oracle(2.0, -1.0), min=2.0, max=-1.0, rounds=False),  # bounds crossed: the upper one wins
        unary(clip_oracle(-3, 5), integers(-9, 9), min=-3.5, max=5.5, rounds=False),
        unary(clip_oracle(-3, 127), integers(-128, 128, np.int8), min=-3.0, max=1e9, rounds=False),
    ],
    "hard_sigmoid": [unary(onnx_op("HardSigmoid", alpha=0.3, beta=0.4), alpha=0.3, beta=0.4)],
    "hard_swish": [unary(onnx_op("HardSwish"))],
    "selu": [unary(onnx_op("Selu")), unary(onnx_op("Selu", alpha=1.5, gamma=1.1), alpha=1.5, gamma=1.1)],
    "celu": [unary(onnx_op("Celu", alpha=1.7), alpha=1.7)],
    "mish": [unary(onnx_op("Mish"))],
    "softsign": [unary(onnx_op("Softsign"))],
    "thresholded_relu": [unary(onnx_op("ThresholdedRelu", alpha=0.8), alpha=0.8, rounds=False)],
    "sign": [unary(onnx_op("Sign"), rounds=False), unary(onnx_op("Sign"), integers(-2, 3), rounds=False)],
    "round": [unary(onnx_op("Round"), coarse, rounds=False)],
    "acos": [unary(onnx_op("Acos"), unit)],
    "asin": [unary(onnx_op("Asin"), unit)],
    "atan": [unary(onnx_op("Atan"))],
    "cosh": [unary(onnx_op("Cosh"))],
    "sinh": [unary(onnx_op("Sinh"))],
    "acosh": [unary(onnx_op("Acosh"), above_one)],
    "asinh": [unary(onnx_op("Asinh"))],
    "atanh": [unary(onnx_op("Atanh"), unit)],
    "is_nan": [unary(onnx_op("IsNaN"), special, rounds=False)],
    "is_inf": [unary(onnx_op("IsInf"), special, rounds=False)],
    "add": [binary(onnx_op("Add")), binary(onnx_op("Add"), integers(-9, 9))],
    "add_square": [binary(formula(lambda x, y: x + y * y))],
    "sub": [binary(onnx_op("Sub")), binary(onnx_op("Sub"), integers(-9, 9, np.int32))],
    "mul": [binary(onnx_op("Mul")), binary(onnx_op("Mul"), integers(-9, 9))],
    "div": [
        binary(onnx_op("Div"), (normal, positive)),
        binary(onnx_op("Div"), (integers(-99, 99), integers(1, 9))),
        binary(onnx_op("Div"), (integers(-99, 99, np.int32), integers(-9, 0, np.int32))),
    ],
    "max": [binary(onnx_op("Max"), coarse, rounds=False), binary(onnx_op("Max"), integers(-9, 9), rounds=False)],
    "min": [binary(onnx_op("Min"), coarse, rounds=False), binary(onnx_op("Min"), integers(-9, 9), rounds=False)],
    "mod": [
        binary(onnx_op("Mod", fmod=1), (normal, positive)),
        binary(onnx_op("Mod", fmod=1), (integers(-99, 99), integers(-9, 0))),
    ],
    "pow": [
        binary(onnx_op("Pow"), (positive, unit)),
        binary(onnx_op("Pow"), (integers(-9, 9), integers(0, 5))),
        binary(formula(lambda x, y: np.trunc(x.astype(float) ** y)), (integers(1, 4), integers(-3, 3))),
        binary(
            formula(lambda x, y: np.trunc(x.astype(float) ** y)), (integers(-3, 0, np.int32), integers(-3, 3, np.int32))
        ),
    ],
    "cmp_eq": [binary(onnx_op("Equal"), coarse, rounds=False)],
    "cmp_neq": [binary(formula(lambda x, y: ~np.equal(x, y)), coarse, rounds=False)],
    "cmp_gt": [binary(onnx_op("Greater"), coarse, rounds=False)],
    "cmp_ge": [binary(onnx_op("GreaterOrEqual"), coarse, rounds=False)],
    "cmp_lt": [binary(onnx_op("Less"), coarse, rounds=False)],
    "cmp_le": [binary(onnx_op("LessOrEqual"), coarse, rounds=False), binary(onnx_op("LessOrEqual"), integers(0, 4))],
    "logical_and": [binary(onnx_op("And"), bools, rounds=False)],
    "logical_or": [binary(onnx_op("Or"), bools, rounds=False)],
    "logical_xor": [binary(onnx_op("Xor"), bools, rounds=False)],
    "floor_mod": [
        binary(formula(lambda x, y: x - y * np.floor(x / y)), (normal, positive)),
        binary(onnx_op("Mod"), (integers(-99, 99), integers(-9, 0))),
    ],
    "bitwise_and": [binary(onnx_op("BitwiseAnd"), integers(-99, 99), rounds=False)],
    "bitwise_or": [binary(onnx_op("BitwiseOr"), integers(-99, 99, np.int8), rounds=False)],
    "bitwise_xor": [binary(onnx_op("BitwiseXor"), integers(0, 99, np.uint32), rounds=False)],
    "bitwise_not": [unary(onnx_op("BitwiseNot"), integers(-99, 99, np.int32), rounds=False)],
    "shift_left": [
        binary(onnx_op("BitShift", direction="LEFT"), integers(0, 8, np.uint32), rounds=False),
        binary(
            formula(lambda x, y: (x.astype(int) * 2 ** y.astype(int) % 256).astype(np.uint8)),
            integers(0, 12, np.uint8),
            rounds=False,
        ),
    ],
    "shift_right": [
        binary(
            onnx_op("BitShift", direction="RIGHT"), (integers(0, 200, np.uint8), integers(0, 8, np.uint8)), rounds=False
        ),
        binary(formula(lambda x, y: np.floor(x / 2.0**y).astype(np.uint16)), integers(0, 40, np.uint16), rounds=False),
    ],
    "prelu": [binary(onnx_op("PRelu"))],
    "relu_backward": [binary(slope("relu"))],
    "leaky_relu_backward": [binary(slope("leaky_relu", alpha=0.3), alpha=0.3)],
    "sigmoid_backward": [binary(slope("sigmoid"))],
    "tanh_backward": [binary(slope("tanh"))],
    "elu_backward": [binary(slope("elu", alpha=0.6), alpha=0.6)],
    "gelu_backward": [binary(slope("gelu"))],
    "gelu_tanh_backward": [binary(slope("gelu_tanh"))],
    "softplus_backward": [binary(slope("softplus"))],
    "swish_backward": [binary(slope("swish", beta=1.3), beta=1.3)],
    "where": [
        lambda name: Case(pw(name), ((3, 1), (2, 3, 5), (5,)), onnx_op("Where"), (bools, normal, normal), False),
        lambda name: Case(
            pw(name), ((2, 3), (2, 3), ()), onnx_op("Where"), (bools, integers(0, 9), integers(0, 9)), False
        ),
    ],
}


def conv(shapes: tuple[tuple[int, ...], ...], strides: tuple[int, ...], pads: tuple[int, ...], **other: Any) -> Case:
    dilations, groups = other.get("dilations", (1,) * len(strides)), other.get("groups", 1)
    oracle = onnx_op("Conv", strides=strides, pads=pads, dilations=dilations, group=groups)
    return Case(Conv(strides, pads, dilations, groups), shapes, oracle, normal)


def conv_flipped(
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[int, ...],
    pads: tuple[int, ...],
    dilations: tuple[int, ...],
    groups: int = 1,
) -> Case:
    n = len(strides)

    def oracle(x: Array, w: Array) -> list[Array]:
        padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *zip(pads[:n], pads[n:], strict=True)])
        window = [d * (k - 1) + 1 for d, k in zip(dilations, w.shape[2:], strict=True)]
        spread = np.zeros((*w.shape[:2], *window))
        spread[(..., *(slice(None, None, d) for d in dilations))] = w
        first = np.arange(w.shape[0]) // (w.shape[0] // groups) * w.shape[1]  # channel of each filter
        sums = [
            sum(scipy.signal.convolve(image[c + at], filters[at], "valid", "direct") for at in range(w.shape[1]))
            for image in padded
            for c, filters in zip(first, spread, strict=True)
        ]
        every = np.stack(sums).reshape(*x.shape[:1], *w.shape[:1], *np.shape(sums[0]))
        return [every[(..., *(slice(None, None, s) for s in strides))].astype(np.result_type(x))]

    return Case(FlippedConv(strides, pads, dilations, groups), shapes, oracle, normal)


def conv_flipped_integer(shapes: tuple[tuple[int, ...], ...]) -> Case:
    def oracle(x: Array, w: Array) -> list[Array]:
        return run("ConvInteger", [x, np.ascontiguousarray(w[:, :, ::-1, ::-1])])

    op = FlippedConv((1, 1), (0, 0, 0, 0), (1, 1))
    return Case(op, shapes, oracle, integers(-128, 128, np.int8), False)


def deform_conv(op: DeformConv, image: tuple[int, ...], weight: tuple[int, ...], masked: bool) -> Case:
    out = windows_along(image[2:], weight[2:], op.strides, op.pads, op.dilations)
    moved = op.offset_groups * weight[2] * weight[3]
    shapes = (image, weight, (image[0], 2 * moved, *out), *([(image[0], moved, *out)] if masked else []))
    windows = {"strides": op.strides, "pads": op.pads, "dilations": op.dilations}
    attributes: dict[str, Any] = {**windows, "group": op.groups, "offset_group": op.offset_groups}
    oracle = lambda x, w, *others: run("DeformConv", [x, w, others[0], None, *others[1:]], **attributes)  # noqa: E731
    return Case(op, shapes, oracle, normal)


def conv_integer(shapes: tuple[tuple[int, ...], ...], strides: tuple[int, ...], pads: tuple[int, ...]) -> Case:
    oracle = onnx_op("ConvInteger", strides=strides, pads=pads)
    return Case(Conv(strides, pads, (1,) * len(strides), 1), shapes, oracle, integers(-128, 128, np.int8), False)


def conv_transpose(
    shapes: tuple[tuple[int, ...], ...], strides: tuple[int, ...], pads: tuple[int, ...], **other: Any
) -> Case:
    dilations, groups = other.get("dilations", (1,) * len(strides)), other.get("groups", 1)
    extra = other.get("output_padding", (0,) * len(strides))
    oracle = onnx_op(
        "ConvTranspose", strides=strides, pads=pads, dilations=dilations, group=groups, output_padding=extra
    )
    return Case(ConvTranspose(strides, pads, dilations, extra, groups), shapes, oracle, normal)


def reduce(kind: str, oracle: str, axes: tuple[int, ...], keepdims: bool, draw: Draw, *, rounds: bool = True) -> Case:
    def compute(x: Array) -> list[Array]:
        # ONNX reads an empty list of axes as all of them, unless an attribute says otherwise
        return run(oracle, [x, np.array(axes, np.int64)], keepdims=int(keepdims), noop_with_empty_axes=1)

    return Case(Reduce(kind, axes, keepdims), ((2, 3, 4),), compute, draw, rounds)


REDUCTIONS = {
    "sum": "ReduceSum",
    "mean": "ReduceMean",
    "max": "ReduceMax",
    "min": "ReduceMin",
    "prod": "ReduceProd",
    "l1": "ReduceL1",
    "l2": "ReduceL2",
    "sum_square": "ReduceSumSquare",
    "log_sum": "ReduceLogSum",
    "log_sum_exp": "ReduceLogSumExp",
}
INTEGER_REDUCTIONS = ("sum", "max", "min", "prod", "l1", "sum_square")


def rms_norm(x: Array, scale: Array) -> Array:
    return x / np.sqrt(np.square(x).mean(axis=(1, 2), keepdims=True) + 1e-3) * scale


def attended(scale: float, causal: bool = False) -> Oracle:
    """Attention head by head, and query by query."""

    def compute(q: Array, k: Array, v: Array, *bias: Array) -> Array:
        shared = q.shape[1] // k.shape[1]
        result = np.zeros((*q.shape[:3], v.shape[3]))
        added = np.zeros((*q.shape[:3], k.shape[2])) + (bias[0] if bias else 0.0)
        for b, h, s in np.ndindex(*q.shape[:3]):
            seen = s + 1 if causal else k.shape[2]
            scores = k[b, h // shared, :seen] @ q[b, h, s] * scale + added[b, h, s, :seen]
            weights = np.exp(scores - scores.max())
            result[b, h, s] = weights / weights.sum() @ v[b, h // shared, :seen]
        return result

    return formula(compute)


def attended_with_sums(scale: float, causal: bool) -> Oracle:
    """Attention, and the logarithm of each row's sum, query by query."""

    def compute(q: Array, k: Array, v: Array, *bias: Array) -> list[Array]:
        shared = q.shape[1] // k.shape[1]
        sums = np.zeros((*q.shape[:3], 1))
        added = np.zeros((*q.shape[:3], k.shape[2])) + (bias[0] if bias else 0.0)
        for b, h, s in np.ndindex(*q.shape[:3]):
            seen = s + 1 if causal else k.shape[2]
            sums[b, h, s] = np.log(np.exp(k[b, h // shared, :seen] @ q[b, h, s] * scale + added[b, h, s, :seen]).sum())
        return [*attended(scale, causal)(q, k, v, *bias), sums]

    return compute


def attention_gradient(scale: float, causal: bool) -> Oracle:
    """Compute gradients query by query from the given result and sums."""

    def compute(dy: Array, q: Array, k: Array, v: Array, y: Array, sums: Array) -> list[Array]:
        shared = q.shape[1] // k.shape[1]
        dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
        for b, h, s in np.ndindex(*q.shape[:3]):
            g, along = h // shared, dy[b, h, s] @ y[b, h, s]
            for t in range(s + 1 if causal else k.shape[2]):
                weight = np.exp(q[b, h, s] @ k[b, g, t] * scale - sums[b, h, s, 0])
                slope = weight * (dy[b, h, s] @ v[b, g, t] - along) * scale
                dq[b, h, s] += slope * k[b, g, t]
                dk[b, g, t] += slope * q[b, h, s]
                dv[b, g, t] += weight * dy[b, h, s]
        return [dq, dk, dv]

    return compute


def large(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.uniform(1.0, 3.0, shape).astype(np.float32)


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate each pair of features that are half a row apart by its angle."""
    result = np.zeros_like(x)
    half = x.shape[-1] // 2
    cos, sin = np.broadcast_to(cos, x.shape), np.broadcast_to(sin, x.shape)
    for i in range(half):
        a, b = x[..., i], x[..., i + half]
        result[..., i] = a * cos[..., i] - b * sin[..., i]
        result[..., i + half] = b * cos[..., i + half] + a * sin[..., i + half]
    return result


def suppression(op: NonMaxSuppression, images: int, classes: int, boxes: int, draw: Draw) -> Case:
    """A non-maximum suppression; onnxruntime gives no rows after those of boxes."""

    def oracle(x: Array, scores: Array) -> list[Array]:
        limits = [np.array([op.most]), np.array([op.iou], np.float32)]
        limits += [np.array([op.least], np.float32)] if op.least > -np.inf else []
        (found,) = run("NonMaxSuppression", [x, scores, *limits], center_point_box=int(op.centred))
        rows = np.zeros((images * classes * min(op.most, boxes), 3), np.int64)
        rows[: len(found)] = found
        return [rows, np.array(len(found), np.int64)]

    return Case(op, ((images, boxes, 4), (images, classes, boxes)), oracle, draw, False)


def top_k(k: int, axis: int, largest: bool, draw: Draw) -> Case:
    def oracle(x: Array) -> list[Array]:
        return run("TopK", [x, np.array([k])], 2, axis=axis, largest=int(largest))

    return Case(TopK(k, axis, largest), ((3, 5, 4),), oracle, draw, False)


def scatter(reduction: str, indices: Draw, draw: Draw) -> Case:
    def oracle(x: Array, at: Array, updates: Array) -> list[Array]:
        return run("ScatterND", [x, at[:, None], updates], reduction=reduction)

    return Case(Scatter(reduction), ((5, 3), (4,), (4, 3)), oracle, (draw, indices, draw), reduction in ("add", "mul"))


def places(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Four of the five, none twice, some counted from the end."""
    return (rng.permutation(5)[: shape[0]] - rng.choice([0, 5], shape)).astype(np.int64)


def running_product(x: Array) -> Array:
    steps = [x[:, : i + 1].prod(axis=1) for i in range(x.shape[1])]
    return np.stack(steps, axis=1).astype(x.dtype)


def recurrence(axis: int) -> Callable[[Array, Array], Array]:
    """Sum each term times the product of the factors after it."""

    def compute(a: Array, b: Array) -> Array:
        factors, terms = (np.moveaxis(v, axis, 0) for v in (a, b))
        steps = range(len(factors))
        sums = [sum(terms[s] * factors[s + 1 : t + 1].prod(axis=0) for s in steps[: t + 1]) for t in steps]
        return np.moveaxis(np.stack(sums), 0, axis)

    return compute


def tensors(*arrays: Any) -> list[Array]:
    return [np.array(a, np.int64) for a in arrays]


OTHERS: dict[str, Sequence[Case]] = {
    "cast": [
        Case(Cast(DType.I32), ONE, onnx_op("Cast", to=6), normal, False),
        Case(Cast(DType.F64), ONE, onnx_op("Cast", to=11), normal, False),
        Case(Cast(DType.F16), ONE, onnx_op("Cast", to=10), normal, False),
        Case(Cast(DType.BOOL), ONE, onnx_op("Cast", to=9), coarse, False),
        Case(Cast(DType.F32), ONE, onnx_op("Cast", to=1), bools, False),
        Case(Cast(DType.U8), ONE, onnx_op("Cast", to=2), integers(0, 256), False),
    ],
    "conv": [
        conv(((2, 4, 9), (6, 4, 3)), (2,), (1, 0)),
        conv(((2, 4, 9, 7), (6, 2, 3, 2)), (2, 1), (1, 0, 2, 3), dilations=(2, 1), groups=2),
        conv(((1, 6, 5, 5), (6, 1, 3, 3)), (1, 1), (1, 1, 1, 1), groups=6),
        conv(((1, 2, 5, 6, 4), (3, 2, 2, 3, 1)), (1, 2, 1), (0, 1, 0, 1, 1, 2), dilations=(2, 1, 1)),
        conv_integer(((2, 40, 9, 7), (5, 40, 3, 2)), (2, 1), (1, 0, 2, 3)),
    ],
    "conv_flipped": [
        conv_flipped(((2, 4, 9), (6, 4, 3)), (2,), (1, 0), (1,)),
        conv_flipped(((2, 4, 9, 7), (6, 2, 3, 2)), (2, 1), (1, 0, 2, 3), (2, 1), 2),
        conv_flipped(((1, 6, 5, 5), (6, 1, 3, 3)), (1, 1), (1, 1, 1, 1), (1, 1), 6),
        conv_flipped(((1, 2, 5, 6, 4), (3, 2, 2, 3, 2)), (1, 2, 1), (0, 1, 0, 1, 1, 2), (2, 1, 1)),
        conv_flipped_integer(((2, 5, 6, 7), (3, 5, 3, 2))),
    ],
    "conv_transpose": [
        conv_transpose(((2, 4, 5), (4, 3, 3)), (2,), (1, 0), output_padding=(1,)),
        conv_transpose(((2, 4, 5, 4), (4, 3, 3, 2)), (2, 3), (1, 0, 0, 2), groups=2, output_padding=(1, 2)),
        conv_transpose(((1, 3, 4, 4), (3, 2, 2, 3)), (1, 2), (0, 1, 1, 0), dilations=(2, 2)),
        conv_transpose(((1, 2, 3, 3, 2), (2, 2, 2, 3, 2)), (2, 1, 2), (0, 1, 0, 1, 0, 1)),
    ],
    "deform_conv": [
        deform_conv(DeformConv((1, 1), (0,) * 4, (1, 1)), (1, 2, 5, 6), (3, 2, 3, 2), False),
        deform_conv(DeformConv((1, 1), (1,) * 4, (1, 1)), (2, 3, 4, 7), (2, 3, 3, 3), True),
        deform_conv(DeformConv((2, 1), (0, 1, 2, 1), (1, 3), 2, 2), (2, 4, 7, 9), (6, 2, 2, 3), True),
        deform_conv(DeformConv((1, 2), (2, 0, 1, 1), (2, 1), 2, 3), (1, 6, 6, 5), (4, 3, 3, 1), False),
        deform_conv(DeformConv((1, 1), (0,) * 4, (1, 1), 3, 1), (3, 3, 3, 3), (3, 1, 1, 1), True),
    ],
    "matmul": [
        Case(MatMul(), ((3, 4), (4, 5)), onnx_op("MatMul"), normal),
        Case(MatMul(), ((2, 1, 3, 4), (7, 4, 5)), onnx_op("MatMul"), normal),
        Case(MatMul(), ((2, 1, 3, 4), (7, 4, 5)), onnx_op("MatMul"), integers(-(2**62), 2**62)),
        Case(MatMul(), ((2, 1, 3, 300), (7, 300, 5)), onnx_op("MatMulInteger"), integers(-128, 128, np.int8), False),
        Case(MatMul(), ((2, 3, 40), (40, 5)), wide_product, eight_bits, False),
    ],
    "packed_matmul": [
        Case(PackedMatMul(2), ((2, 3, 5), (4, 5), (4, 3)), by_blocks(2), (normal, narrow("i4"), positive)),
        Case(
            PackedMatMul(4),
            ((3, 8), (5, 8), (5, 2), (5, 2)),
            by_blocks(4),
            (normal, narrow("u4"), positive, narrow("u4")),
        ),
        Case(PackedMatMul(9), ((3, 8), (5, 8), (5, 1)), by_blocks(9), (normal, integers(-128, 128, np.int8), positive)),
    ],
    "batch_norm": [
        Case(
            BatchNorm(1e-3),
            ((2, 3, 4, 5), (3,), (3,), (3,), (3,)),
            onnx_op("BatchNormalization", epsilon=1e-3),
            (normal, normal, normal, normal, positive),
        )
    ],
    "instance_norm": [
        Case(InstanceNorm(1e-3), ((2, 3, 4, 5), (3,), (3,)), onnx_op("InstanceNormalization", epsilon=1e-3), normal)
    ],
    "group_norm": [
        Case(
            GroupNorm(2, 1e-3),
            ((2, 6, 4, 5), (6,), (6,)),
            onnx_op("GroupNormalization", epsilon=1e-3, num_groups=2),
            normal,
        )
    ],
    "layer_norm": [
        Case(LayerNorm(-1, 1e-3), ((2, 3, 8), (8,), (8,)), onnx_op("LayerNormalization", epsilon=1e-3), normal),
        Case(LayerNorm(1, 1e-3), ((2, 3, 8), (3, 8)), onnx_op("LayerNormalization", epsilon=1e-3, axis=1), normal),
    ],
    "rms_norm": [Case(RmsNorm(1, 1e-3), ((2, 3, 8), (3, 8)), formula(rms_norm), normal)],
    "lrn": [
        Case(
            LocalResponseNorm(3, 0.1, 0.6, 2.0),
            ((2, 7, 3, 1),),
            onnx_op("LRN", size=3, alpha=0.1, beta=0.6, bias=2.0),
            normal,
        ),
        Case(LocalResponseNorm(5, 0.1), ((2, 3, 2, 2),), onnx_op("LRN", size=5, alpha=0.1), normal),
    ],
    "max_pool": [
        Case(
            MaxPool((3, 2), (2, 1), (1, 0, 1, 1), (1, 2)),
            ((2, 3, 7, 6),),
            onnx_op("MaxPool", kernel_shape=(3, 2), strides=(2, 1), pads=(1, 0, 1, 1), dilations=(1, 2)),
            normal,
            False,
        ),
        Case(
            MaxPool((3,), (2,), (1, 1), (1,), True),
            ((1, 2, 8),),
            onnx_op("MaxPool", kernel_shape=(3,), strides=(2,), pads=(1, 1), ceil_mode=1),
            integers(-100, 100, np.int8),
            False,
        ),
    ],
    "avg_pool": [
        Case(
            AvgPool((3, 2), (2, 1), (1, 0, 1, 1), (1, 1), False, include),
            ((2, 3, 7, 6),),
            onnx_op(
                "AveragePool", kernel_shape=(3, 2), strides=(2, 1), pads=(1, 0, 1, 1), count_include_pad=int(include)
            ),
            normal,
        )
        for include in (False, True)
    ],
    "reduce": [
        *(
            reduce(kind, name, axes, keep, positive if "log" in kind else normal, rounds=kind not in ("max", "min"))
            for kind, name in REDUCTIONS.items()
            for axes, keep in (((0, 2), True), ((1,), False), ((0, 1, 2), False))
        ),
        *(
            reduce(kind, REDUCTIONS[kind], (1, 2), False, integers(-5, 5, np.int32), rounds=False)
            for kind in INTEGER_REDUCTIONS
        ),
        reduce("sum", "ReduceSum", (), True, normal, rounds=False),
    ],
    "attention": [
        Case(Attention(), ((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 6)), attended(1.0), normal),
        Case(Attention(0.25, causal=True), ((1, 2, 4, 8),) * 3, attended(0.25, causal=True), normal),
        Case(Attention(0.5), ((2, 6, 4, 8), (2, 2, 5, 8), (2, 2, 5, 8), (6, 1, 5)), attended(0.5), normal),
        Case(Attention(0.5, guarded=True), ((1, 2, 1, 4),) * 3, attended(0.5), normal),
        Case(Attention(0.5, hides=True), ((1, 2, 3, 4),) * 3 + ((3, 3),), attended(0.5), normal),
    ],
    "rotary": [
        Case(Rotary(), ((2, 3, 4, 6), (4, 6), (1, 1, 4, 6)), formula(rotated), normal),
        Case(Rotary(), ((5, 2), (5, 1), (1,)), formula(rotated), normal),
    ],
    "softmax": [
        Case(Softmax(), ((2, 3, 4),), onnx_op("Softmax"), normal),
        Case(Softmax(1), ((2, 3, 4),), onnx_op("Softmax", axis=1), normal),
        Case(Softmax(0, True), ((2, 3, 4),), onnx_op("LogSoftmax", axis=0), normal),
    ],
    "reshape": [
        Case(Reshape((4, 1, 6)), ((2, 3, 4),), lambda x: run("Reshape", [x, *tensors([4, 1, 6])]), normal, False)
    ],
    "transpose": [Case(Transpose((2, 0, 1)), ((2, 3, 4),), onnx_op("Transpose", perm=(2, 0, 1)), normal, False)],
    "relayout": [Case(Relayout((0, 2, 1)), ((2, 3, 4),), onnx_op("Identity"), normal, False)],
    "expand": [Case(Expand((2, 3, 4)), ((3, 1),), lambda x: run("Expand", [x, *tensors([2, 3, 4])]), normal, False)],
    "concat": [
        Case(Concat(1), ((2, 3), (2, 1), (2, 0)), onnx_op("Concat", axis=1), normal, False),
        Case(Concat(-2), ((2, 3), (4, 3)), onnx_op("Concat", axis=-2), integers(0, 9), False),
    ],
    "split": [
        Case(
            Split(1, (1, 3, 0)),
            ((2, 4, 2),),
            lambda x: run("Split", [x, *tensors([1, 3, 0])], 3, axis=1),
            normal,
            False,
        )
    ],
    "slice": [
        Case(
            Slice((1, 6, 0), (1, 3, 2), (1, -2, 3)),
            ((2, 7, 5),),
            lambda x: run("Slice", [x, *tensors([1, 6, 0], [2, 1, 5], [0, 1, 2], [1, -2, 3])]),
            normal,
            False,
        ),
        Case(
            Slice((4,), (5,), (-1,)),
            ((5,),),
            lambda x: run("Slice", [x, *tensors([4], [-9], [0], [-1])]),
            integers(0, 9),
            False,
        ),
    ],
    "pad": [
        Case(
            Pad((1, 0, 2, 3), mode),
            ((3, 4),),
            lambda x, mode=mode: run("Pad", [x, *tensors([1, 0, 2, 3])], mode=mode),
            normal,
            False,
        )
        for mode in ("constant", "reflect", "edge", "wrap")
    ]
    + [
        Case(
            Pad((1, 2), "constant", 7.0),
            ((3,),),
            lambda x: run("Pad", [x, *tensors([1, 2]), np.array(7, x.dtype)]),
            integers(0, 9),
            False,
        )
    ],
    "gather": [
        Case(Gather(1), ((2, 5, 3), (2, 2)), onnx_op("Gather", axis=1), (normal, integers(-5, 5)), False),
        Case(Gather(-1), ((2, 5), (3,)), onnx_op("Gather", axis=-1), (normal, integers(-5, 5, np.int32)), False),
    ],
    "grid_sample": [
        *(
            Case(
                GridSample(mode, padding, "centres" if corners else "edges"),
                ((2, 3, 4, 5), (2, 6, 7, 2)),
                onnx_op("GridSample", mode=mode, padding_mode=padding, align_corners=corners),
                (normal, lambda rng, shape: rng.uniform(-1.4, 1.4, shape).astype(np.float32)),
            )
            for mode in ("nearest", "linear", "cubic")
            for padding in ("zeros", "border", "reflection")
            for corners in (0, 1)
        ),
        Case(
            GridSample("linear", "zeros", "pixels"),
            ((1, 2, 4, 5), (1, 3, 3, 2)),
            lambda x, grid: run("GridSample", [x, (2 * grid + 1) / np.array([5, 4], np.float32) - 1], mode="linear"),
            (normal, lambda rng, shape: rng.uniform(-1, 5, shape).astype(np.float32)),
        ),
    ],
    "roi_align": [
        Case(
            RoiAlign((3, 2), samples, mode, 0.5, half_pixel),
            ((2, 3, 7, 6), (4, 4), (4,)),
            onnx_op(
                "RoiAlign",
                output_height=3,
                output_width=2,
                sampling_ratio=samples,
                mode=mode,
                spatial_scale=0.5,
                coordinate_transformation_mode="half_pixel" if half_pixel else "output_half_pixel",
            ),
            (normal, regions, integers(0, 2)),
        )
        for mode in ("avg", "max")
        for samples in (1, 2, 0)
        for half_pixel in (True, False)
    ],
    "roi_pool": [
        Case(
            RoiPool(bins, 0.5),
            ((2, 3, 7, 6), (4, 4), (4,)),
            lambda x, rois, images, bins=bins: run(
                "MaxRoiPool",
                [x, np.concatenate([images[:, None].astype(np.float32), rois], 1)],
                pooled_shape=bins,
                spatial_scale=0.5,
            ),
            (normal, regions, integers(0, 2)),
            False,
        )
        for bins in ((3, 2), (1, 7))
    ],
    "dilate": [
        Case(
            Dilate((1, 2, 3), (2, 6, 7)),
            ((2, 3, 3),),
            lambda x: (np.kron(x, np.eye(1, 6, dtype=x.dtype).reshape(1, 2, 3))[..., :7],),
            normal,
        )
    ],
    "resize": [
        Case(
            Resize((1, 2, 5, 9), (1.0, 1.0, 1.25, 1.5), "linear", "half_pixel"),
            ((1, 2, 4, 6),),
            lambda x: run("Resize", [x, None, np.array([1, 1, 1.25, 1.5], np.float32)], mode="linear"),
            normal,
        ),
        Case(
            Resize((1, 2, 8, 3), (1.0, 1.0, 2.0, 0.5), "nearest", "asymmetric", "floor"),
            ((1, 2, 4, 6),),
            lambda x: run(
                "Resize",
                [x, None, np.array([1, 1, 2, 0.5], np.float32)],
                coordinate_transformation_mode="asymmetric",
                nearest_mode="floor",
            ),
            normal,
            False,
        ),
    ],
}


def bits64(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.integers(0, 1 << 63, shape, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def filter_gradient(x: Array, dy: Array, op: ConvWgrad) -> Array:
    """Per group onnxruntime's Conv of channels as images: strides and dilations change places."""
    n, groups = x.ndim - 2, op.groups
    parts: list[Array] = []
    for image, loss in zip(np.split(x, groups, 1), np.split(dy, groups, 1), strict=True):
        attributes: dict[str, Any] = {"strides": op.dilations, "dilations": op.strides, "pads": op.pads}
        (found,) = run("Conv", [image.swapaxes(0, 1), loss.swapaxes(0, 1)], **attributes)
        parts.append(found[(slice(None), slice(None), *(slice(0, k) for k in op.window))].swapaxes(0, 1))
    assert n == len(op.window)
    return np.concatenate(parts)


def pool_gradient(dy: Array, x: Array, op: MaxPoolBackward) -> Array:
    """Each window by itself; of equal elements the first."""
    result = np.zeros(x.shape, np.float64)
    for at in np.ndindex(*dy.shape):
        result[first_maximum(x, at, op)[0]] += dy[at]
    return result.astype(x.dtype)


def first_maximum(x: Array, at: tuple[int, ...], op: Pool) -> tuple[tuple[int, ...], int]:
    """Return where in the image, and at which tap of its window, the first maximum is."""
    best, n, found = -np.inf, x.ndim - 2, None
    for number, tap in enumerate(np.ndindex(*op.window)):
        spot = tuple(
            c * s + t * d - p for c, s, t, d, p in zip(at[2:], op.strides, tap, op.dilations, op.pads[:n], strict=True)
        )
        inside = all(0 <= i < size for i, size in zip(spot, x.shape[2:], strict=True))
        if inside and x[(*at[:2], *spot)] > best:
            best, found = x[(*at[:2], *spot)], ((*at[:2], *spot), number)
    assert found is not None
    return found


def pool_with_places(x: Array, op: MaxPoolTrain) -> list[Array]:
    shape = (*x.shape[:2], *op.counts(x.shape[2:]))
    found = [first_maximum(x, at, op) for at in np.ndindex(*shape)]
    y = np.array([x[spot] for spot, _ in found], x.dtype)
    return [y.reshape(shape), np.array([tap for _, tap in found], np.uint8).reshape(shape)]


def gradient_at_places(dy: Array, places: Array, op: MaxPoolBackward) -> Array:
    result = np.zeros((*dy.shape[:2], *op.image), np.float64)
    for at in np.ndindex(*dy.shape):
        tap = np.unravel_index(places[at], op.window)
        dims = zip(at[2:], op.strides, tap, op.dilations, op.pads, strict=False)
        result[(*at[:2], *(c * s + int(t) * d - p for c, s, t, d, p in dims))] += dy[at]
    return result.astype(dy.dtype)


def inside_taps(op: MaxPoolBackward) -> Draw:
    """Draw places of elements inside the image."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        image = rng.standard_normal((*shape[:2], *op.image))
        pool = MaxPoolTrain(op.window, op.strides, op.pads, op.dilations, op.ceil_mode)
        return pool_with_places(image, pool)[1]

    return draw


def batch_statistics(x: Array, scale: Array, bias: Array, epsilon: float) -> list[Array]:
    """onnxruntime's training mode, whose running statistics are the batch's if the momentum is 0."""
    zero = np.zeros_like(scale)
    attributes = {"training_mode": 1, "momentum": 0.0, "epsilon": epsilon}
    y, mean, variance = run("BatchNormalization", [x, scale, bias, zero, zero], 3, **attributes)
    return [y, mean, 1 / np.sqrt(variance + np.float32(epsilon))]


def channel_sums(x: Array) -> list[Array]:
    channels = [x[:, c].astype(np.float64) for c in range(x.shape[1])]
    return [np.array([np.sum(v**power) for v in channels]) for power in (1, 2)]


def hundreds(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Draw numbers as large as sums of squares, or sums whose means leave no variance."""
    return rng.uniform(200.0, 500.0, shape).astype(np.float32)


def by_sums(x: Array, scale: Array, bias: Array, total: Array, squares: Array, epsilon: float) -> list[Array]:
    """By onnxruntime's inference with the mean and variance that these are."""
    count = x.size // x.shape[1]
    mean = total.astype(np.float64) / count
    variance = np.maximum(squares.astype(np.float64) / count - mean**2, 0.0)
    statistics = [v.astype(np.float32) for v in (mean, variance)]
    (y,) = run("BatchNormalization", [x, scale, bias, *statistics], 1, epsilon=epsilon)
    return [y, mean, 1 / np.sqrt(variance + np.float32(epsilon))]


def batch_norm_gradient(dy: Array, x: Array, scale: Array, mean: Array, inverse: Array, *bias: Array) -> list[Array]:
    """Channel by channel in float64; with a bias through the relu of the norm."""
    dx, dscale, dbias = np.empty(x.shape), np.empty(scale.shape), np.empty(scale.shape)
    for c in range(x.shape[1]):
        loss, normal = dy[:, c].astype(np.float64), (x[:, c].astype(np.float64) - mean[c]) * inverse[c]
        if bias:
            loss = loss * (normal * scale[c] + bias[0][c] > 0)
        dscale[c], dbias[c] = (loss * normal).sum(), loss.sum()
        dx[:, c] = scale[c] * inverse[c] * (loss - loss.mean() - normal * (loss * normal).mean())
    return [v.astype(x.dtype) for v in (dx, dscale, dbias)]


def layer_norm_gradient(dy: Array, x: Array, scale: Array, centred: bool, epsilon: float) -> list[Array]:
    """Row by row in float64, by the derivative's own matrix."""
    count = scale.size
    rows, loss = (v.reshape(-1, count).astype(np.float64) for v in (x, dy))
    dx, dscale = np.empty(rows.shape), np.zeros(count)
    for i, row in enumerate(rows):
        shift = np.eye(count) - (1.0 / count if centred else 0.0)
        centre = shift @ row
        deviation = np.sqrt((centre * centre).mean() + epsilon)
        slope = (np.eye(count) - np.outer(centre, centre) / (count * deviation**2)) / deviation @ shift
        dx[i] = slope.T @ (loss[i] * scale.reshape(-1))
        dscale += loss[i] * centre / deviation
    sums = [dscale, loss.sum(0)] if centred else [dscale]
    return [dx.reshape(x.shape).astype(x.dtype), *(v.reshape(scale.shape).astype(x.dtype) for v in sums)]


def philox(state: Array, shape: tuple[int, ...], stream: int) -> Array:
    """Philox4x32-10 word by word in Python's integers."""
    seed, step = map(int, state)
    low, words = (1 << 32) - 1, list[int]()
    for index in range(-(-math.prod(shape) // 4)):
        counter, key = (index, stream, step & low, step >> 32), (seed & low, seed >> 32)
        for _ in range(10):
            first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
            counter = (second >> 32 ^ counter[1] ^ key[0], second & low, first >> 32 ^ counter[3] ^ key[1], first & low)
            key = ((key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low)
        words += counter
    return np.array(words[: math.prod(shape)], np.uint32).reshape(shape)


ROWS: dict[str, Sequence[Case]] = {
    "top_k": [
        top_k(2, 1, True, normal),
        top_k(5, 1, False, coarse),
        top_k(3, -1, True, integers(-3, 3)),
        top_k(0, 0, True, normal),
    ],
    "non_max_suppression": [
        suppression(NonMaxSuppression(3, 0.25), 2, 3, 9, normal),
        suppression(NonMaxSuppression(100, 0.5, 0.5, True), 1, 2, 40, coarse),
        suppression(NonMaxSuppression(2, 0.0, 100.0), 1, 2, 5, normal),
    ],
    "scatter": [
        scatter("none", places, normal),
        *(scatter(kind, integers(-5, 5), normal) for kind in ("add", "mul", "max", "min")),
        scatter("add", integers(0, 5), integers(-9, 9, np.int32)),
    ],
    "cumulate": [
        Case(Cumulate("sum", 1), ((2, 5, 3),), lambda x: run("CumSum", [x, np.array(1)]), normal),
        Case(Cumulate("sum", -1), ((2, 5),), lambda x: run("CumSum", [x, np.array(1)]), integers(-9, 9), False),
        Case(Cumulate("prod", 1), ((2, 5, 3),), formula(running_product), unit),
    ],
    "linear_scan": [
        Case(LinearScan(axis), ((2, 5, 3), (2, 5, 3)), formula(recurrence(axis)), unit) for axis in (1, -1, 0)
    ],
    "scan": [
        Case(make(DType.F32), shapes, oracle, draw, rounds, make)
        for make, shapes, oracle, draw, rounds in (
            (average, ((3,), (5, 3), ()), moving_average, unit, True),
            (layer, ((2, 3), (), (3, 3)), weighted, (unit, integers(-9, 9), unit), True),
            (paths, ((2, 4), (3, 2, 4)), summed_paths, normal, True),
            (accumulated, ((2,), (6, 2)), running_maximum, normal, False),
        )
    ],
}

TRAINING: dict[str, Sequence[Case]] = {
    "conv_wgrad": [
        Case(op, shapes, lambda x, dy, op=op: [filter_gradient(x, dy, op)], normal)
        for op, shapes in (
            (ConvWgrad((3,), (2,), (1, 0), (1,)), ((2, 4, 8), (2, 6, 4))),
            (ConvWgrad((3, 2), (2, 1), (1, 0, 2, 3), (2, 1), 2), ((2, 4, 9, 7), (2, 6, 4, 9))),
            (ConvWgrad((3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 6), ((3, 6, 5, 5), (3, 6, 5, 5))),
            (ConvWgrad((2, 3, 1), (1, 2, 1), (0, 1, 0, 1, 1, 2), (2, 1, 1)), ((1, 2, 5, 6, 4), (1, 3, 4, 3, 6))),
        )
    ],
    "max_pool_backward": [
        Case(op, shapes, lambda dy, x, op=op: [pool_gradient(dy, x, op)], (normal, coarse))
        for op, shapes in (
            (MaxPoolBackward((2,), (2,), (0, 0), (1,)), ((2, 3, 3), (2, 3, 7))),
            (MaxPoolBackward((3, 3), (2, 2), (1, 1, 1, 1), (1, 1)), ((2, 2, 4, 3), (2, 2, 7, 6))),
            (MaxPoolBackward((2, 3), (2, 2), (1, 0, 0, 2), (2, 1), True), ((1, 2, 3, 3), (1, 2, 5, 6))),
        )
    ]
    + [
        Case(
            op,
            (shape, shape),
            lambda dy, places, op=op: [gradient_at_places(dy, places, op)],
            (normal, inside_taps(op)),
        )
        for op, shape in (
            (MaxPoolBackward((3,), (1,), (0, 1), (2,), image=(7,)), (2, 3, 4)),
            (MaxPoolBackward((3, 3), (2, 2), (1, 1, 1, 1), (1, 1), image=(7, 6)), (2, 2, 4, 3)),
        )
    ],
    "max_pool_train": [
        Case(op, (shape,), lambda x, op=op: pool_with_places(x, op), coarse)
        for op, shape in (
            (MaxPoolTrain((2,), (2,), (0, 0), (1,)), (2, 3, 7)),
            (MaxPoolTrain((2, 3), (2, 2), (1, 0, 0, 2), (2, 1), True), (1, 2, 5, 6)),
        )
    ],
    "batch_norm_train": [
        Case(
            BatchNormTrain(eps),
            ((4, 3, *spatial), (3,), (3,)),
            lambda x, scale, bias, eps=eps: batch_statistics(x, scale, bias, eps),
            normal,
        )
        for eps, spatial in ((1e-5, (5, 2)), (0.25, ()))
    ],
    "channel_sums": [Case(ChannelSums(), (shape,), channel_sums, normal) for shape in ((4, 3, 5, 2), (6, 3))],
    "batch_norm_by_sums": [
        Case(
            BatchNormBySums(eps),
            ((4, 3, *spatial), *[(3,)] * 4),
            lambda x, scale, bias, total, squares, eps=eps: by_sums(x, scale, bias, total, squares, eps),
            draws,
        )
        for eps, spatial in ((1e-5, (5, 2)), (0.3, ()))
        for draws in ((normal, normal, normal, normal, hundreds), (normal, normal, normal, hundreds, normal))
    ],
    "batch_norm_backward": [
        Case(BatchNormBackward(relu), (shape, shape, *[(3,)] * (4 if relu else 3)), batch_norm_gradient, normal)
        for shape in ((4, 3, 2, 3), (5, 3))
        for relu in (False, True)
    ],
    "layer_norm_backward": [
        Case(
            LayerNormBackward(axis, epsilon, centred),
            (shape, shape, shape[axis:]),
            lambda dy, x, scale, centred=centred, eps=epsilon: layer_norm_gradient(dy, x, scale, centred, eps),
            normal,
        )
        for axis, epsilon, centred, shape in (
            (-1, 1e-5, True, (4, 3, 6)),
            (1, 0.25, True, (4, 3, 2)),
            (-1, 1e-3, False, (5, 7)),
            (0, 1e-5, True, (8,)),
        )
    ],
    "random_bits": [
        Case(RandomBits(shape, stream), ((2,),), lambda state, op=(shape, stream): [philox(state, *op)], bits64, False)
        for shape, stream in (((3, 7), 0), ((), 5), ((4, 1, 2), 4294967295))
    ],
    "attention_train": [
        Case(AttentionTrain(0.5, causal), shapes, attended_with_sums(0.5, causal), normal)
        for causal in (False, True)
        for shapes in (
            ((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 6)),
            ((1, 4, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4), (4, 1, 5)),
        )
    ],
    "attention_backward": [
        Case(
            AttentionBackward(0.25, causal),
            ((1, h, 4, 8), (1, h, 4, 8), (1, g, 5, 8), (1, g, 5, 8), (1, h, 4, 8), (1, h, 4, 1)),
            attention_gradient(0.25, causal),
            (normal, unit, unit, normal, normal, large),
        )
        for causal, h, g in ((False, 2, 2), (True, 4, 2))
    ],
    "all_finite": [
        Case(AllFinite(), shapes, lambda *a: [np.array(all(np.isfinite(x).all() for x in a))], draw, False)
        for shapes in (((3, 4),), ((5,), (1,), (2, 3, 2)), ((0, 2), (7,)))
        for draw in (normal, with_infinities)
    ],
}

SLOPES = ("leaky_relu", "elu", "hard_sigmoid")
RECURRENT = [
    (Recurrent("lstm"), False),
    (Recurrent("lstm", "reverse", input_forget=True), False),
    (Recurrent("lstm", "bidirectional", clip=0.75), True),
    (Recurrent("lstm", "forward", SLOPES, (0.3, 0.5, 0.25), (0.0, 0.0, 0.4)), True),
    (Recurrent("gru"), False),
    (Recurrent("gru", "bidirectional", clip=0.5), False),
    (Recurrent("gru", "reverse", linear_before_reset=True), False),
    (Recurrent("gru", "bidirectional", linear_before_reset=True), True),
    (Recurrent("gru", "bidirectional", ("hard_sigmoid", "tanh", "sigmoid", "softsign")), False),
    (Recurrent("rnn", "bidirectional", ("relu", "affine"), (0.0, 0.5), (0.0, 0.25), 2.0), False),
    (Recurrent("rnn", "reverse"), False),
    (Recurrent("rnn", activations=("scaled_tanh",), alphas=(0.5,), betas=(0.75,)), False),
]
LAYERS: dict[str, Sequence[Case]] = {
    "recurrent": [
        *(Case(op, shapes(op, more=more), onnxruntime_of(op), weights) for op, more in RECURRENT),
        *(
            Case(op, (*found, (3,)), onnxruntime_of(op), (*[weights] * len(found), ends(4)))
            for op, more in RECURRENT
            if op.direction == "bidirectional"
            for found in [shapes(op, more=more)]
        ),
    ],
}

CASES: dict[str, Sequence[Case]] = {
    **{name: [make(name) for make in makes] for name, makes in POINTWISE.items()},
    **OTHERS,
    **ROWS,
    **TRAINING,
    **LAYERS,
}
