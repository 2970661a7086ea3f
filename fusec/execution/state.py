"""Hold the inputs of a program that stay on the device between calls, and replace them after a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusec.errors import ExecutionError
from fusec.execution.step_binding import Steps
from fusec.ir import Array, Value, quote
from fusec.lowering.packing import unpack
from fusec.schedule.buffer_donation import in_place, reads
from fusec.schedule.program import Program


class DeviceState:
    """Inputs that stay on the device, by name, and the outputs that replace them after a call.

    values: the graph inputs that are state.
    buffers: the flat memory of those that have a value.
    updates: for a graph input, the value that replaces it.
    donated: by stored value, the old value that it is written over. An update may be a view of the stored value.
    """

    def __init__(self, program: Program, outputs: Mapping[str, str], xp: Any):
        """Plan the updates. outputs: the output that replaces each input of the state, or an empty name."""
        graph = program.graph
        inputs = {v.name: v for v in graph.inputs}
        results = dict(zip(graph.output_names, graph.outputs, strict=True))
        self.values = {name: inputs[name] for name in outputs}
        self.updates = {inputs[name]: results[output] for name, output in outputs.items() if output}
        self.donated = in_place(program, self.updates)
        self.buffers: dict[str, Array] = {}
        self._xp = xp
        self._old_outputs = [v for v in graph.outputs if reads(program, v) in self.updates]
        self._saved: dict[Value, Array] = {}

    def buffer(self, name: str) -> Array:
        """Return the memory of an input of the state; zeros if it has none yet."""
        if name not in self.buffers:
            type = self.values[name].type
            memory = self._xp.zeros(type.size * type.dtype.itemsize, np.uint8)
            self.buffers[name] = memory.view(type.dtype.numpy)  # because CuPy makes no arrays of bf16, but views them
        return self.buffers[name]

    def require_values(self) -> None:
        """Raise ExecutionError if an input of the state has no value."""
        for name in self.values:
            if name not in self.buffers:
                raise ExecutionError(f"state {quote(name)} has no value: bind it first")

    @property
    def stored(self) -> set[Value]:
        """Return the values that need no place in the arena, because their memory is that of the state."""
        return {*self.values.values(), *self.donated}

    def allocate(self) -> dict[Value, Array]:
        """Return the memory of those values, and allocate memory for outputs that return a replaced value."""
        self._saved = {v: self._xp.empty(v.type.size, v.type.dtype.numpy) for v in self._old_outputs}
        memory = {value: self.buffers[name] for name, value in self.values.items()}
        return memory | {new: memory[old] for new, old in self.donated.items()}

    def replace(self, steps: Steps) -> None:
        """Replace the state after the last step.

        Outputs that return an old value are saved first. Then the updates that could not be written in place are
        copied.
        """
        for value, saved in self._saved.items():
            saved[...] = steps.buffer(value)[: saved.size]
        written = set(self.donated.values())
        for old, new in self.updates.items():
            if old not in written:
                unpack(steps.buffer(old), old.type)[...] = unpack(self.output(new, steps), new.type)

    def output(self, value: Value, steps: Steps) -> Array:
        """Return the flat memory from which an output is read after the last step."""
        return self._saved[value] if value in self._saved else steps.buffer(value)
