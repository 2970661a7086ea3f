"""Import RNN, GRU and LSTM: unroll them over the steps of the sequence, one direction after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fusec.frontends.onnx.emit import Emitter, Table
from fusec.frontends.onnx.movement.gather_scatter import reversed_in_time
from fusec.frontends.onnx.ops.control import row, stacked
from fusec.ir import DType, TensorType, Value
from fusec.ops import MatMul, Transpose, pw
from fusec.ops.spec import require

MAX_STEPS = 4096
Activation = Callable[[Value], Value]

# Activations, with the defaults of their alpha and beta (None if they have none).
_ACTIVATIONS: dict[str, tuple[float | None, float | None]] = {
    "relu": (None, None),
    "tanh": (None, None),
    "sigmoid": (None, None),
    "softsign": (None, None),
    "softplus": (None, None),
    "affine": (1.0, 0.0),
    "leakyrelu": (0.01, None),
    "thresholdedrelu": (1.0, None),
    "scaledtanh": (1.0, 1.0),
    "hardsigmoid": (0.2, 0.5),
    "elu": (1.0, None),
}


def _activation(g: Emitter, name: str, alpha: float, beta: float, x: Value) -> Value:
    match name:
        case "leakyrelu":
            return g(pw("leaky_relu", alpha=alpha), x)
        case "thresholdedrelu":
            return g(pw("thresholded_relu", alpha=alpha), x)
        case "elu":
            return g(pw("elu", alpha=alpha), x)
        case "hardsigmoid":
            return g(pw("hard_sigmoid", alpha=alpha, beta=beta), x)
        case "affine":
            return g(pw("add"), g(pw("mul"), x, g.scalar(alpha, x)), g.scalar(beta, x))
        case "scaledtanh":
            return g(pw("mul"), g(pw("tanh"), g(pw("mul"), x, g.scalar(beta, x))), g.scalar(alpha, x))
        case _:
            return g(pw(name), x)


def _activations(
    g: Emitter,
    names: Sequence[str],
    alphas: Sequence[float],
    betas: Sequence[float],
    defaults: Sequence[str],
    count: int,
) -> list[list[Activation]]:
    """Return the activation functions of each of `count` directions.

    alphas, betas: in order, for the functions that have an alpha or a beta.
    """
    each = [n.lower() for n in names] or [n.lower() for n in defaults] * count
    require(len(each) == len(defaults) * count, f"{len(each)} activations, not {len(defaults) * count}")
    given_alphas, given_betas = list(alphas), list(betas)
    made: list[Activation] = []
    for name in each:
        require(name in _ACTIVATIONS, f"knows no activation {name!r}")
        alpha, beta = _ACTIVATIONS[name]
        if alpha is not None and given_alphas:
            alpha = given_alphas.pop(0)
        if beta is not None and given_betas:
            beta = given_betas.pop(0)
        made.append(partial(_activation, g, name, alpha or 0.0, beta or 0.0))
    return [made[i * len(defaults) : (i + 1) * len(defaults)] for i in range(count)]


@dataclass(frozen=True)
class Operands:
    """Operands that RNN, GRU and LSTM share: x[T, B, I], w[D, G*H, I], r[D, G*H, H], bias[D, 2*G*H], lengths[B]."""

    x: Value
    w: Value
    r: Value
    b: Value | None
    lengths: Value | None


@dataclass(frozen=True)
class RecurrentLayer:
    """Attributes that RNN, GRU and LSTM share, and the number of their gates.

    layout: 1 if the batch is the first dim, else 0.
    hidden: size of a state; 0 to infer it from r.
    """

    direction: str
    layout: int
    hidden: int
    gates: int


@dataclass(frozen=True)
class Weights:
    """Weights of one direction: x[B, I] @ w[I, G*H] + h[B, H] @ r[H, G*H] + the two halves of the bias."""

    w: Value
    r: Value
    w_bias: Value | None
    r_bias: Value | None


Step = Callable[[Weights, int, Value, list[Value]], list[Value]]  # (weights, direction, x, states) -> new states


def _unrolled(
    g: Emitter, operands: Operands, initial: Sequence[Value | None], layer: RecurrentLayer, step: Step
) -> tuple[Value, ...]:
    """Unroll a layer. Returns Y, which has the first state of each step, and the last value of each state.

    initial: first value of each state; None for zeros.
    """
    x, w, r, b, lengths = operands.x, operands.w, operands.r, operands.b, operands.lengths
    direction, layout, gates = layer.direction, layer.layout, layer.gates
    require(direction in ("forward", "reverse", "bidirectional"), f"knows no direction {direction!r}")
    require(x.type.rank == 3, f"takes [steps, batch, size], not {list(x.type.shape)}")
    if layout:
        x = g(Transpose((1, 0, 2)), x)
    steps, batch, _ = x.type.shape
    count = 2 if direction == "bidirectional" else 1
    size = layer.hidden or r.type.shape[-1]
    require(0 < steps <= MAX_STEPS, f"{steps} steps; from 1 to {MAX_STEPS} are supported")
    require(w.type.shape[:2] == (count, gates * size), f"W {w.type} for {count} directions of {gates}x{size}")
    require(r.type.shape == (count, gates * size, size), f"R {r.type} for {count} directions of {gates}x{size}")
    require(
        b is None or b.type.shape == (count, 2 * gates * size), f"B {b and b.type}, not [{count},{2 * gates * size}]"
    )
    full = g.full(TensorType((batch,), DType.I64), np.array(steps))
    outputs: list[Value] = []
    last: list[list[Value]] = [[] for _ in initial]
    for d in range(count):
        backward = direction == "reverse" or d == 1
        weights = _weights(g, w, r, b, d, gates * size)
        zeros = g.full(TensorType((batch, size), x.type.dtype), np.zeros((), x.type.dtype.numpy))
        states = [zeros if v is None else row(g, v, 1 if layout else 0, d) for v in initial]
        along_time = reversed_in_time(g, x, full if lengths is None else lengths, 0) if backward else x
        made: list[Value] = []
        for t in range(steps):
            with g.unrolling():
                now = step(weights, d, row(g, along_time, 0, t), states)
            if lengths is None:
                states, y = now, now[0]
            else:  # after the end of a sequence its states stay, and Y is zero
                ends = g.reshape(g.cast(lengths, DType.I64), (batch, 1))
                running = g(pw("cmp_gt"), ends, g.scalar(t, ends))
                states = [g(pw("where"), running, new, old) for new, old in zip(now, states, strict=True)]
                y = g(pw("where"), running, now[0], g.scalar(0, x))
            made.append(y)
        whole = stacked(g, made, 0)
        if backward:
            whole = reversed_in_time(g, whole, full if lengths is None else lengths, 0)
        outputs.append(whole)
        for of_directions, state in zip(last, states, strict=True):
            of_directions.append(state)
    y = stacked(g, outputs, 1)  # [steps, directions, batch, size]
    finals = [stacked(g, of_directions, 0) for of_directions in last]
    if layout:
        y = g(Transpose((2, 0, 1, 3)), y)
        finals = [g(Transpose((1, 0, 2)), v) for v in finals]
    return (y, *finals)


def _weights(g: Emitter, w: Value, r: Value, b: Value | None, d: int, width: int) -> Weights:
    transposed = [g(Transpose((1, 0)), row(g, v, 0, d)) for v in (w, r)]
    if b is None:
        return Weights(transposed[0], transposed[1], None, None)
    bias = row(g, b, 0, d)
    return Weights(transposed[0], transposed[1], g.window(bias, 0, 0, width), g.window(bias, 0, width, width))


def _clipped(g: Emitter, x: Value, limit: float) -> Value:
    return g(pw("clip", min=-limit, max=limit), x) if limit else x


def _sum(g: Emitter, first: Value, *more: Value | None) -> Value:
    for value in more:
        if value is not None:
            first = g(pw("add"), first, value)
    return first


def rnn(
    g: Emitter,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None = None,
    lengths: Value | None = None,
    initial_h: Value | None = None,
    /,
    *,
    activation_alpha: Sequence[float] = (),
    activation_beta: Sequence[float] = (),
    activations: Sequence[str] = ("Tanh", "Tanh"),
    clip: float = 0.0,
    direction: str = "forward",
    hidden_size: int = 0,
    layout: int = 0,
) -> tuple[Value, ...]:
    count = 2 if direction == "bidirectional" else 1
    given = activations if len(activations) == count else activations[:count]
    functions = _activations(g, given, activation_alpha, activation_beta, ("Tanh",), count)

    def step(p: Weights, d: int, now: Value, states: list[Value]) -> list[Value]:
        total = _sum(g, g(MatMul(), now, p.w), g(MatMul(), states[0], p.r), p.w_bias, p.r_bias)
        return [functions[d][0](_clipped(g, total, clip))]

    layer = RecurrentLayer(direction, layout, hidden_size, 1)
    return _unrolled(g, Operands(x, w, r, b, lengths), [initial_h], layer, step)


def gru(
    g: Emitter,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None = None,
    lengths: Value | None = None,
    initial_h: Value | None = None,
    /,
    *,
    activation_alpha: Sequence[float] = (),
    activation_beta: Sequence[float] = (),
    activations: Sequence[str] = (),
    clip: float = 0.0,
    direction: str = "forward",
    hidden_size: int = 0,
    layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Value, ...]:
    """Import GRU. The weights have gates z, r and h, in this order."""
    count, size = (2 if direction == "bidirectional" else 1), hidden_size or r.type.shape[-1]
    functions = _activations(g, activations, activation_alpha, activation_beta, ("Sigmoid", "Tanh"), count)

    def part(v: Value, gate: int) -> Value:
        return g.window(v, v.type.rank - 1, gate * size, size)

    def step(p: Weights, d: int, now: Value, states: list[Value]) -> list[Value]:
        inner, outer = functions[d]
        h = states[0]
        from_x = _sum(g, g(MatMul(), now, p.w), p.w_bias)
        two = g.window(p.r, 1, 0, 2 * size)
        from_h = _sum(g, g(MatMul(), h, two), None if p.r_bias is None else g.window(p.r_bias, 0, 0, 2 * size))
        z, reset = (inner(_clipped(g, g(pw("add"), part(from_x, i), part(from_h, i)), clip)) for i in (0, 1))
        last, bias = part(p.r, 2), None if p.r_bias is None else part(p.r_bias, 2)
        if linear_before_reset:
            hidden = g(pw("mul"), reset, _sum(g, g(MatMul(), h, last), bias))
        else:
            hidden = _sum(g, g(MatMul(), g(pw("mul"), reset, h), last), bias)
        new = outer(_clipped(g, g(pw("add"), part(from_x, 2), hidden), clip))
        old = g(pw("mul"), z, h)
        return [g(pw("add"), g(pw("mul"), g(pw("sub"), g.scalar(1, z), z), new), old)]

    layer = RecurrentLayer(direction, layout, hidden_size, 3)
    return _unrolled(g, Operands(x, w, r, b, lengths), [initial_h], layer, step)


def lstm(
    g: Emitter,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None = None,
    lengths: Value | None = None,
    initial_h: Value | None = None,
    initial_c: Value | None = None,
    peepholes: Value | None = None,
    /,
    *,
    activation_alpha: Sequence[float] = (),
    activation_beta: Sequence[float] = (),
    activations: Sequence[str] = (),
    clip: float = 0.0,
    direction: str = "forward",
    hidden_size: int = 0,
    input_forget: int = 0,
    layout: int = 0,
) -> tuple[Value, ...]:
    """Import LSTM. The weights have gates i, o, f and c, in this order; peepholes exist for the first three."""
    count, size = (2 if direction == "bidirectional" else 1), hidden_size or r.type.shape[-1]
    functions = _activations(g, activations, activation_alpha, activation_beta, ("Sigmoid", "Tanh", "Tanh"), count)

    def step(p: Weights, d: int, now: Value, states: list[Value]) -> list[Value]:
        inner, middle, outer = functions[d]
        h, c = states
        total = _sum(g, g(MatMul(), now, p.w), g(MatMul(), h, p.r), p.w_bias, p.r_bias)
        i, o, f, new = (g.window(total, 1, k * size, size) for k in range(4))

        def peep(gate: Value, k: int, cell: Value) -> Value:
            if peepholes is not None:
                weight = g.window(row(g, peepholes, 0, d), 0, k * size, size)
                gate = g(pw("add"), gate, g(pw("mul"), weight, cell))
            return inner(_clipped(g, gate, clip))

        i = peep(i, 0, c)
        f = g(pw("sub"), g.scalar(1, i), i) if input_forget else peep(f, 2, c)
        cell = g(pw("add"), g(pw("mul"), f, c), g(pw("mul"), i, middle(_clipped(g, new, clip))))
        return [g(pw("mul"), peep(o, 1, cell), outer(cell)), cell]

    layer = RecurrentLayer(direction, layout, hidden_size, 4)
    return _unrolled(g, Operands(x, w, r, b, lengths), [initial_h, initial_c], layer, step)


TABLE: Table = {
    ("RNN", 7): rnn,
    ("GRU", 7): gru,
    ("LSTM", 7): lstm,
}
