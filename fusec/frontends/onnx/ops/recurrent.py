"""Import RNN, GRU and LSTM: one product of the input of all steps with its weights, then one op for the recurrence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, Table
from fusec.ir import Literal, TensorType, Value
from fusec.ops import Concat, MatMul, Recurrent, Reshape, Transpose, pw
from fusec.ops.recurrent import ACTIVATIONS, DEFAULT_ACTIVATIONS, DIRECTIONS, GATES
from fusec.ops.spec import require
from fusec.system.dataclass import dataclass

_NAMES: Mapping[str, str] = {name.replace("_", ""): name for name in ACTIVATIONS}  # as ONNX has them, in lower case


@dataclass(frozen=True)
class _Operands:
    """Operands that RNN, GRU and LSTM share: x[T, B, I], w[D, G*H, I], r[D, G*H, H], bias[D, 2*G*H], lengths[B]."""

    x: Value
    w: Value
    r: Value
    b: Value | None
    lengths: Value | None
    initial: Sequence[Value | None]


@dataclass(frozen=True)
class _Layer:
    """Attributes that RNN, GRU and LSTM share. `layout`: 1 if the batch is the first dim. `size`: of a state."""

    cell: str
    direction: str
    layout: int
    size: int

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    @property
    def gates(self) -> int:
        return GATES[self.cell]

    @classmethod
    def of(cls, cell: str, direction: str, layout: int, hidden_size: int, r: Value) -> _Layer:
        """Check the attributes. `hidden_size`: size of a state; 0 to infer it from the recurrent weights r."""
        require(direction in DIRECTIONS, f"knows no direction {direction!r}")
        require(r.type.rank == 3, f"R has shape {list(r.type.shape)}, not [directions, gates * size, size]")
        return cls(cell, direction, layout, hidden_size or r.type.shape[-1])


@dataclass(frozen=True)
class _Functions:
    """Activations as ONNX has them: alphas and betas are those of the functions that have one."""

    names: Sequence[str]
    alphas: Sequence[float]
    betas: Sequence[float]

    def attributes(self, layer: _Layer) -> tuple[tuple[str, ...], tuple[float, ...], tuple[float, ...]]:
        """Return the names, alphas and betas of the op, which are empty if the functions are the default ones."""
        defaults = DEFAULT_ACTIVATIONS[layer.cell] * layer.directions
        given = [n.lower() for n in self.names] or [n.replace("_", "") for n in defaults]
        require(len(given) == len(defaults), f"{len(given)} activations, not {len(defaults)}")
        for name in given:
            require(name in _NAMES, f"knows no activation {name!r}")
        names = tuple(_NAMES[name] for name in given)
        if names == defaults:
            return (), (), ()
        left = (list(self.alphas), list(self.betas))
        numbers: tuple[list[float], list[float]] = ([], [])
        for name in names:
            for default, rest, made in zip(ACTIVATIONS[name], left, numbers, strict=True):
                made.append(0.0 if default is None else rest.pop(0) if rest else default)
        return names, tuple(numbers[0]), tuple(numbers[1])


def _imported(
    g: Emitter, layer: _Layer, operands: _Operands, op: Recurrent, parameter: Value | None = None
) -> tuple[Value, ...]:
    """Import a layer. Returns Y, which has the first state of each step, and the last value of each state.

    parameter: peepholes; None to take the bias of a GRU's gate h.
    """
    x, layout, count, size = operands.x, layer.layout, layer.directions, layer.size
    require(x.type.rank == 3, f"takes [steps, batch, size], not {list(x.type.shape)}")
    if layout:
        x = g(Transpose((1, 0, 2)), x)
    steps, batch, _ = x.type.shape
    require(steps > 0, "a sequence of no steps")
    first = (batch, count, size) if layout else (count, batch, size)
    for state in filter(None, operands.initial):
        require(state.type.shape == first, f"an initial state has shape {list(state.type.shape)}, not {list(first)}")
    _check_weights(layer, operands)
    bias, last = _biases(g, layer, operands.b, op.linear_before_reset)
    zeros = TensorType((count, batch, size), x.type.dtype)
    states = [g.full(zeros, np.zeros((), zeros.dtype.numpy)) if v is None else v for v in operands.initial]
    if layout:
        states = [v if operands.initial[i] is None else g(Transpose((1, 0, 2)), v) for i, v in enumerate(states)]
    more = [v for v in (parameter or last, operands.lengths) if v is not None]
    y, *finals = g.many(op, _product(g, x, operands.w, bias), operands.r, *states, *more)
    y = g.reshape(y, (steps, batch, count, size))
    if layout:
        return (g(Transpose((1, 0, 2, 3)), y), *(g(Transpose((1, 0, 2)), v) for v in finals))
    y = g(Transpose((0, 2, 1, 3)), y) if count > 1 else g.reshape(y, (steps, 1, batch, size))
    return (y, *finals)


def _check_weights(layer: _Layer, operands: _Operands) -> None:
    w, r, b = operands.w, operands.r, operands.b
    count, width, size = layer.directions, layer.gates * layer.size, layer.size
    of = f"{count} directions of {layer.gates}x{size}"
    require(w.type.shape == (count, width, operands.x.type.shape[-1]), f"W {w.type} for {of}")
    require(r.type.shape == (count, width, size), f"R {r.type} for {of}")
    require(b is None or b.type.shape == (count, 2 * width), f"B {b and b.type}, not [{count},{2 * width}]")


def _biases(g: Emitter, layer: _Layer, b: Value | None, linear_before_reset: bool) -> tuple[Value | None, Value | None]:
    """Return the bias of the product of the input, and that of h @ r in a GRU's gate h if a gate multiplies that."""
    if b is None:
        return None, None
    width, size = layer.gates * layer.size, layer.size
    of_x, of_h, last = g.window(b, 1, 0, width), g.window(b, 1, width, width), None
    if linear_before_reset:
        last = g.window(of_h, 1, 2 * size, size)
        zeros = g.full(last.type, np.zeros((), last.type.dtype.numpy))
        of_h = g(Concat(1), g.window(of_h, 1, 0, 2 * size), zeros)
    return g(Reshape((layer.directions * width,)), g(pw("add"), of_x, of_h)), last


