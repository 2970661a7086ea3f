"""Execute a compiled program: on an NVIDIA GPU through cuDNN, elsewhere through the simulator.

Both runners walk the same steps over the same packed buffers; they differ in the array module and in
what runs a cuDNN graph.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fusec import artifact
from fusec.compiled import Compiled
from fusec.cudnn_graph import CudnnGraph
from fusec.donation import in_place, reads
from fusec.errors import ExecutionError
from fusec.explain import Explanation, explain
from fusec.ir import Array, TensorType, Value, quote
from fusec.lower_cudnn import Lowered
from fusec.memory import alias, plan_memory
from fusec.must_fuse import assert_fused
from fusec.plans import Entry
from fusec.program import Kind, Partition, inputs_of
from fusec.reference import evaluate_node
from fusec.shared import SharedWeights
from fusec.simulate import simulate
from fusec.storage import pack, unpack
from fusec.views import view_offset


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

    def prepare(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int, others: Sequence[Partition] = ()) -> None:
        """Make graphs, given by key, and other steps ready to execute within a model that touches so much memory."""
        ...

    def entries(self, graphs: Iterable[str]) -> Mapping[str, Entry]:
        """The plans of prepared graphs, by key, as far as there are any."""
        ...

    def give_up(self, graph: CudnnGraph, reason: str) -> bool:
        """Turn to another way to execute a graph, since this one failed; False if there is none."""
        ...

    def bind(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> Callable[[], None]:
        """What runs a prepared graph over flat buffers by uid, whose memory stays where it is."""
        ...

    def library(self, work: CudnnGraph | Partition) -> str:
        """Who executes a prepared graph, or a step that is none, once it is bound: cudnn, cublaslt or kernel."""
        ...

    def kernel(self, step: Partition, memory: Callable[[Value, TensorType], Array]) -> Callable[[], None] | None:
        """What runs a step that cuDNN does not; None if that is left to the reference. memory: the flat buffer of a
        value, a constant's in the memory order of the type."""
        ...

    def record(self, runs: Sequence[Callable[[], None]]) -> Callable[[], None]:
        """What does the work of all `runs`, which were called before and keep to the same memory, faster."""
        ...

    def time_us(self, run: Callable[[], None], count: int) -> list[float]:
        """How long `run` takes, so many times."""
        ...

    def calling(self) -> AbstractContextManager[None]:
        """Entered around each call; memory that calls share is read and written in their order."""
        ...

    def scratch(self) -> AbstractContextManager[None]:
        """Entered around steps that allocate: they do it where nothing else does, so that addresses can be recorded."""
        ...

    def finish(self) -> None:
        """Wait for what was queued; raise ExecutionError if any of it failed."""
        ...


class SimulatorBackend:
    """cuDNN graphs in NumPy, from their own description: any machine."""

    name = "simulated"
    xp: Any = np

    def __init__(self, name: str = "simulated"):
        self.name = name

    def from_any(self, array: Any) -> Array:
        if isinstance(array, np.ndarray):
            return array
        if hasattr(array, "__dlpack__") and not isinstance(array, np.generic):
            return np.from_dlpack(array)
        return np.asarray(array)

    def prepare(self, graphs: Mapping[str, CudnnGraph], footprint_bytes: int, others: Sequence[Partition] = ()) -> None:
        """Nothing to do: a graph is its own program."""

    def entries(self, graphs: Iterable[str]) -> Mapping[str, Entry]:
        return {}

    def give_up(self, graph: CudnnGraph, reason: str) -> bool:
        return False

    def bind(self, graph: CudnnGraph, buffers: Mapping[int, Array]) -> Callable[[], None]:
        return lambda: simulate(graph, buffers)

    def library(self, work: CudnnGraph | Partition) -> str:
        return "cudnn" if isinstance(work, CudnnGraph) else work.kind.value

    def kernel(self, step: Partition, memory: Callable[[Value, TensorType], Array]) -> Callable[[], None] | None:
        return None

    def record(self, runs: Sequence[Callable[[], None]]) -> Callable[[], None]:
        return lambda: _all(runs)

    def time_us(self, run: Callable[[], None], count: int) -> list[float]:
        times: list[float] = []
        for _ in range(count):
            start = time.perf_counter()
            run()
            times.append(1e6 * (time.perf_counter() - start))
        return times

    def calling(self) -> AbstractContextManager[None]:
        return nullcontext()

    def scratch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        """NumPy has finished when it returns."""


