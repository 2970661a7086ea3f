"""Define the tape: a graph under construction, with what modules must know while they add to it."""

from __future__ import annotations

from typing import Any

import numpy as np

import fusec
from fusec.ir import print_graph

Tensor = fusec.Tensor  # lazy: an operator adds a node to the tape, nothing is computed
Array = np.ndarray[Any, Any]

_compiled: dict[str, fusec.Executable] = {}  # by the text of the graph, so that equal graphs are compiled once


class Tape(fusec.Builder):
    """A builder for training or inference that holds the arrays of its leaves.

    frozen: parameters become constants, as in an exported model.
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
        """Add an input tensor for an array."""
        array = np.asarray(array)
        name = f"leaf{len(self.arrays)}"
        self.arrays[name] = array
        return self.input(name, array.shape, fusec.DType.of(array.dtype))

    @property
    def random(self) -> Tensor:
        """Return the state of the random numbers: a seed, and the number of the step."""
        if self._random is None:
            self._random = self.parameter("random", np.array([self._seed, 0], np.uint64))
            self.update(self._random, self._random + np.array([0, 1], np.uint64))
        return self._random


def numpy(tensor: Tensor, target: str = "cpu") -> Array:
    """Compute a tensor of a tape of leaves: fusec compiles all that it depends on as one program."""
    tape = tensor.builder
    assert isinstance(tape, Tape)
    only = tape.snapshot(tensor)
    key = print_graph(only)
    if key not in _compiled:
        _compiled[key] = fusec.compile(only, target=target)
    return _compiled[key].run(None, {v.name: tape.arrays[v.name] for v in only.inputs})[0]
