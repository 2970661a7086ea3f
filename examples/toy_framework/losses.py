"""Losses: a tensor of one element from what a model gives and what it should have given."""

from __future__ import annotations

from examples.toy_framework.nn import tape_of
from examples.toy_framework.tape import Tensor


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the batch of minus the logarithm of the probability that the right class has."""
    return tape_of(logits).cross_entropy(logits, labels)


def mean_square(prediction: Tensor, target: Tensor) -> Tensor:
    difference = prediction - target
    return (difference * difference).mean()