class Executable:
    """A compiled model, ready to call. Calls from several threads take turns.

    `inputs` and `outputs` describe the interface; `compiled` holds graphs and program; `memory` says where each
    stored value lies in the one arena that all calls share; `kernels` are, from the first call on, the steps that a
    kernel of fusec's runs. The first call runs step by step, later ones at once.

    `state` are inputs that stay on the device: `bind` gives them values, and `step` replaces those that have an
    update, in place where nothing reads the old value later (`in_place` counts these).
    """

    def __init__(self, compiled: Compiled, backend: Backend, weights: SharedWeights | None = None):
        """weights: shared with other executables of the same backend's kind; else it has its own."""
        self.compiled = compiled
        self.backend = backend
        self._weights = weights
        graph = compiled.graph
        self.inputs = tuple(TensorSpec(v.name, v.type.shape, v.type.dtype.numpy) for v in graph.inputs)
        self.outputs = tuple(
            TensorSpec(name, v.type.shape, v.type.dtype.numpy)
            for name, v in zip(graph.output_names, graph.outputs, strict=True)
        )
        by_name, results = {v.name: v for v in graph.inputs}, dict(zip(graph.output_names, graph.outputs, strict=True))
        self.state = dict(compiled.options.state)
        self._kept = {name: by_name[name] for name in self.state}
        self._updates = {by_name[name]: results[output] for name, output in self.state.items() if output}
        self._donated = in_place(compiled.program, self._updates)
        self._held: dict[str, Array] = {}  # flat buffers of the state that has a value
        self.memory = plan_memory(compiled.program, {*self._kept.values(), *self._donated})
        self._lock = threading.Lock()
        self._constants: dict[tuple[int, tuple[int, ...]], Array] = {}
        self._arena: Array = backend.xp.zeros(0, np.uint8)  # until the first call
        self._places: dict[Value, Array] = {}
        self._saved: dict[Value, Array] = {}  # outputs that are old state
        self.kernels: set[Partition] = set()
        self._launches: list[Callable[[], None]] = []
        self._replay: Callable[[], None] | None = None
        for step, lowered in zip(compiled.program.steps, compiled.lowered, strict=True):
            if lowered is not None:
                for binding in lowered.constants:
                    self._constant(binding.literal, binding.type)
            elif step.kind is Kind.KERNEL:
                for value in inputs_of(step.nodes):
                    if value.literal is not None:
                        self._constant(value.literal, value.type)
        graphs = {lowered.graph.key: lowered.graph for lowered in compiled.lowered if lowered is not None}
        others = [step for step in compiled.program.steps if step.kind is Kind.KERNEL]
        backend.prepare(graphs, self.memory.nbytes + sum(array.nbytes for array in self._constants.values()), others)

    @property
    def in_place(self) -> int:
        """How many updates are written over what they replace; the others are copied there after the last step."""
        return len(self._donated)

    def bind(self, **arrays: Any) -> None:
        """Give inputs of the state their values, which are copied to the device and stay there."""
        for name, array in arrays.items():
            if name not in self.state:
                raise ExecutionError(
                    f"{quote(name)} is no state; that is {', '.join(map(quote, self.state)) or 'none'}"
                )
            checked = self._checked(array, next(s for s in self.inputs if s.name == name), "state")
            with self._lock, self.backend.calling():
                unpack(self._state(name), self._kept[name].type)[...] = checked
                self.backend.finish()

    def share(self, other: Executable) -> None:
        """Use the very memory of another executable's state wherever names are the same: what one of them updates,
        the other finds. Both must run on the same device."""
        names = [name for name in self.state if name in other.state]
        for name in names:
            mine, theirs = self._kept[name].type, other._kept[name].type
            if mine != theirs or self.backend.xp is not other.backend.xp:
                raise ExecutionError(f"state {quote(name)} is {mine} here and {theirs} there")
        with self._lock, other._lock:
            self._held.update({name: other._state(name) for name in names})
            self._launches, self._replay = [], None  # they hold the addresses of before

    def step(self, *arrays: Any, **named: Any) -> Any:
        """Run on the inputs that are no state, replace the state that has updates, and return the other outputs:
        one bare, several as a tuple."""
        free = [s.name for s in self.inputs if s.name not in self.state]
        if len(arrays) > len(free):
            raise ExecutionError(f"{len(arrays)} arrays for {len(free)} inputs")
        replaced = set(self.state.values())
        wanted = [s.name for s in self.outputs if s.name not in replaced]
        results = self.run(wanted, {**dict(zip(free, arrays, strict=False)), **named})
        return results[0] if len(results) == 1 else tuple(results)

    def value(self, name: str) -> np.ndarray[Any, Any]:
        """What an input of the state holds now, on the host."""
        if name not in self._held:
            raise ExecutionError(f"state {quote(name)} has no value: bind it")
        with self._lock, self.backend.calling():
            array = unpack(self._held[name], self._kept[name].type).copy()
            self.backend.finish()
            return array if isinstance(array, np.ndarray) else array.get()

    def _state(self, name: str) -> Array:
        if name not in self._held:
            type = self._kept[name].type
            self._held[name] = self.backend.xp.zeros(type.size, type.dtype.numpy)
        return self._held[name]

    @property
    def device(self) -> str:
        """`simulated`, or the name of the GPU."""
        return self.backend.name

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """Run on arrays given in the order of `inputs`, or by name. One output comes bare, several as a tuple.

        Arrays are NumPy, CuPy or anything with DLPack; results are NumPy arrays if every argument was
        on the host, else CuPy arrays. Raises ExecutionError naming the input that does not fit.
        """
        results = self.run(None, by_name([spec.name for spec in self.inputs], arrays, named))
        return results[0] if len(results) == 1 else tuple(results)

    def run(
        self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None
    ) -> list[Array]:
        """Outputs by name (None: all, in order) from inputs by name, as onnxruntime's `run`.

        out: arrays by output name that results are written into, rather than into new ones: NumPy arrays, or what
        DLPack shares with the backend's device. Raises ExecutionError for a name, shape or dtype that does not fit.
        """
        known = [spec.name for spec in self.outputs]
        wanted = known if output_names is None else list(output_names)
        for name in wanted:
            if name not in known:
                raise ExecutionError(f"no output {quote(name)}; outputs are {', '.join(map(quote, known))}")
        given = dict(out or {})
        for name in given:
            if name not in wanted:
                raise ExecutionError(f"out has {quote(name)}, which is no output that was asked for")
        all_on_host = all(on_host(array) for array in (*feeds.values(), *given.values()))
        bound = self._bind(feeds)
        into = {name: self._checked(array, self.outputs[known.index(name)], "out") for name, array in given.items()}
        with self._lock, self.backend.calling():
            picked = self._execute(bound, [known.index(name) for name in wanted])
            if all_on_host:
                self.backend.finish()
                if self.backend.xp is not np:
                    picked = [array.get() for array in picked]
            for place, name in enumerate(wanted):
                if name in into:
                    on_device = isinstance(into[name], np.ndarray) and not isinstance(picked[place], np.ndarray)
                    into[name][...] = picked[place].get() if on_device else picked[place]
                    picked[place] = given[name]
        return picked

    def replay(self) -> None:
        """Run again over the inputs that the last call left on the device, on the caller's stream. Results stay where
        they are, so this is for timing. ExecutionError before the first call."""
        if not self._launches:
            raise ExecutionError("nothing to run again before the first call")
        with self._lock, self.backend.calling():
            self._at_once()

    def time_us(self, count: int) -> tuple[list[float], list[list[float]]]:
        """Microseconds on the device, so many times: of all steps at once, as a call runs them, and of each step
        alone, over what the last call left in memory. ExecutionError before the first call."""
        if not self._launches:
            raise ExecutionError("nothing to time before the first call")
        with self._lock, self.backend.calling(), self.backend.scratch():
            whole = self.backend.time_us(self._replay or (lambda: _all(self._launches)), count)
            return whole, [self.backend.time_us(launch, count) for launch in self._launches]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compiled model to a `.fusec` file, which `fusec.load` reads without compiling anything; on a GPU
        with the plans that were chosen."""
        keys = dict.fromkeys(lowered.graph.key for lowered in self.compiled.lowered if lowered is not None)
        plans = {(self.compiled.target.name, key): [entry] for key, entry in self.backend.entries(keys).items()}
        artifact.save(os.fspath(path), [self.compiled], plans)

    def explain(self) -> Explanation:
        """What fused into which step and, for every op left out, why not."""
        return explain(self.compiled.program, self.compiled.target, self.compiled.judge, libraries=self.libraries())

    def libraries(self) -> dict[Partition, str]:
        """Who runs the steps that work: `cudnn`, `kernel`, or `cublaslt` where that was faster or cuDNN declined; of
        the latter it is known from the first call on."""
        steps = zip(self.compiled.program.steps, self.compiled.lowered, strict=True)
        works = {step: step if lowered is None else lowered.graph for step, lowered in steps}
        return {step: self.backend.library(work) for step, work in works.items() if step.kind is not Kind.VIEW}

    def assert_fused(self, pattern: str) -> None:
        """CheckError unless every chain of ops that matches the glob, such as `conv*+add+relu`, is one
        partition, and there is at least one."""
        assert_fused(self.compiled.program, pattern)

    def _bind(self, feeds: Mapping[str, Any]) -> list[Array | None]:
        """An array for each input; None for state that stays as it is."""
        known = {spec.name for spec in self.inputs}
        for name in feeds:
            if name not in known:
                raise ExecutionError(
                    f"no input {quote(name)}; inputs are {', '.join(quote(s.name) for s in self.inputs)}"
                )
        bound: list[Array | None] = []
        for spec in self.inputs:
            if spec.name in self._held and spec.name not in feeds:
                bound.append(None)
                continue
            if spec.name not in feeds:
                how = ": it is state, bind it" if spec.name in self.state else ""
                raise ExecutionError(f"input {quote(spec.name)} is missing{how}")
            bound.append(self._checked(feeds[spec.name], spec, "input"))
        return bound

    def _checked(self, given: Any, spec: TensorSpec, kind: str) -> Array:
        """An array of the caller's; one to be written to is not copied."""
        if kind == "out":
            shared = not on_host(given) and self.backend.xp is not np
            if not shared and not isinstance(given, np.ndarray):
                raise ExecutionError(f"out {quote(spec.name)}: results cannot be written into {type(given).__name__}")
            array = self.backend.from_any(given) if shared else given
        else:
            array = self.backend.from_any(given)
        if array.dtype != spec.dtype:
            raise ExecutionError(f"{kind} {quote(spec.name)} takes {spec.dtype}, not {array.dtype}")
        if tuple(array.shape) != spec.shape:
            raise ExecutionError(
                f"{kind} {quote(spec.name)} has shape {list(spec.shape)}, the array {list(array.shape)}"
            )
        return array

    def _constant(self, literal: Any, type: TensorType) -> Array:
        """The device's copy of a literal in one memory order; shared by all steps that read it so."""
        key = (id(literal), type.order)
        if key not in self._constants:
            xp = self.backend.xp

            def packed() -> Array:
                return pack(xp, xp.asarray(literal.array), type)

            shared = self._weights
            self._constants[key] = packed() if shared is None else shared.prepared(literal, type.order, packed)
        return self._constants[key]

    def _execute(self, arrays: Sequence[Array | None], wanted: Sequence[int]) -> list[Array]:
        graph = self.compiled.graph
        for value, array in zip(graph.inputs, arrays, strict=True):
            if array is not None and value.name in self.state:
                self._state(value.name)
        first = not self._launches
        if first:
            self._allocate()
        for value, array in zip(graph.inputs, arrays, strict=True):
            if array is not None:
                unpack(self._buffer(value), value.type)[...] = array
        if first:
            for index in range(len(self._launches)):
                self._launch(index)
            with self.backend.scratch():
                self._replace_state()
        else:
            self._at_once()
        results = [graph.outputs[index] for index in wanted]
        return [unpack(self._result(v), v.type).copy() for v in results]

    def _at_once(self) -> None:
        if self._replay is None:
            self._replay = self.backend.record(
                [*self._launches, self._replace_state] if self._updates else self._launches
            )
        self._replay()

    def _allocate(self) -> None:
        """The arena, and what runs each step over its part of it."""
        self._arena = self.backend.xp.empty(self.memory.nbytes, np.uint8)
        self._places = {value: self._held[name] for name, value in self._kept.items()}
        self._places |= {new: self._places[old] for new, old in self._donated.items()}
        for value, start in self.memory.offsets.items():
            self._places[value] = self._arena[start : start + value.type.nbytes].view(value.type.dtype.numpy)
        self._saved = {
            value: self.backend.xp.empty(value.type.size, value.type.dtype.numpy)
            for value in self.compiled.graph.outputs
            if reads(self.compiled.program, value) in self._updates
        }
        steps = zip(self.compiled.program.steps, self.compiled.lowered, strict=True)
        self._launches = [self._bound(step, lowered) for step, lowered in steps]

    def _replace_state(self) -> None:
        """Copy the updates that could not be written in place; first, what outputs still want of the old state."""
        for value, saved in self._saved.items():
            saved[...] = self._buffer(value)[: saved.size]
        for old, new in self._updates.items():
            if new not in self._donated:
                unpack(self._places[old], old.type)[...] = unpack(self._result(new), new.type)

    def _result(self, value: Value) -> Array:
        """The flat memory an output is read from after the last step."""
        return self._saved[value] if value in self._saved else self._buffer(value)

    def _launch(self, index: int) -> None:
        """One step, and whatever goes wrong in it under its name; a plan that fails gives way to the next."""
        step, lowered = self.compiled.program.steps[index], self.compiled.lowered[index]
        try:
            with self.backend.scratch():
                self._launches[index]()
            self.backend.finish()
        except ExecutionError as error:
            if lowered is None or not self.backend.give_up(lowered.graph, str(error)):
                raise ExecutionError(f"step {index} {step.signature}: {error}") from error
            self._launches[index] = self._bound(step, lowered)
            self._launch(index)

    def _bound(self, step: Partition, lowered: Lowered | None) -> Callable[[], None]:
        """What runs a step."""
        if lowered is not None:
            by_name = {v.name: v for v in (*step.inputs, *step.outputs)}
            buffers = {b.uid: self._constant(b.literal, b.type) for b in lowered.constants}
            named = (*lowered.inputs, *lowered.outputs)
            buffers |= {uid: lowered.part(uid, self._buffer(by_name[name])) for uid, name in named}
            return self.backend.bind(lowered.graph, buffers)
        if step.kind is Kind.VIEW:
            return self._bound_view(step)
        kernel = self.backend.kernel(step, self._memory)
        if kernel is not None:
            self.kernels.add(step)
            return kernel
        return lambda: self._run_reference(step)

    def _bound_view(self, step: Partition) -> Callable[[], None]:
        """Nothing to do for a result that lies inside its operand; what does not is copied."""
        (node,) = step.nodes
        copies: list[tuple[Array, Array]] = []
        for place, value in enumerate(node.results):
            if not value.uses:
                continue
            source, start = self._buffer(node.operands[0]), view_offset(node, place)
            part = source[start : start + value.type.size]
            if alias(value, place) is None:
                copies.append((self._places[value], part))
            elif value not in self._places:  # a view of a constant
                self._places[value] = part

        def copy() -> None:
            for target, part in copies:
                target[...] = part

        return copy

    def _buffer(self, value: Value) -> Array:
        """The flat memory of a value."""
        literal = value.literal
        return self._constant(literal, value.type) if literal is not None else self._places[value]

    def _memory(self, value: Value, type: TensorType) -> Array:
        """The flat memory of a value; a constant in the memory order of the type."""
        literal = value.literal
        return self._constant(literal, type) if literal is not None else self._places[value]

    def _run_reference(self, step: Partition) -> None:
        """The step's nodes one by one, each result rounded to its own type."""
        held: dict[Value, Array] = {}
        for node in step.nodes:
            operands = [held[v] if v in held else unpack(self._buffer(v), v.type) for v in node.operands]
            for value, array in zip(node.results, evaluate_node(node, operands, self.backend.xp), strict=True):
                if array.dtype != value.type.dtype.numpy:
                    raise ExecutionError(f"{node!r}: the kernel gave {array.dtype}")
                held[value] = array
        for value in step.outputs:
            unpack(self._places[value], value.type)[...] = held[value]


def by_name(inputs: Sequence[str], arrays: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays given in the order of the inputs, and others by name; ExecutionError for too many, or one given twice."""
    if len(arrays) > len(inputs):
        raise ExecutionError(f"{len(arrays)} arrays for {len(inputs)} inputs")
    feeds = dict(zip(inputs, arrays, strict=False))
    for name in named:
        if name in feeds:
            raise ExecutionError(f"input {quote(name)} is given twice")
    return {**feeds, **named}


def _all(runs: Sequence[Callable[[], None]]) -> None:
    for run in runs:
        run()


def on_host(array: Any) -> bool:
    """Whether an array lives in host memory, by DLPack's device type (1: CPU, 3: pinned) or, without one, for want of
    `__cuda_array_interface__`."""
    device = getattr(array, "__dlpack_device__", None)
    if device is None:
        return not hasattr(array, "__cuda_array_interface__")
    return device()[0] in (1, 3)
