"""Execute a compiled program: on an NVIDIA GPU through cuDNN, elsewhere through the simulator.

Both runners walk the same steps over the same packed buffers; they differ in the array module and in
what runs a cuDNN graph.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fusec.compiled import Compiled
from fusec.cudnn_graph import CudnnGraph
from fusec.errors import ExecutionError
from fusec.explain import Explanation, explain
from fusec.ir import Array, TensorType, Value, quote
from fusec.lower_cudnn import Lowered
from fusec.must_fuse import assert_fused
from fusec.program import Kind, Partition
from fusec.reference import evaluate_node
from fusec.simulate import simulate
from fusec.storage import pack, unpack
from fusec.views import view_offset

ALIGNMENT_BYTES = 16  # what cuDNN assumes of every tensor it is given


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of an executable."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Backend(Protocol):
    """Where a program runs: an array module, its memory, and what executes a cuDNN graph."""

    name: str
    xp: Any

    def from_any(self, array: Any) -> Array:
        """An array of the module from NumPy, CuPy or anything that speaks DLPack."""
        ...

    def prepare(self, graph: CudnnGraph) -> None:
        """Make the graph ready to execute."""
        ...

    def execute(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> None:
        """Run a prepared graph over flat buffers by uid."""
        ...

    def finish(self) -> None:
        """Wait for what was queued; raise ExecutionError if any of it failed."""
        ...


class SimulatorBackend:
    """cuDNN graphs in NumPy, from their own description: any machine."""

    name = "simulated"
    xp: Any = np

    def from_any(self, array: Any) -> Array:
        if isinstance(array, np.ndarray):
            return array
        if hasattr(array, "__dlpack__") and not isinstance(array, np.generic):
            return np.from_dlpack(array)
        return np.asarray(array)

    def prepare(self, graph: CudnnGraph) -> None:
        """Nothing to do: the graph is its own program."""

    def execute(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> None:
        simulate(graph, buffers)

    def finish(self) -> None:
        """NumPy has finished when it returns."""


class Executable:
    """A compiled model, ready to call. Calls from several threads take turns.

    `inputs` and `outputs` describe the interface; `compiled` holds graphs and program.
    """

    def __init__(self, compiled: Compiled, backend: Backend):
        self.compiled = compiled
        self.backend = backend
        graph = compiled.graph
        self.inputs = tuple(TensorSpec(v.name, v.type.shape, v.type.dtype.numpy) for v in graph.inputs)
        self.outputs = tuple(
            TensorSpec(name, v.type.shape, v.type.dtype.numpy)
            for name, v in zip(graph.output_names, graph.outputs, strict=True)
        )
        self._lock = threading.Lock()
        self._constants: dict[tuple[int, tuple[int, ...]], Array] = {}
        self._last_use = _last_uses(compiled)
        for step, lowered in zip(compiled.program.steps, compiled.lowered, strict=True):
            if lowered is not None:
                backend.prepare(lowered.graph)
                for binding in lowered.constants:
                    self._constant(binding.literal, binding.type)
            elif step.kind is Kind.KERNEL:
                for value in step.nodes[0].operands:
                    if value.literal is not None:
                        self._constant(value.literal, value.type)

    @property
    def device(self) -> str:
        """`simulated`, or the name of the GPU."""
        return self.backend.name

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """Run on arrays given in the order of `inputs`, or by name. One output comes bare, several as a tuple.

        Arrays are NumPy, CuPy or anything with DLPack; results are NumPy arrays if every argument was
        on the host, else CuPy arrays. Raises ExecutionError naming the input that does not fit.
        """
        if len(arrays) > len(self.inputs):
            raise ExecutionError(f"{len(arrays)} arrays for {len(self.inputs)} inputs")
        feeds = {spec.name: array for spec, array in zip(self.inputs, arrays, strict=False)}
        for name in named:
            if name in feeds:
                raise ExecutionError(f"input {quote(name)} is given twice")
        results = self.run(None, {**feeds, **named})
        return results[0] if len(results) == 1 else tuple(results)

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Array]:
        """Outputs by name (None: all, in order) from inputs by name, as onnxruntime's `run`."""
        known = [spec.name for spec in self.outputs]
        wanted = known if output_names is None else list(output_names)
        for name in wanted:
            if name not in known:
                raise ExecutionError(f"no output {quote(name)}; outputs are {', '.join(map(quote, known))}")
        on_host = all(_on_host(array) for array in feeds.values())
        bound = self._bind(feeds)
        with self._lock:
            results = self._execute(bound)
            self.backend.finish()
            picked = [results[known.index(name)] for name in wanted]
            if on_host and self.backend.xp is not np:
                picked = [array.get() for array in picked]
        return picked

    def explain(self) -> Explanation:
        """What fused into which step and, for every op left out, why not."""
        return explain(self.compiled.program, self.compiled.target, self.compiled.judge)

    def assert_fused(self, pattern: str) -> None:
        """CheckError unless every chain of ops that matches the glob, such as `conv*+add+relu`, is one
        partition, and there is at least one."""
        assert_fused(self.compiled.program, pattern)

    def _bind(self, feeds: Mapping[str, Any]) -> list[Array]:
        known = {spec.name for spec in self.inputs}
        for name in feeds:
            if name not in known:
                raise ExecutionError(
                    f"no input {quote(name)}; inputs are {', '.join(quote(s.name) for s in self.inputs)}"
                )
        bound: list[Array] = []
        for spec in self.inputs:
            if spec.name not in feeds:
                raise ExecutionError(f"input {quote(spec.name)} is missing")
            array = self.backend.from_any(feeds[spec.name])
            if array.dtype != spec.dtype:
                raise ExecutionError(f"input {quote(spec.name)} takes {spec.dtype}, not {array.dtype}")
            if tuple(array.shape) != spec.shape:
                raise ExecutionError(
                    f"input {quote(spec.name)} has shape {list(spec.shape)}, the array {list(array.shape)}"
                )
            bound.append(array)
        return bound

    def _constant(self, literal: Any, type: TensorType) -> Array:
        """The device's copy of a literal in one memory order; shared by all steps that read it so."""
        key = (id(literal), type.order)
        if key not in self._constants:
            xp = self.backend.xp
            self._constants[key] = pack(xp, xp.asarray(literal.array), type)
        return self._constants[key]

    def _execute(self, arrays: Sequence[Array]) -> list[Array]:
        xp, graph = self.backend.xp, self.compiled.graph
        buffers: dict[Value, Array] = {
            value: pack(xp, array, value.type) for value, array in zip(graph.inputs, arrays, strict=True)
        }
        for index, (step, lowered) in enumerate(zip(self.compiled.program.steps, self.compiled.lowered, strict=True)):
            if lowered is not None:
                self._run_cudnn(step, lowered, buffers)
            elif step.kind is Kind.VIEW:
                node = step.nodes[0]
                source = self._buffer(node.operands[0], buffers)
                for place, value in enumerate(node.results):
                    start = view_offset(node, place)
                    part = source[start : start + value.type.size]
                    aligned = start * value.type.dtype.itemsize % ALIGNMENT_BYTES == 0
                    buffers[value] = part if aligned else part.copy()
            else:
                self._run_kernel(step, buffers)
            for value in self._last_use[index]:
                buffers.pop(value, None)
        return [unpack(self._buffer(v, buffers), v.type).copy() for v in graph.outputs]

    def _buffer(self, value: Value, buffers: Mapping[Value, Array]) -> Array:
        literal = value.literal
        return self._constant(literal, value.type) if literal is not None else buffers[value]

    def _run_cudnn(self, step: Partition, lowered: Lowered, buffers: dict[Value, Array]) -> None:
        by_name = {v.name: v for v in (*step.inputs, *step.outputs)}
        bound: dict[int, Array] = {}
        for uid, name in lowered.inputs:
            bound[uid] = buffers[by_name[name]]
        for binding in lowered.constants:
            bound[binding.uid] = self._constant(binding.literal, binding.type)
        for uid, name in lowered.outputs:
            value = by_name[name]
            bound[uid] = buffers[value] = self.backend.xp.empty(value.type.size, value.type.dtype.numpy)
        self.backend.execute(lowered.graph, bound)

    def _run_kernel(self, step: Partition, buffers: dict[Value, Array]) -> None:
        xp, (node,) = self.backend.xp, step.nodes
        operands = [unpack(self._buffer(v, buffers), v.type) for v in node.operands]
        for value, array in zip(node.results, evaluate_node(node, operands, xp), strict=True):
            if array.dtype != value.type.dtype.numpy:
                raise ExecutionError(f"{node!r}: the kernel gave {array.dtype}")
            buffers[value] = pack(xp, array, value.type)


def _on_host(array: Any) -> bool:
    """Whether an array lives in host memory, by DLPack's device type (1: CPU, 3: pinned)."""
    device = getattr(array, "__dlpack_device__", None)
    return device is None or device()[0] in (1, 3)


def _last_uses(compiled: Compiled) -> list[list[Value]]:
    """For each step the values nothing reads after it."""
    last: dict[Value, int] = {}
    for index, step in enumerate(compiled.program.steps):
        for value in (*step.inputs, *step.outputs):
            last[value] = index
    kept = set(compiled.graph.outputs)
    free: list[list[Value]] = [[] for _ in compiled.program.steps]
    for value, index in last.items():
        if value not in kept:
            free[index].append(value)
    return free
