"""Train with one program for forward, loss, backward and update. A second one shares its parameters and evaluates."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

import fusec
from examples.toy_framework import nn
from examples.toy_framework.data import DataLoader
from examples.toy_framework.losses import cross_entropy
from examples.toy_framework.tape import Array, Tape, Tensor
from fusec.exporters.onnx import to_onnx
from fusec.scale.communicator import Communicator


class Optimiser(Protocol):
    def add(self, tape: Tape, parameters: list[Tensor], gradients: list[Tensor], rate: Tensor) -> None: ...


class Trainer:
    """The programs of one model, for batches of one size.

    target: as `fusec.compile` takes it.
    communicator: connects workers that train together, each with batches of its own; None: there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimiser: Optimiser,
        image: tuple[int, ...],
        batch: int,
        target: str = "cpu",
        communicator: Communicator | None = None,
    ):
        self.model = model
        self.image = image
        self.batch = batch
        self.target = target
        parameters = dict(model.named_parameters())

        tape = Tape(training=True)
        x, labels = tape.input("x", (batch, *image)), tape.input("labels", (batch,), "i64")
        rate = tape.input("rate", ())
        loss = cross_entropy(model(x), labels)
        trained = [p.on(tape) for p in parameters.values() if p.trained]
        optimiser.add(tape, trained, fusec.backward(loss, trained), rate)
        tape.output(loss=loss)
        self.training: Any = fusec.compile(tape, target=target) if communicator is None else None
        programs = (self.training,)
        if communicator is not None:
            self.training = fusec.data_parallel(tape, communicator, target=target)
            programs = self.training.programs

        tape = Tape()
        tape.output(logits=model(tape.input("x", (batch, *image))))
        self.inference = fusec.compile(tape, target=target)
        for program in programs:
            self.inference.share(program)

    def step(self, images: Array, labels: Array, rate: float) -> float:
        """Run one step of the optimiser; return the loss before it."""
        return float(self.training.step(x=images, labels=labels, rate=np.float32(rate)))

    def logits(self, images: Array) -> Array:
        """Return the model's outputs for any number of images."""
        return in_batches(lambda x: self.inference.step(x=x), images, self.batch)

    def accuracy(self, images: Array, labels: Array) -> float:
        return accuracy(self.logits(images), labels)

    def fit(self, loader: DataLoader, epochs: int, rate: float, say: Callable[[str], None] = print) -> None:
        """Train with a learning rate that rises for an epoch and falls to zero along a cosine."""
        total, done, start = epochs * len(loader), 0, time.perf_counter()
        for epoch in range(epochs):
            losses: list[float] = []
            for images, labels in loader:
                warm = min(1.0, (done + 1) / len(loader))
                now = rate * warm * 0.5 * (1.0 + math.cos(math.pi * done / total))
                losses.append(self.step(images, labels, now))
                done += 1
            if epoch % 5 == 4 or epoch + 1 == epochs:
                spent = time.perf_counter() - start
                say(f"epoch {epoch + 1:3}: loss {np.mean(losses):.4f}  {spent:5.1f} s")

    def export(self, batch: int | None = None) -> bytes:
        """Return the trained model as ONNX, with its parameters fetched from the program and frozen."""
        for name, parameter in self.model.named_parameters():
            parameter.array = self.training.value(name)
        tape = Tape(frozen=True)
        tape.output(logits=self.model(tape.input("x", (batch or self.batch, *self.image))))
        return to_onnx(tape.graph()).SerializeToString()


def in_batches(run: Callable[[Array], Array], images: Array, batch: int) -> Array:
    """Run a program for batches of one size on any number of images."""
    found: list[Array] = []
    for first in range(0, len(images), batch):
        part = images[first : first + batch]
        filled = np.concatenate([part, np.zeros((batch - len(part), *part.shape[1:]), part.dtype)])
        found.append(run(filled)[: len(part)])
    return np.concatenate(found)


def accuracy(logits: Array, labels: Array) -> float:
    return float((logits.argmax(-1) == labels).mean())
