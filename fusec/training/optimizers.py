"""Add optimisers to a graph: SGD with momentum, Adam and AdamW.

An optimiser takes a builder, parameters and their gradients. It adds its own state (`<name>.momentum`…) as parameters
and updates all of them. Forward, backward and update are therefore one graph and one program.

Arguments that all of them share:
rate: learning rate; a Tensor, for example an input, can change from step to step.
keep: a bool Tensor; where it is false, the step changes neither parameters nor state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusec.builder import Builder, Tensor

Rate = float | Tensor


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
    """Update p to p - rate * v with v = momentum * v + g, as PyTorch does."""
    for p, g in _pairs(b, parameters, gradients):
        g = g.astype(p.dtype)
        if weight_decay:
            g = g + p * weight_decay
        move = g
        if momentum:
            last = _slot(b, p, "momentum")
            velocity = last * momentum + g
            _update(b, last, velocity, keep)
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
    """Update parameters by Adam (Kingma and Ba, 2015).

    decoupled: subtract the weight decay from the parameter, as AdamW does, not from the gradient.
    """
    pairs = _pairs(b, parameters, gradients)
    count = b.parameter("adam.step", np.zeros((), np.float32))
    step = count + 1.0
    _update(b, count, step, keep)
    first, second = (1.0 - beta**step for beta in betas)
    for p, g in pairs:
        g = g.astype(p.dtype)
        if weight_decay and not decoupled:
            g = g + p * weight_decay
        last_mean, last_square = _slot(b, p, "mean"), _slot(b, p, "square")
        mean = last_mean * betas[0] + g * (1.0 - betas[0])
        square = last_square * betas[1] + g * g * (1.0 - betas[1])
        _update(b, last_mean, mean, keep)
        _update(b, last_square, square, keep)
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
    """Update parameters by Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""
    adam(b, parameters, gradients, rate, betas, epsilon, weight_decay, True, keep)


def _pairs(b: Builder, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return each parameter with its gradient. Raises ModelError if these are not as many, or of another shape."""
    if len(parameters) != len(gradients):
        raise b.error(f"{len(parameters)} parameters and {len(gradients)} gradients")
    for p, g in zip(parameters, gradients, strict=True):
        if p.shape != g.shape:
            raise b.error(f"the gradient {g!r} has another shape than the parameter {p!r}")
    return list(zip(parameters, gradients, strict=True))


def _slot(b: Builder, parameter: Tensor, kind: str) -> Tensor:
    """Add a parameter for an optimiser's state of `parameter`, zero at first."""
    return b.parameter(f"{parameter.name}.{kind}", np.zeros(parameter.shape, parameter.dtype.numpy))


def _update(b: Builder, old: Tensor, new: Tensor, keep: Tensor | None) -> None:
    b.update(old, new if keep is None else b.where(keep, new, old))
