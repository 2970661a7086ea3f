"""The tape: a graph under construction, and what a module needs to know while it runs on it."""

from __future__ import annotations

from typing import Any

import numpy as np

import fusec
from fusec.ir import print_graph

Tensor = fusec.Tensor  # lazy: an operator adds a node to the tape, nothing is computed
Array = np.ndarray[Any, Any]

_compiled: dict[str, fusec.Executable] = {}  # by the text of the graph: the same work is compiled once


class Tape(fusec.Builder):
    """A builder that knows whether it is for training, and holds the arrays its leaves stand for.

    `frozen`: parameters become constants, as an exported model has them.
    """

    def __init__(self, training: bool = False, frozen: bool = False, seed: int = 0):
        super().__init__("f32", "toy")
        self.training = training
        self.frozen = frozen
        self.tensors: dict[int, Tensor] = {}  # of parameters and buffers, by identity
        self.arrays: dict[str, Array] = {}
        self._seed = seed
        self._random: Tensor | None = None

    def leaf(self, array: Any) -> Tensor:
        """A tensor that stands for an array."""
        held = np.asarray(array)
        name = f"leaf{len(self.arrays)}"
        self.arrays[name] = held
        return self.input(name, held.shape, fusec.DType.of(held.dtype))

    @property
    def random(self) -> Tensor:
        """The state random numbers follow from: a seed, and the number of the step."""
        if self._random is None:
            self._random = self.parameter("random", np.array([self._seed, 0], np.uint64))
            self.update(self._random, self._random + np.array([0, 1], np.uint64))
        return self._random


def numpy(tensor: Tensor, target: str = "cpu") -> Array:
    """Compute a tensor of a tape of leaves: what it depends on becomes one program, compiled when first met."""
    tape = tensor.builder
    assert isinstance(tape, Tape)
    only = tape.snapshot(tensor)
    key = print_graph(only)
    if key not in _compiled:
        _compiled[key] = fusec.compile(only, target=target)
    return _compiled[key].run(None, {v.name: tape.arrays[v.name] for v in only.inputs})[0]
