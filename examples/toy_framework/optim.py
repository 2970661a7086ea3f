"""Define optimisers: their options. fusec adds the arithmetic to the program that computes the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from examples.toy_framework.tape import Tape, Tensor
from fusec import training


@dataclass(frozen=True)
class SGD:
    momentum: float = 0.9
    weight_decay: float = 0.0

    def add(self, tape: Tape, parameters: Sequence[Tensor], gradients: Sequence[Tensor], rate: Tensor) -> None:
        training.sgd(tape, parameters, gradients, rate, self.momentum, self.weight_decay)


@dataclass(frozen=True)
class AdamW:
    weight_decay: float = 0.01

    def add(self, tape: Tape, parameters: Sequence[Tensor], gradients: Sequence[Tensor], rate: Tensor) -> None:
        training.adamw(tape, parameters, gradients, rate, weight_decay=self.weight_decay)
