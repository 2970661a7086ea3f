"""Import ops that draw random numbers. Bits come from a seed and the number of the call, the same on every machine.

Values without a `seed` read the input `fusec.random_state` of the graph, which each call may give.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, Table
from fusec.frontends.onnx.model_file.tensors import dtype_of
from fusec.ir import DType, TensorType, Value
from fusec.ops import Cumulate, RandomBits, Reduce, Slice, Softmax, pw
from fusec.ops.random import STATE_NAME, STATE_TYPE
from fusec.ops.spec import require

_SMALLEST = 2.0**-24  # drawn uniform numbers are multiples of this


def bits(g: Emitter, shape: Sequence[int], seed: float | None) -> Value:
    """Draw 32 random bits per element.

    seed: fixes the bits for all calls. None: the state that a call gives fixes them, differently for each node.
    """
    if seed is not None:
        key = np.frombuffer(np.float64(seed).tobytes(), np.uint64)[0]
        return g(RandomBits(tuple(shape)), g.constant(np.array([key, 0], np.uint64)))
    state = next((v for v in g.graph.inputs if v.name == STATE_NAME), None)
    if state is None:
        state = g.graph.add_input(STATE_NAME, STATE_TYPE)
    return g(RandomBits(tuple(shape), zlib.crc32(f"{g.name} {g.next_draw()}".encode())), state)


def uniform(g: Emitter, shape: Sequence[int], seed: float | None) -> Value:
    """Draw f32 numbers in [0, 1), which are multiples of 2^-24."""
    drawn = bits(g, shape, seed)
    total: Value | None = None
    for i in (3, 2, 1):  # eight bits at a time, because a graph compiled for fp16 or bf16 holds these exactly
        part = g(pw("shift_right"), drawn, g.constant(np.array(32 - 8 * i, np.uint32)))
        part = g.cast(g(pw("bitwise_and"), part, g.constant(np.array(255, np.uint32))), DType.F32)
        part = g(pw("mul"), part, g.scalar(2.0 ** (-8 * i), part))
        total = part if total is None else g(pw("add"), part, total)
    assert total is not None
    return total


def _normal(g: Emitter, shape: Sequence[int], seed: float | None) -> Value:
    """Draw from the standard normal distribution by the method of Box and Muller."""
    pair = uniform(g, (2, *shape), seed)
    first, second = (_part(g, pair, i, shape) for i in (0, 1))
    first = g(pw("max"), first, g.scalar(_SMALLEST, first))  # because the logarithm of 0 is infinite
    radius = g(pw("sqrt"), g(pw("mul"), g(pw("log"), first), g.scalar(-2.0, first)))
    return g(pw("mul"), radius, g(pw("cos"), g(pw("mul"), second, g.scalar(2 * math.pi, second))))


def _part(g: Emitter, pair: Value, index: int, shape: Sequence[int]) -> Value:
    rank = len(shape) + 1
    sliced = g(Slice((index, *[0] * (rank - 1)), (1, *shape), (1,) * rank), pair)
    return g.reshape(sliced, shape)


def _scaled(g: Emitter, x: Value, scale: float, shift: float, dtype: DType) -> Value:
    require(dtype.is_float, f"random numbers of type {dtype.value}, which is no float")
    return g.cast(g(pw("add"), g(pw("mul"), x, g.scalar(scale, x)), g.scalar(shift, x)), dtype)


def random_uniform(
    g: Emitter, /, *, shape: Sequence[int], dtype: int = 1, seed: float | None = None, high: float = 1, low: float = 0
) -> Value:
    return _scaled(g, uniform(g, _sizes(shape), seed), high - low, low, dtype_of(dtype))


def random_uniform_like(
    g: Emitter, x: Value, /, *, dtype: int | None = None, seed: float | None = None, high: float = 1, low: float = 0
) -> Value:
    return _scaled(g, uniform(g, x.type.shape, seed), high - low, low, _dtype_like(x, dtype))


def random_normal(
    g: Emitter, /, *, shape: Sequence[int], dtype: int = 1, seed: float | None = None, mean: float = 0, scale: float = 1
) -> Value:
    return _scaled(g, _normal(g, _sizes(shape), seed), scale, mean, dtype_of(dtype))


def random_normal_like(
    g: Emitter, x: Value, /, *, dtype: int | None = None, seed: float | None = None, mean: float = 0, scale: float = 1
) -> Value:
    return _scaled(g, _normal(g, x.type.shape, seed), scale, mean, _dtype_like(x, dtype))


def bernoulli(g: Emitter, x: Value, /, *, dtype: int | None = None, seed: float | None = None) -> Value:
    """Import Bernoulli: 1 with the probability that x gives, else 0."""
    require(x.type.dtype.is_float, f"probabilities are {x.type.dtype.value}, no floats")
    chance = g.cast(x, DType.F32)
    chosen = g(pw("cmp_lt"), uniform(g, x.type.shape, seed), chance)
    # in 16 bits a drawn number may round to 1
    certain = g(pw("cmp_ge"), chance, g.scalar(1, chance))
    return g.cast(g(pw("logical_or"), chosen, certain), x.type.dtype if dtype is None else dtype_of(dtype))


def multinomial(g: Emitter, x: Value, /, *, dtype: int = 6, sample_size: int = 1, seed: float | None = None) -> Value:
    """Import Multinomial: count the classes whose cumulated probability a drawn number reaches."""
    require(x.type.rank == 2 and x.type.dtype.is_float, f"takes [batch, classes] of floats, not {x.type}")
    require(sample_size > 0, f"sample_size is {sample_size}")
    (batch, classes), to = x.type.shape, dtype_of(dtype)
    require(classes > 0, "no class to choose")
    require(to in (DType.I32, DType.I64), f"samples of type {to.value}")
    cumulated = g(Cumulate("sum", 1), g(Softmax(1), g.cast(x, DType.F32)))
    drawn = g.reshape(uniform(g, (batch, sample_size), seed), (batch, sample_size, 1))
    reached = g(pw("cmp_ge"), drawn, g.reshape(cumulated, (batch, 1, classes)))
    count = g(Reduce("sum", (2,), keepdims=False), g.cast(reached, to))
    # rounding may leave the last sum below the drawn number
    return g(pw("min"), count, g.scalar(classes - 1, count))


def dropout(
    g: Emitter, x: Value, ratio: Value | None = None, training_mode: Value | None = None, /, *, seed: int | None = None
) -> tuple[Value, ...]:
    """Import Dropout: x and a mask of ones, or in training zero instead of elements drawn at random."""
    training = training_mode is not None and bool(g.number(training_mode, "training_mode"))
    dropped = 0.5 if ratio is None else g.number(ratio, "the ratio") if training else 0.0
    if not (training and dropped):
        return (x,) if g.outputs == 1 else (x, g.full(TensorType(x.type.shape, DType.BOOL), np.ones((), np.bool_)))
    require(0 < dropped < 1, f"the ratio is {dropped}, not in [0, 1)")
    least = g.constant(np.array(min(round(dropped * 2**32), 2**32 - 1), np.uint32))
    mask = g(pw("cmp_ge"), bits(g, x.type.shape, seed), least)
    scaled = g(pw("mul"), x, g.scalar(1 / (1 - dropped), x))
    return g(pw("where"), mask, scaled, g.scalar(0, x)), mask


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    require(all(size >= 0 for size in shape), f"a negative dim in the shape {list(shape)}")
    return tuple(shape)


def _dtype_like(x: Value, dtype: int | None) -> DType:
    return x.type.dtype if dtype is None else dtype_of(dtype)


TABLE: Table = {
    ("RandomUniform", 1): random_uniform,
    ("RandomUniformLike", 1): random_uniform_like,
    ("RandomNormal", 1): random_normal,
    ("RandomNormalLike", 1): random_normal_like,
    ("Bernoulli", 15): bernoulli,
    ("Multinomial", 7): multinomial,
    ("Dropout", 12): dropout,
}
