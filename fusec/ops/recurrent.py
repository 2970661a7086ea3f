"""Define LSTM, GRU and RNN as one op, so that a kernel can run all steps of a sequence in one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from fusec.ir import Array, DType, Op, TensorType
from fusec.ops.pointwise import pw
from fusec.ops.spec import require, require_arity, require_float, wide
from fusec.system.dataclass import dataclass

GATES: Mapping[str, int] = {"lstm": 4, "gru": 3, "rnn": 1}
DEFAULT_ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "lstm": ("sigmoid", "tanh", "tanh"),
    "gru": ("sigmoid", "tanh"),
    "rnn": ("tanh",),
}
_SLOPES = tuple(float(np.float32(slope)) for slope in (0.01, 0.2))  # because attributes of ONNX are fp32
# Activations, with the defaults of their alpha and beta (None if they have none).
ACTIVATIONS: Mapping[str, tuple[float | None, float | None]] = {
    "relu": (None, None),
    "tanh": (None, None),
    "sigmoid": (None, None),
    "softsign": (None, None),
    "softplus": (None, None),
    "affine": (1.0, 0.0),
    "leaky_relu": (_SLOPES[0], None),
    "thresholded_relu": (1.0, None),
    "scaled_tanh": (1.0, 1.0),
    "hard_sigmoid": (_SLOPES[1], 0.5),
    "elu": (1.0, None),
}
DIRECTIONS = ("forward", "reverse", "bidirectional")
Activation = tuple[str, float, float]  # name, alpha, beta


@dataclass(frozen=True)
class Recurrent(Op):
    """A layer of LSTM, GRU or RNN (`cell`) over x[T, B, D*G*H], the product of its input with the input weights.

    T steps, batch B, D directions, G gates (LSTM i, o, f, c; GRU z, r, h; RNN one), states of H. x has all biases but
    the one below. Further operands, in this order: weights r[D, G*H, H], first state h[D, B, H], first cell state
    c[D, B, H] (LSTM only); then, where wanted, peepholes[D, 3*H] (LSTM: i, o, f) or the bias[D, H] of h @ r of gate h
    (GRU with `linear_before_reset`); then integer lengths[B]. Results: y[T, B, D*H], the last h[D, B, H], and the last
    c (LSTM). After the end of a sequence y is zero and states stay.

    `activations`: D times those of the cell, default sigmoid for gates and tanh for states; `alphas`, `betas`: one
    each. `clip`: bound of what activations of gates read, 0 for none. `input_forget`: f = 1 - i.
    `linear_before_reset`: the reset gate multiplies h @ r, not h.
    """

    cell: str
    direction: str = "forward"
    activations: tuple[str, ...] = ()
    alphas: tuple[float, ...] = ()
    betas: tuple[float, ...] = ()
    clip: float = 0.0
    input_forget: bool = False
    linear_before_reset: bool = False
    name: ClassVar[str] = "recurrent"

    @property
    def gates(self) -> int:
        return GATES[self.cell]

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    @property
    def states(self) -> int:
        """Return the number of states: h, and c of an LSTM."""
        return 2 if self.cell == "lstm" else 1

    def is_backward(self, direction: int) -> bool:
        """Tell if direction number `direction` begins at the end of a sequence."""
        return self.direction == "reverse" or direction == 1

    def functions(self) -> list[tuple[Activation, ...]]:
        """Return the activations of each direction, with alpha and beta."""
        names = self.activations or DEFAULT_ACTIVATIONS[self.cell] * self.directions
        defaults = [ACTIVATIONS[name] for name in names]
        alphas = self.alphas or [alpha or 0.0 for alpha, _ in defaults]
        betas = self.betas or [beta or 0.0 for _, beta in defaults]
        each, every = len(names) // self.directions, list(zip(names, alphas, betas, strict=True))
        return [tuple(every[d * each : (d + 1) * each]) for d in range(self.directions)]

    def places(self, dtypes: Sequence[DType]) -> tuple[int | None, int | None]:
        """Return the places of the parameter (peepholes or bias) and of the lengths among the operands.

        dtypes: dtypes of all operands.
        """
        first, last = 2 + self.states, len(dtypes) - 1
        lengths = None if last < first or dtypes[last].is_float else last
        return (first if last >= first and dtypes[first].is_float else None), lengths

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require(self.cell in ("lstm", "gru", "rnn"), f"{self.name}: knows no cell {self.cell!r}")
        known = self.direction in ("forward", "reverse", "bidirectional")
        require(known, f"{self.name}: knows no direction {self.direction!r}")
        self._check_attributes()
        require_arity(self.name, operands, 2 + self.states, 4 + self.states)
        types = _Types(self.cell, self.directions, self.gates)
        lengths = None if operands[-1].dtype.is_float else operands[-1]
        floats = operands if lengths is None else operands[:-1]
        require_float(self.name, *floats)
        x, r, *states = floats
        require(x.rank == 3 and r.rank == 3, f"{self.name}: x is {x}, r is {r}; both need three dims")
        steps, batch, size = *x.shape[:2], r.shape[2]
        types.require("r", r, (self.directions, self.gates * size, size))
        types.require("x", x, (steps, batch, self.directions * self.gates * size))
        for letter, state in zip("hc", states[: self.states], strict=False):
            types.require(letter, state, (self.directions, batch, size))
        for parameter in states[self.states :]:
            require(self._has_parameter, f"{self.name}: {self.cell} takes no parameter {parameter}")
            wide = 3 * size if self.cell == "lstm" else size
            types.require("the parameter", parameter, (self.directions, wide))
        require(len(states) >= self.states, f"{self.name}: {self.cell} has {self.states} states, not {len(states)}")
        if lengths is not None:
            require(lengths.dtype in (DType.I32, DType.I64), f"{self.name}: lengths of {lengths.dtype.value}")
            types.require("lengths", lengths, (batch,))
        last = TensorType((self.directions, batch, size), x.dtype)
        return (TensorType((steps, batch, self.directions * size), x.dtype), *[last] * self.states)

    @property
    def _has_parameter(self) -> bool:
        return self.cell == "lstm" or (self.cell == "gru" and self.linear_before_reset)

    def _check_attributes(self) -> None:
        name = self.name
        require(self.clip >= 0, f"{name}: clip is {self.clip}")
        require(not self.input_forget or self.cell == "lstm", f"{name}: input_forget is for lstm")
        require(not self.linear_before_reset or self.cell == "gru", f"{name}: linear_before_reset is for gru")
        count = len(DEFAULT_ACTIVATIONS[self.cell]) * self.directions
        for what, given in (("activations", self.activations), ("alphas", self.alphas), ("betas", self.betas)):
            require(len(given) in (0, count), f"{name}: {len(given)} {what}, not {count}")
        for each in self.activations:
            require(each in ACTIVATIONS, f"{name}: knows no activation {each!r}")

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        dtype = operands[0].dtype
        places = self.places([DType.of(v.dtype) for v in operands])
        parameter, lengths = (None if at is None else operands[at] for at in places)
        x, r, *states = (wide(v) for v in operands[: 2 + self.states])
        with np.errstate(all="ignore"):
            results = _Loop(self, xp, r, None if parameter is None else wide(parameter)).run(x, states, lengths)
        return tuple(v.astype(dtype) for v in results)


@dataclass(frozen=True)
class _Types:
    """Checks of shapes, with a message that names what they are checked for."""

    cell: str
    directions: int
    gates: int

    def require(self, what: str, given: TensorType, shape: tuple[int, ...]) -> None:
        of = f"{self.directions} directions of {self.gates} gates"
        require(given.shape == shape, f"recurrent: {what} has shape {list(given.shape)}, not {list(shape)} ({of})")


@dataclass(frozen=True, eq=False)
class _Loop:
    """The steps of a layer, for all directions at the same time."""

    op: Recurrent
    xp: Any
    r: Array
    parameter: Array | None

    def run(self, x: Array, states: list[Array], lengths: Array | None) -> list[Array]:
        op, xp = self.op, self.xp
        (steps, batch, _), count = x.shape, op.directions
        along = self._in_order(x.reshape(steps, batch, count, -1).transpose(0, 2, 1, 3))
        transposed = self.r.swapaxes(1, 2)
        runs = None
        if lengths is not None:
            every = xp.arange(steps)[:, None, None, None] < lengths.reshape(1, 1, batch, 1)
            runs = self._in_order(xp.broadcast_to(every, (steps, count, batch, 1)))
        made: list[Array] = []
        for t in range(steps):
            now = self._step(along[t], transposed, states)
            y = now[0]
            if runs is not None:
                now = [xp.where(runs[t], new, old) for new, old in zip(now, states, strict=True)]
                y = xp.where(runs[t], y, y.dtype.type(0))
            states = now
            made.append(y)
        size = self.r.shape[-1]
        whole = self._in_order(xp.stack(made)) if made else xp.empty((0, count, batch, size), x.dtype)
        return [whole.transpose(0, 2, 1, 3).reshape(steps, batch, count * size), *states]

    def _in_order(self, x: Array) -> Array:
        """Reverse x[T, D, B, N] in time, in the directions that begin at the end.

        There, states stay as they are until the end of their sequence.
        """
        parts = [x[::-1, d] if self.op.is_backward(d) else x[:, d] for d in range(x.shape[1])]
        return self.xp.stack(parts, axis=1)

    def _step(self, x: Array, r: Array, states: list[Array]) -> list[Array]:
        """Return the states after a step, from x[D, B, G*H] and the states before it."""
        match self.op.cell:
            case "lstm":
                return self._lstm(x + self.xp.matmul(states[0], r), *states)
            case "gru":
                return [self._gru(x, r, states[0])]
            case _:
                return [self._activate(0, x + self.xp.matmul(states[0], r))]

    def _lstm(self, total: Array, h: Array, c: Array) -> list[Array]:
        size = h.shape[-1]
        i, o, f, new = (total[..., k * size : (k + 1) * size] for k in range(4))
        i = self._activate(0, i + self._peephole(0, c))
        f = 1 - i if self.op.input_forget else self._activate(0, f + self._peephole(2, c))
        c = f * c + i * self._activate(1, new)
        return [self._activate(0, o + self._peephole(1, c)) * self._activate(2, c, clips=False), c]

    def _peephole(self, k: int, c: Array) -> Array:
        if self.parameter is None:
            return c.dtype.type(0)
        size = c.shape[-1]
        return self.parameter[:, None, k * size : (k + 1) * size] * c

    def _gru(self, x: Array, r: Array, h: Array) -> Array:
        matmul, size = self.xp.matmul, h.shape[-1]
        pair = self._activate(0, x[..., : 2 * size] + matmul(h, r[..., : 2 * size]))
        z, reset, last = pair[..., :size], pair[..., size:], r[..., 2 * size :]
        if self.op.linear_before_reset:
            bias = 0 if self.parameter is None else self.parameter[:, None]
            hidden = reset * (matmul(h, last) + bias)
        else:
            hidden = matmul(reset * h, last)
        return (1 - z) * self._activate(1, x[..., 2 * size :] + hidden) + z * h

    def _activate(self, place: int, x: Array, clips: bool = True) -> Array:
        """Apply activation number `place` of each direction to x[D, B, N]."""
        clip = self.op.clip
        if clip and clips:
            (x,) = pw("clip", min=-clip, max=clip).reference(self.xp, x)
        functions = [each[place] for each in self.op.functions()]
        if len(set(functions)) == 1:
            return activated(self.xp, functions[0], x)
        return self.xp.stack([activated(self.xp, f, x[d]) for d, f in enumerate(functions)])


def activated(xp: Any, activation: Activation, x: Array) -> Array:
    """Apply an activation to an array."""

    def apply(name: str, *operands: Array, **attributes: float) -> Array:
        (y,) = pw(name, **attributes).reference(xp, *operands)
        return y

    return compose(activation, x, apply, lambda number: xp.asarray(number, x.dtype))


def compose(activation: Activation, x: Any, apply: Callable[..., Any], scalar: Callable[[float], Any]) -> Any:
    """Compute an activation by pointwise ops, which `apply(name, *operands, **attributes)` applies.

    scalar: makes an operand of a number.
    """
    name, alpha, beta = activation
    unary = partial(apply, name)
    match name:
        case "leaky_relu" | "thresholded_relu" | "elu":
            return unary(x, alpha=alpha)
        case "hard_sigmoid":
            return unary(x, alpha=alpha, beta=beta)
        case "affine":
            return apply("add", apply("mul", x, scalar(alpha)), scalar(beta))
        case "scaled_tanh":
            return apply("mul", apply("tanh", apply("mul", x, scalar(beta))), scalar(alpha))
        case _:
            return unary(x)
