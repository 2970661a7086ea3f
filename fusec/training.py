"""What turns gradients into a training step: optimisers as graph functions, and loss scaling for fp16.

Each takes a builder, parameters and their gradients, adds what it keeps beside a parameter (`<name>.momentum`…) to
the state, and says what replaces it: one graph, so one program, holds forward, backward and update.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusec.builder import Builder, Tensor
from fusec.gradients import backward
from fusec.ir import DType
from fusec.ops import AllFinite, Cast

Rate = float | Tensor  # a tensor, say an input, lets it change from step to step


def sgd(
    b: Builder,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    rate: Rate,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    keep: Tensor | None = None,
) -> None:
    """p - rate * v with v = momentum * v + g, as PyTorch counts it. `keep` (bool): where it is false, nothing moves."""
    for p, g in zip(parameters, gradients, strict=True):
        g = _of(g, p)
        if weight_decay:
            g = g + p * weight_decay
        move = g
        if momentum:
            held = _slot(b, p, "momentum")
            velocity = held * momentum + g
            _update(b, held, velocity, keep)
            move = g + velocity * momentum if nesterov else velocity
        _update(b, p, p - move * rate, keep)


def adam(
    b: Builder,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    rate: Rate,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    keep: Tensor | None = None,
) -> None:
    """Adam (Kingma and Ba, 2015); `decoupled` takes the decay from the parameter, not the gradient: AdamW."""
    count = b.parameter("adam.step", np.zeros((), np.float32))
    step = count + 1.0
    _update(b, count, step, keep)
    first, second = (1.0 - beta**step for beta in betas)
    for p, g in zip(parameters, gradients, strict=True):
        g = _of(g, p)
        if weight_decay and not decoupled:
            g = g + p * weight_decay
        held, squares = _slot(b, p, "mean"), _slot(b, p, "square")
        mean = held * betas[0] + g * (1.0 - betas[0])
        square = squares * betas[1] + g * g * (1.0 - betas[1])
        _update(b, held, mean, keep)
        _update(b, squares, square, keep)
        move = (mean / first) / ((square / second).sqrt() + epsilon)
        if weight_decay and decoupled:
            move = move + p * weight_decay
        _update(b, p, p - move * rate, keep)


def adamw(
    b: Builder,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    rate: Rate,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
    keep: Tensor | None = None,
) -> None:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""
    adam(b, parameters, gradients, rate, betas, epsilon, weight_decay, True, keep)


def scaled_backward(
    loss: Tensor, parameters: Sequence[Tensor], growth: int = 2000, start: float = 2.0**15
) -> tuple[list[Tensor], Tensor]:
    """Gradients of a loss by way of a larger one, whose own do not vanish in fp16; and whether all are finite.

    The factor is state: halved where a gradient is not finite (pass the second result to an optimiser as `keep`),
    doubled after `growth` steps in which all were.
    """
    b = loss.builder
    scale, good = b.parameter("loss.scale", np.float32(start)), b.parameter("loss.good", np.zeros((), np.float32))
    found = backward(loss.astype(DType.F32) * scale, parameters)
    gradients = [g.astype(DType.F32) / scale for g in found]
    finite = b.apply(AllFinite(), *map(_narrowest, found))
    steps = b.where(finite, good + 1.0, 0.0)
    full = steps >= float(growth)
    b.update(good, b.where(full, 0.0, steps))
    b.update(scale, b.where(finite, b.where(full, scale * 2.0, scale), (scale * 0.5).maximum(1.0)))
    return gradients, finite


def _narrowest(gradient: Tensor) -> Tensor:
    """What a gradient was cast from, if it was narrower: as finite, and the cast need not be stored."""
    node = gradient.value.node
    if node is None or not isinstance(node.op, Cast):
        return gradient
    source = node.operands[0]
    fits = source.type.dtype.is_float and source.type.dtype.itemsize <= gradient.dtype.itemsize
    return Tensor(gradient.builder, source) if fits else gradient


def _of(gradient: Tensor, parameter: Tensor) -> Tensor:
    return gradient.astype(parameter.dtype)


def _slot(b: Builder, parameter: Tensor, kind: str) -> Tensor:
    """What an optimiser keeps beside a parameter, zero at first."""
    return b.parameter(f"{parameter.name}.{kind}", np.zeros(parameter.shape, parameter.dtype.numpy))


def _update(b: Builder, old: Tensor, new: Tensor, keep: Tensor | None) -> None:
    b.update(old, new if keep is None else b.where(keep, new, old))
