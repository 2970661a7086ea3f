"""Import the optimisers of ai.onnx.preview.training: Adagrad, Adam and Momentum, as pointwise ops.

Operands are the learning rate R, the number T of updates so far, and lists of tensors: all parameters, then all
gradients, then the state. R and T may be computed at run time, so they are tensors of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.ir import DType, Value
from fusec.ops import pw
from fusec.ops.spec import require

# Defaults of the schema, which are f32: 1 - 0.999 differs from that in the fifth digit.
ALPHA, BETA, EPSILON = (float(np.float32(number)) for number in (0.9, 0.999, 1e-6))


def adagrad(
    g: Emitter,
    rate: Value,
    count: Value,
    /,
    *tensors: Value,
    decay_factor: float = 0.0,
    epsilon: float = EPSILON,
    norm_coefficient: float = 0.0,
) -> tuple[Value, ...]:
    """Import Adagrad, whose state is the sum of squared gradients."""
    rate, updates = _scalars(g, rate, count, tensors)
    if decay_factor:
        rate = g(pw("div"), rate, _plus(g, _times(g, updates, decay_factor), 1.0))

    def update(x: Value, gradient: Value, squares: Value) -> tuple[Value, ...]:
        gradient = _regularized(g, x, gradient, norm_coefficient)
        squares = g(pw("add_square"), squares, gradient)
        return _moved(g, x, rate, _over_root(g, gradient, squares, epsilon)), squares

    return _each(tensors, 3, update)


def adam(
    g: Emitter,
    rate: Value,
    count: Value,
    /,
    *tensors: Value,
    alpha: float = ALPHA,
    beta: float = BETA,
    epsilon: float = EPSILON,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> tuple[Value, ...]:
    """Import Adam, whose state is the mean of gradients and that of their squares. T = 0 corrects no bias."""
    plain, updates = _scalars(g, rate, count, tensors)
    root = g(pw("sqrt"), _one_minus_power(g, beta, updates))
    corrected = g(pw("div"), g(pw("mul"), plain, root), _one_minus_power(g, alpha, updates))
    adjusted = g(pw("where"), _is_later(g, count), corrected, plain)

    def update(x: Value, gradient: Value, mean: Value, squares: Value) -> tuple[Value, ...]:
        gradient = _regularized(g, x, gradient, norm_coefficient)
        mean = g(pw("add"), _times(g, mean, alpha), _times(g, gradient, 1 - alpha))
        square = g(pw("mul"), gradient, gradient)
        squares = g(pw("add"), _times(g, squares, beta), _times(g, square, 1 - beta))
        x = _moved(g, x, adjusted, _over_root(g, mean, squares, epsilon))
        return _times(g, x, 1 - norm_coefficient_post), mean, squares

    return _each(tensors, 4, update)


def momentum(
    g: Emitter,
    rate: Value,
    count: Value,
    /,
    *tensors: Value,
    alpha: float,
    beta: float,
    mode: str,
    norm_coefficient: float,
) -> tuple[Value, ...]:
    """Import Momentum, whose state is the momentum. T = 0 takes the first gradient whole, without `beta`."""
    require(mode in ("standard", "nesterov"), f"mode {mode!r} is not known")
    rate, _ = _scalars(g, rate, count, tensors)
    share = g(pw("where"), _is_later(g, count), g.scalar(beta, rate), g.scalar(1.0, rate))

    def update(x: Value, gradient: Value, velocity: Value) -> tuple[Value, ...]:
        gradient = _regularized(g, x, gradient, norm_coefficient)
        velocity = g(pw("add"), _times(g, velocity, alpha), g(pw("mul"), g.cast(share, x.type.dtype), gradient))
        ahead = g(pw("add"), gradient, _times(g, velocity, alpha)) if mode == "nesterov" else velocity
        return _moved(g, x, rate, ahead), velocity

    return _each(tensors, 3, update)


def _each(tensors: Sequence[Value], lists: int, update: Callable[..., tuple[Value, ...]]) -> tuple[Value, ...]:
    """Update each parameter, and return all new parameters, then the new state.

    lists: number of lists of equal length in `tensors`.
    update: takes a parameter, its gradient and its state; returns the parameter and the state.
    """
    count, left = divmod(len(tensors), lists)
    require(count > 0 and not left, f"takes {lists} tensors for each parameter, not {len(tensors)} for all")
    groups = [tensors[first::count] for first in range(count)]
    for index, group in enumerate(groups, 1):
        types = [f"{v.type}" for v in group]
        require(len(set(types)) == 1, f"parameter {index}, its gradient and its state are {', '.join(types)}")
    results = [update(*group) for group in groups]
    return tuple(new for column in zip(*results, strict=True) for new in column)


def _scalars(g: Emitter, rate: Value, count: Value, tensors: Sequence[Value]) -> tuple[Value, Value]:
    """Return the learning rate and the number of updates as floats of rank 0, in f64 if a tensor or the rate is."""
    require(rate.type.size == 1 and rate.type.dtype.is_float, f"the learning rate is {rate.type}, not one float")
    require(count.type.size == 1 and count.type.dtype.is_int, f"the update count is {count.type}, not one integer")
    wide = DType.F64 if DType.F64 in {v.type.dtype for v in (rate, *tensors)} else DType.F32
    return g.cast(g.reshape(rate, ()), wide), g.cast(g.reshape(count, ()), wide)


def _is_later(g: Emitter, count: Value) -> Value:
    """Tell if an update came before this one."""
    return g(pw("cmp_gt"), g.reshape(count, ()), g.scalar(0, count))


def _one_minus_power(g: Emitter, base: float, count: Value) -> Value:
    """Return 1 - base**count for counts above 0."""
    if not 0 < base <= 1:
        power = g(pw("pow"), g.scalar(base, count), count)
        return g(pw("sub"), g.scalar(1.0, count), power)
    # elu is exp(x) - 1 below 0 and loses no digits there; base**count may be so close to 1 that few would be left
    return g(pw("neg"), g(pw("elu"), _times(g, count, math.log(base))))


def _regularized(g: Emitter, x: Value, gradient: Value, coefficient: float) -> Value:
    return g(pw("add"), _times(g, x, coefficient), gradient) if coefficient else gradient


def _over_root(g: Emitter, y: Value, squares: Value, epsilon: float) -> Value:
    return g(pw("div"), y, _plus(g, g(pw("sqrt"), squares), epsilon))


def _moved(g: Emitter, x: Value, rate: Value, direction: Value) -> Value:
    return g(pw("sub"), x, g(pw("mul"), g.cast(rate, x.type.dtype), direction))


def _times(g: Emitter, x: Value, number: float) -> Value:
    return x if number == 1 else g(pw("mul"), x, g.scalar(number, x))


def _plus(g: Emitter, x: Value, number: float) -> Value:
    return g(pw("add"), x, g.scalar(number, x))


TABLE: Mapping[str, OpFunction] = {"Adagrad": adagrad, "Adam": adam, "Momentum": momentum}
