"""Add optimisers to a graph: SGD with momentum, Adam and AdamW.

Each takes a builder, parameters and their gradients, adds what it keeps beside a parameter (`<name>.momentum`…) to
the state, and says what replaces it: one graph, so one program, holds forward, backward and update.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusec.builder import Builder, Tensor

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


def _of(gradient: Tensor, parameter: Tensor) -> Tensor:
    return gradient.astype(parameter.dtype)


def _slot(b: Builder, parameter: Tensor, kind: str) -> Tensor:
    """What an optimiser keeps beside a parameter, zero at first."""
    return b.parameter(f"{parameter.name}.{kind}", np.zeros(parameter.shape, parameter.dtype.numpy))


def _update(b: Builder, old: Tensor, new: Tensor, keep: Tensor | None) -> None:
    b.update(old, new if keep is None else b.where(keep, new, old))
