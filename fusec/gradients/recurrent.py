"""Differentiate LSTM, GRU and RNN by writing out all their steps as ops."""

from __future__ import annotations

from collections.abc import Mapping

from fusec.builder import Builder, Tensor
from fusec.errors import VerifyError
from fusec.gradients.core import BackwardStep, Rule, by_formula, wide
from fusec.ops import Recurrent
from fusec.ops.recurrent import compose
from fusec.system.dataclass import dataclass

MAX_STEPS = 4096  # of a sequence, because each adds about 40 ops


@dataclass(frozen=True)
class _Direction:
    """One direction of a layer: weights r[H, G*H], peepholes or bias, and lengths[B, 1]."""

    b: Builder
    op: Recurrent
    number: int
    r: Tensor
    parameter: Tensor | None
    lengths: Tensor | None

    def run(self, x: Tensor, states: list[Tensor]) -> list[Tensor]:
        """Return y[T, B, H] and the last states, from x[T, B, G*H] and the first states[B, H]."""
        steps = x.shape[0]
        backward = self.op.is_backward(self.number)
        made: list[Tensor] = []
        for t in reversed(range(steps)) if backward else range(steps):
            now = self._step(x[t], states)
            y = now[0]
            if self.lengths is not None:
                runs = self.lengths > t
                now = [self.b.where(runs, new, old) for new, old in zip(now, states, strict=True)]
                y = self.b.where(runs, y, 0.0)
            states = now
            made.append(y.reshape(1, *y.shape))
        return [self.b.concat(made[::-1] if backward else made, 0), *states]

    def _step(self, x: Tensor, states: list[Tensor]) -> list[Tensor]:
        match self.op.cell:
            case "lstm":
                return self._lstm(x + states[0] @ self.r, *states)
            case "gru":
                return [self._gru(x, states[0])]
            case _:
                return [self._activate(0, x + states[0] @ self.r)]

    def _lstm(self, total: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
        i, o, f, new = (self._part(total, k) for k in range(4))
        i = self._activate(0, self._with_peephole(i, 0, c))
        f = 1.0 - i if self.op.input_forget else self._activate(0, self._with_peephole(f, 2, c))
        c = f * c + i * self._activate(1, new)
        return [self._activate(0, self._with_peephole(o, 1, c)) * self._activate(2, c, clips=False), c]

    def _with_peephole(self, gate: Tensor, k: int, c: Tensor) -> Tensor:
        return gate if self.parameter is None else gate + self._part(self.parameter, k) * c

    def _gru(self, x: Tensor, h: Tensor) -> Tensor:
        size = h.shape[-1]
        pair = self._activate(0, x[:, : 2 * size] + h @ self.r[:, : 2 * size])
        z, reset, last = self._part(pair, 0), self._part(pair, 1), self._part(self.r, 2)
        if self.op.linear_before_reset:
            hidden = h @ last
            hidden = reset * (hidden if self.parameter is None else hidden + self.parameter)
        else:
            hidden = (reset * h) @ last
        return (1.0 - z) * self._activate(1, self._part(x, 2) + hidden) + z * h

    def _part(self, x: Tensor, k: int) -> Tensor:
        size = self.r.shape[0]
        return x[..., k * size : (k + 1) * size]

    def _activate(self, place: int, x: Tensor, clips: bool = True) -> Tensor:
        clip = self.op.clip
        if clip and clips:
            x = x.clip(-clip, clip)
        activation = self.op.functions()[self.number][place]

        def apply(name: str, *operands: Tensor, **attributes: float) -> Tensor:
            return self.b.pointwise(name, *operands, **attributes)

        return compose(activation, x, apply, lambda number: self.b.constant(number, x.dtype))


def _recurrent(step: BackwardStep, *operands: Tensor) -> list[Tensor]:
    op: Recurrent = step.op
    x = operands[0]
    steps, batch, _ = x.shape
    if not 0 < steps <= MAX_STEPS:
        raise VerifyError(f"{step.node!r}: a gradient over {steps} steps; from 1 to {MAX_STEPS} are supported")
    count, width = op.directions, op.gates * operands[1].shape[-1]
    places = op.places([v.dtype for v in operands])
    parameter, lengths = (None if at is None else operands[at] for at in places)
    if lengths is not None:
        lengths = lengths.astype("i64").reshape(batch, 1)
    parts: list[list[Tensor]] = []
    for d in range(count):
        own = None if parameter is None else wide(parameter[d])
        direction = _Direction(step.b, op, d, wide(operands[1][d]).T, own, lengths)
        states = [wide(v[d]) for v in operands[2 : 2 + op.states]]
        parts.append(direction.run(wide(x[:, :, d * width : (d + 1) * width]), states))
    y, *states = zip(*parts, strict=True)
    whole = [step.b.concat(list(y), 2), *(step.b.concat([v.reshape(1, *v.shape) for v in of], 0) for of in states)]
    return [v.astype(x.dtype) for v in whole]


RULES: Mapping[str, Rule] = {"recurrent": by_formula(_recurrent)}