def _product(g: Emitter, x: Value, w: Value, bias: Value | None) -> Value:
    """Multiply the input of all steps with the weights of all directions: [T, B, D*G*H].

    Weights that are the identity are left out: that is how a graph is exported (`fusec.exporters.onnx_recurrent`).
    """
    count, width, inputs = w.type.shape
    reshaped = w.node is not None and isinstance(w.node.op, Reshape)
    literal = w.node.operands[0].literal if reshaped and w.node is not None else w.literal
    if literal is None or count * width != inputs or not _is_identity(literal, inputs):
        x = g(MatMul(), x, g(Transpose((1, 0)), g.reshape(w, (count * width, inputs))))
    return x if bias is None else g(pw("add"), x, bias)


def _is_identity(literal: Literal, count: int) -> bool:
    return np.array_equal(literal.array.reshape(count, count), np.eye(count))


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
    layer = _Layer.of("rnn", direction, layout, hidden_size, r)
    # the default of the attribute is for two directions
    functions = _Functions(activations[: layer.directions], activation_alpha, activation_beta)
    op = Recurrent("rnn", direction, *functions.attributes(layer), clip)
    return _imported(g, layer, _Operands(x, w, r, b, lengths, [initial_h]), op)


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
    layer = _Layer.of("gru", direction, layout, hidden_size, r)
    functions = _Functions(activations, activation_alpha, activation_beta)
    op = Recurrent("gru", direction, *functions.attributes(layer), clip, False, bool(linear_before_reset))
    return _imported(g, layer, _Operands(x, w, r, b, lengths, [initial_h]), op)


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
    layer = _Layer.of("lstm", direction, layout, hidden_size, r)
    wanted = (layer.directions, 3 * layer.size)
    given = wanted if peepholes is None else peepholes.type.shape
    require(given == wanted, f"P has shape {list(given)}, not {list(wanted)}")
    functions = _Functions(activations, activation_alpha, activation_beta)
    op = Recurrent("lstm", direction, *functions.attributes(layer), clip, bool(input_forget))
    return _imported(g, layer, _Operands(x, w, r, b, lengths, [initial_h, initial_c]), op, peepholes)


TABLE: Table = {
    ("RNN", 7): rnn,
    ("GRU", 7): gru,
    ("LSTM", 7): lstm,
}
