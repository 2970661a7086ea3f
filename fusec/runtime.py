"""Run a compiled program: on an NVIDIA GPU, or on any machine in the simulator.

Both back ends run the same steps over the same memory plan. They differ in the array module (CuPy or NumPy), and in
what runs a cuDNN graph. `fusec.execution` holds what an Executable is made of.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from fusec import lockfile
from fusec.artifacts import fusec_file
from fusec.diagnostics.explain import (
    Explanation,
    explain,
    float_edges,
    with_chosen_plans,
    with_rows_in_place,
)
from fusec.diagnostics.must_fuse import assert_fused
from fusec.diagnostics.notebook import program_html, program_text
from fusec.diagnostics.step_times import Bench, measure
from fusec.diagnostics.verify import Report, random_array, verify
from fusec.errors import ExecutionError
from fusec.execution.backend import Backend, Captured
from fusec.execution.compilation import Compiled
from fusec.execution.shared_weights import SharedWeights, layout
from fusec.execution.signature import Interface, TensorSpec, by_name, on_host
from fusec.execution.simulator_backend import SimulatorBackend
from fusec.execution.state import DeviceState
from fusec.execution.step_binding import Constants, Steps
from fusec.gpu.autotune.step_choices import TunedChoices
from fusec.ir import Array, DType, Literal, TensorType, Value, copy_name, load_all, quote
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.packing import code_bytes, in_order, stored_dtype, unpack, zeros
from fusec.plans.lock_record import Lock
from fusec.schedule.dependencies import lanes, waits
from fusec.schedule.memory_plan import MemoryPlan, plan_memory
from fusec.schedule.program import Kind, Partition, inputs_of
from fusec.system.compile_timer import CompileTimes, spent_on

# Additional memory that running steps side by side may cost. Only small steps, which do not fill the GPU, gain by it,
# so more memory is never worth it.
SIDE_BY_SIDE_BYTES = 16 << 20

# Chooses plans and kernels by timing the whole model, and returns the numbers of the steps to bind again. Arguments:
# memory and type of each input; the graph or kernel of each step; the function that runs each step; a function that
# binds a step again.
StepChooser = Callable[
    [
        Sequence[tuple[Array, TensorType]],
        Sequence[CudnnGraph | Partition],
        Sequence[Callable[[], None]],
        Callable[[int], Callable[[], None]],
    ],
    Sequence[int],
]

__all__ = ["Backend", "Executable", "SimulatorBackend", "TensorSpec", "by_name", "on_host"]


class Executable:
    """A compiled model, ready to call. Calls from several threads take turns.

    The first call runs the steps one by one. The second call captures them, and it and later calls replay the capture.

    inputs, outputs: names, shapes and types.
    compiled: the graphs and the program.
    memory: the place of each stored value in the arena, the memory that all calls share.
    spent: compile time by stage; None if the model was not compiled in this process.
    state: inputs that stay on the device, with the outputs that replace them. `bind` gives them values, and `step`
        replaces them.
    """

    @spent_on("weights and steps")
    def __init__(self, compiled: Compiled, backend: Backend, weights: SharedWeights | None = None):
        """Prepare a program on a back end. weights: shared with other executables of the same kind of back end."""
        self.compiled = compiled
        self.backend = backend
        self.spent: CompileTimes | None = None
        self.state = dict(compiled.options.state)
        self._interface = Interface(compiled.graph, self.state, backend.xp, backend.from_any)
        self.inputs, self.outputs = self._interface.inputs, self._interface.outputs
        self._input_names = tuple(spec.name for spec in self.inputs)
        self._state = DeviceState(compiled.program, self.state, backend.xp)
        self._holds_inputs = False
        self.memory = self._plan_memory()
        self._lock = threading.Lock()
        self._constants = Constants(backend.xp, weights)
        self._arena: Array = backend.xp.zeros(0, np.uint8)  # allocated by the first call
        self._places: dict[Value, Array] = {}
        self._steps = Steps(backend, self._constants, self._places)
        self._launches: list[Callable[[], None]] = []
        self._after: Mapping[int, Callable[[], None]] = {}
        self._feeders: list[Callable[[Array], None]] = []
        self._fetchers: list[Callable[[Array | None, bool], Array]] = []
        self._shared: list[Array] = []  # keeps constants for other programs until this one's steps are bound
        self._ready = self._called = False  # memory is allocated; a call was made
        self._replay: Captured | None = None
        self._prepare(weights)

    def _prepare(self, weights: SharedWeights | None) -> None:
        """Prepare plans and kernels, while a thread loads the constants that no program with these weights has."""
        compiled, backend = self.compiled, self.backend
        constants: list[tuple[Literal, TensorType]] = []
        for step, lowered in zip(compiled.program.steps, compiled.lowered, strict=True):
            if lowered is not None:
                constants += [(binding.literal, binding.type) for binding in lowered.constants]
            elif step.kind is Kind.KERNEL:
                constants += [(v.literal, v.type) for v in inputs_of(step.nodes) if v.literal is not None]
        missing = [c for c, type in constants if weights is None or not weights.is_prepared(c, layout(type))]
        sizes = {(literal, layout(type)): type.span * type.dtype.itemsize for literal, type in constants}
        graphs = {lowered.graph.key: lowered.graph for lowered in compiled.lowered if lowered is not None}
        others = [step for step in compiled.program.steps if step.kind is Kind.KERNEL]
        if not backend.loads_ahead:
            missing = []
        with ThreadPoolExecutor(1, thread_name_prefix="fusec-weights") as weights_thread:
            loaded = weights_thread.submit(load_all, missing)
            backend.prepare(graphs, self.memory.nbytes + sum(sizes.values()), others)
            loaded.result()
        if weights is not None:
            with backend.calling():
                bindings = (b for lowered in compiled.lowered if lowered is not None for b in lowered.constants)
                self._shared = [self._constants(binding.literal, binding.type) for binding in bindings]

    def __repr__(self) -> str:
        """Describe the program in one line."""
        return program_text(self)

    def _repr_html_(self) -> str:
        """Describe the program for notebooks."""
        return program_html(self)

    def _plan_memory(self) -> MemoryPlan:
        program, elsewhere = self.compiled.program, self._state.stored
        held = program.graph.inputs if self._holds_inputs else ()
        memory = plan_memory(program, elsewhere, held=held)
        if self.backend.side_by_side and not elsewhere:
            wider = plan_memory(program, side_by_side=True, held=held)
            if wider.nbytes <= memory.nbytes + SIDE_BY_SIDE_BYTES:
                return wider
        return memory

    @property
    def kernels(self) -> set[Partition]:
        """Return the steps that a kernel of fusec runs; none before the first call."""
        return self._steps.kernels

    @property
    def in_place(self) -> int:
        """Count the updates that are written over the state they replace; others are copied after the last step."""
        return len(self._state.donated)

    @property
    def in_place_state(self) -> frozenset[str]:
        """Return the names of the state whose update is written over it."""
        return frozenset(value.name for value in self._state.donated.values())

    def bind(self, **arrays: Any) -> None:
        """Copy values of state to the device, where they stay.

        A copy of a parameter in another type (`Builder.copy`) gets the same values, unless it is given itself.
        """
        for name, array in arrays.items():
            if name not in self.state:
                raise ExecutionError(
                    f"{quote(name)} is no state; that is {', '.join(map(quote, self.state)) or 'none'}"
                )
            checked = self._interface.state(name, array)
            self._bind(name, checked)
            for dtype in (DType.F16, DType.BF16, DType.F32, DType.F64):
                copy = copy_name(name, dtype)
                if copy in self.state and copy not in arrays:
                    host = checked if isinstance(checked, np.ndarray) else checked.get()
                    self._bind(copy, self._interface.state(copy, host.astype(dtype.numpy)))

    def _bind(self, name: str, checked: Array) -> None:
        with self._lock, self.backend.calling():
            self.backend.feeder(self._state.buffer(name), self._state.values[name].type)(checked)
            self.backend.finish()

    def share(self, other: Executable) -> None:
        """Use the memory of another executable's state wherever names are the same, so that both see each update.

        Both must run on the same device.
        """
        names = [name for name in self.state if name in other.state]
        for name in names:
            mine, theirs = self._state.values[name].type, other._state.values[name].type
            if mine != theirs or self.backend.xp is not other.backend.xp:
                raise ExecutionError(f"state {quote(name)} is {mine} here and {theirs} there")
        with self._lock, other._lock:
            self._state.buffers.update({name: other._state.buffer(name) for name in names})
            self._ready, self._called, self._replay = False, False, None  # because captured steps use the old addresses

    def place_state(self, memory: Mapping[str, Array]) -> None:
        """Keep state in given flat memory of the device, such as parts of one block. Its contents are the new values.

        Raises ExecutionError if the memory does not have the type and size of the state.
        """
        for name, array in memory.items():
            value = self._state.values.get(name)
            if value is None:
                raise ExecutionError(f"{quote(name)} is no state")
            type = value.type
            fits = array.dtype == type.dtype.numpy and array.shape == (type.size,)
            if not fits or not isinstance(array, self.backend.xp.ndarray):
                raise ExecutionError(f"state {quote(name)} is {type}, and the memory {array.dtype}{list(array.shape)}")
        with self._lock:
            self._state.buffers.update(memory)
            self._ready, self._called, self._replay = False, False, None  # because captured steps use the old addresses

    def after_steps(self, actions: Mapping[int, Callable[[], None]]) -> None:
        """Call functions after steps, by number, from now on. What they queue on the device is captured with the steps.

        Only for programs with state, whose steps run in order.
        """
        if not self.state:
            raise ExecutionError("only the steps of a program with state run in order")
        with self._lock:
            self._after = dict(actions)
            self._ready, self._called, self._replay = False, False, None

    def step(self, *arrays: Any, **named: Any) -> Any:
        """Run on the inputs that are no state, replace the state that has updates, and return the other outputs.

        One output comes bare, several as a tuple.
        """
        free = [s.name for s in self.inputs if s.name not in self.state]
        if len(arrays) > len(free):
            raise ExecutionError(f"{len(arrays)} arrays for {len(free)} inputs")
        replaced = set(self.state.values())
        wanted = [s.name for s in self.outputs if s.name not in replaced]
        results = self.run(wanted, {**dict(zip(free, arrays, strict=False)), **named})
        return results[0] if len(results) == 1 else tuple(results)

    def value(self, name: str) -> np.ndarray[Any, Any]:
        """Return the value of an input of the state, on the host."""
        if name not in self._state.buffers:
            raise ExecutionError(f"state {quote(name)} has no value: bind it")
        with self._lock, self.backend.calling():
            array = unpack(self._state.buffers[name], self._state.values[name].type).copy()
            self.backend.finish()
            return array if isinstance(array, np.ndarray) else array.get()

    @property
    def recorded(self) -> tuple[int, float | None, str, float | None]:
        """Return how the steps are captured, which is known from the second call on.

        Four values: the largest number of steps that run side by side; microseconds of the other order, if both were
        timed; the reason why steps could not be captured, or empty; microseconds of this order.
        """
        if self._replay is None:
            return 1, None, "", None
        this_us, other_us = self._replay.times_us or (None, None)
        return self._replay.lanes, other_us, self._replay.declined, this_us

    @property
    def asked(self) -> bool:
        """Tell if cuDNN was asked about the program."""
        return self.compiled.asked

    @property
    def note(self) -> str:
        """Return the note that reports print; see `Compiled.note`."""
        return self.compiled.note

    @property
    def device(self) -> str:
        """Return `simulated`, or the name of the GPU."""
        return self.backend.name

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """Run on arrays given in the order of `inputs`, or by name. One output comes bare, several as a tuple.

        Arrays are NumPy, CuPy or anything with DLPack; results are NumPy arrays if every argument was
        on the host, else CuPy arrays. Raises ExecutionError naming the input that does not fit.
        """
        results = self.run(None, by_name(self._input_names, arrays, named))
        return results[0] if len(results) == 1 else tuple(results)

    def run(
        self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None
    ) -> list[Array]:
        """Return outputs by name (None: all, in order) from inputs by name, as onnxruntime's `run`.

        out: arrays by output name to write results into: NumPy arrays, or what DLPack shares with the device.
        Raises ExecutionError for a name, shape or dtype that does not fit.
        """
        wanted = self._interface.places(output_names)
        arrays, all_on_host = self._interface.feeds(feeds, self._state.buffers)
        into: dict[int, Array] = {}
        if out:
            into, out_on_host = self._interface.outs(out, wanted)
            all_on_host = all_on_host and out_on_host
        with self._lock, self.backend.calling(self._replay is not None and self._replay.at_once):
            self._execute(arrays)
            picked = [self._fetchers[place](into.get(place), all_on_host) for place in wanted]
            if all_on_host or (into and any(isinstance(array, np.ndarray) for array in into.values())):
                self.backend.finish()
        if out:
            names = (self.outputs[place].name for place in wanted)
            picked = [out.get(name, array) for name, array in zip(names, picked, strict=True)]
        return picked

    @property
    def input_buffers(self) -> dict[str, Array]:
        """Return the device memory that calls read their inputs from, by name.

        An input written there, on the stream of the next call, is not copied: give that call this very array.
        A call overwrites these buffers, because it uses their memory again, unless inputs are held (`hold_inputs`).
        """
        self._state.require_values()
        with self._lock, self.backend.calling():
            self._allocate()
            return {v.name: unpack(self._steps.buffer(v), v.type) for v in self.compiled.graph.inputs}

    def hold_inputs(self) -> None:
        """Keep inputs in `input_buffers` from now on, so that `replay` computes the same again.

        Steps then never use the memory of inputs again. Buffers that were returned before are no longer valid.
        """
        with self._lock:
            if not self._holds_inputs:
                self._holds_inputs = True
                self.memory = self._plan_memory()
                self._ready, self._called, self._replay = False, False, None

    def replay(self) -> None:
        """Run again over the contents of `input_buffers`, on the caller's stream; meant for timing.

        With `hold_inputs` it computes the same as the last call. Results stay in the arena.
        Raises ExecutionError before the first call.
        """
        if not self._called:
            raise ExecutionError("nothing to run again before the first call")
        with self._lock, self.backend.calling(self._replay is not None and self._replay.at_once):
            self._replay_all()

    def time_us(self, count: int) -> tuple[list[float], list[list[float]]]:
        """Time all steps as a call runs them, and each step alone, `count` times, in microseconds on the device.

        Steps run over the values of the last call. Raises ExecutionError before the first call.
        """
        if not self._called:
            raise ExecutionError("nothing to time before the first call")
        with self._lock, self.backend.calling(), self.backend.scratch():
            if self._replay is None:
                self._replay = self._captured()
            whole = self.backend.time_us(self._replay, count)
            return whole, [self.backend.time_us(launch, count, alone=True) for launch in self._launches]

    def run_steps(self, around: Callable[[int], AbstractContextManager[object]]) -> None:
        """Run the steps once more, one by one, over the values of the last call; each ends before the next begins.

        around: returns the context in which a step runs, by its number, such as a range that a profiler shows.
        Raises ExecutionError before the first call.
        """
        if not self._called:
            raise ExecutionError("no steps to run before the first call")
        with self._lock, self.backend.calling(), self.backend.scratch():
            for index, launch in enumerate(self._launches):
                with around(index):
                    launch()
                    self.backend.finish()

    def rehearse(self, choose: StepChooser) -> None:
        """Choose plans and kernels by the time of the whole model, before the first call.

        A program with state is unchanged, because running it would replace the state.
        """
        if self.state:
            return
        steps = list(zip(self.compiled.program.steps, self.compiled.lowered, strict=True))
        with self._lock, self.backend.calling():
            self._allocate()
            inputs = [(self._steps.buffer(v), v.type) for v in self.compiled.graph.inputs]
            runnables = [step if lowered is None else lowered.graph for step, lowered in steps]
            for number in choose(inputs, runnables, self._launches, lambda number: self._steps.bound(*steps[number])):
                self._launches[number] = self._steps.bound(*steps[number])

    def verify(self, seed: int = 0, progress: Callable[[int, int], None] | None = None) -> Report:
        """Check the passes, and each step as it runs here, on random inputs against float64 references.

        State is unchanged; other values of the last call are overwritten.
        """
        state = self._state
        held = dict(state.buffers)
        with self._lock, self.backend.calling():
            saved = {name: buffer.copy() for name, buffer in held.items()}
            for name in self.state:
                state.buffer(name)
            self._allocate()
            try:
                return verify(self.compiled, seed, None, progress, self._run_step)
            finally:
                for name, buffer in saved.items():
                    held[name][...] = buffer
                if held.keys() != state.buffers.keys():  # state without a value got zeros
                    state.buffers, self._ready = held, False
                self._called, self._replay = False, None

    def _run_step(self, index: int, operands: Mapping[Value, Array]) -> dict[Value, Array]:
        """Run one step on operands from the host, and return its results on the host."""
        step = self.compiled.program.steps[index]
        if step.kind is not Kind.VIEW:  # a view's results may share the memory of its operand
            for value in step.outputs:
                unpack(self._steps.buffer(value), value.type)[...] = np.nan if value.type.dtype.is_float else 77
        for value, array in operands.items():
            stored = np.asarray(array).astype(value.type.dtype.numpy)  # NumPy makes scalars of arrays of rank 0
            self.backend.feeder(self._steps.buffer(value), value.type)(stored)
        self._launch(index)
        results = {v: self.backend.fetcher(self._steps.buffer(v), v.type)(None, True) for v in step.outputs}
        self.backend.finish()
        return results

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compiled model to a `.fusec` file, which `fusec.load` reads; on a GPU with the tuned plans."""
        compiled, plans = self.contents()
        fusec_file.save(os.fspath(path), [compiled], plans)

    def contents(self) -> tuple[Compiled, lockfile.Plans]:
        """Return what a `.fusec` file holds of this program: with its choices, and the plans of its graphs."""
        return self._with_tuned_choices(), self._plans()

    def lock(self) -> Lock:
        """Return the lock of this program: the candidate, plan or kernel of each step, and if steps run side by side.

        `fusec.lockfile` writes it as text for version control. Steps may run over zeros here, to time both orders.
        """
        compiled, plans = self.contents()
        return lockfile.make([compiled], plans)

    def _with_tuned_choices(self) -> Compiled:
        """Return the program with the choices of `rehearse`, and with the order of its steps."""
        compiled = self.compiled
        if isinstance(compiled.tuned, TunedChoices) and self.backend.tuned is not None:
            compiled = replace(compiled, tuned=self.backend.tuned)
        ready = lockfile.with_choices(compiled)
        if not isinstance(ready.tuned, TunedChoices) or not self._runs_side_by_side():
            return ready if isinstance(ready.tuned, Lock) else compiled
        return replace(ready, tuned=replace(ready.tuned, side_by_side=True))

    def _runs_side_by_side(self) -> bool:
        if self._replay is None and self.backend.side_by_side and not self._state.updates:
            dependencies = waits(self.compiled.program, self.memory)
            if dependencies is None or max(lanes(dependencies), default=0) < 1:
                return False
            with self._lock, self.backend.calling():
                if not self._called:
                    types = [v.type for v in self.compiled.graph.inputs]
                    self._execute([zeros(self.backend.xp, t) for t in types])
                self._replay = self._captured()
                self.backend.finish()
        return self._replay is not None and self._replay.lanes > 1

    def _plans(self) -> lockfile.Plans:
        keys = dict.fromkeys(lowered.graph.key for lowered in self.compiled.lowered if lowered is not None)
        return {(self.compiled.target.name, key): [entry] for key, entry in self.backend.entries(keys).items()}

    def bench(self, runs: int = 20, seed: int = 0) -> Bench:
        """Time calls on random inputs, all steps in one replay, and each step alone against its limit.

        A program with state is refused, because a call would replace the state.
        """
        if self.state:
            raise ExecutionError("a program with state cannot be timed on random inputs")
        rng = np.random.default_rng(seed)
        types = {v.name: v.type for v in self.compiled.graph.inputs}
        return measure(self, {name: in_order(random_array(rng, type), type) for name, type in types.items()}, runs)

    def explain(self) -> Explanation:
        """Explain which ops fused into which step and, for every op that did not fuse, the reason."""
        c = self.compiled
        explanation = explain(c.program, c.target, c.judge, libraries=self.libraries())
        keys = {s: each.graph.key for s, each in zip(c.program.steps, c.lowered, strict=True) if each is not None}
        plans = self.backend.entries(dict.fromkeys(keys.values()))
        chosen = {step: plans[key].choice for step, key in keys.items() if key in plans}
        explanation = with_chosen_plans(explanation, c.program, c.judge, chosen)
        explanation = with_rows_in_place(explanation, c.program, self._state.donated)
        return replace(explanation, floats=float_edges(c))

    def libraries(self) -> dict[Partition, str]:
        """Return the library that runs each step except views: `cudnn`, `kernel`, or `cublaslt`.

        From the first call on it is known which steps cuDNN declines, so that cuBLASLt runs them.
        """
        return {
            step: self.backend.library(step if lowered is None else lowered.graph)
            for step, lowered in zip(self.compiled.program.steps, self.compiled.lowered, strict=True)
            if step.kind is not Kind.VIEW
        }

    def assert_fused(self, pattern: str, *, cudnn_only: bool = False) -> None:
        """Raise CheckError unless each sequence of ops that matches the glob runs as one step, and one exists.

        pattern: a glob over op names, such as `conv*+add+relu`.
        cudnn_only: count only steps that cuDNN runs, and none that a kernel of fusec or cuBLASLt runs.
        """
        self.compiled.require_answers(f"holding {pattern!r} in place")
        assert_fused(self.compiled.program, pattern, cudnn_only, self.libraries() if cudnn_only else None)

    def _execute(self, arrays: Sequence[Array | None]) -> None:
        """Copy the inputs to their memory, and run all steps."""
        if not self._ready:
            for value, array in zip(self.compiled.graph.inputs, arrays, strict=True):
                if array is not None and value.name in self.state:
                    self._state.buffer(value.name)
            self._allocate()
        if self._called and self._replay is None:  # before the inputs are copied, because capturing may run the steps
            self._replay = self._captured()
        replay = self._replay
        for place, array in enumerate(arrays):
            if array is not None and (replay is None or not replay.takes(place, array)):
                self._feeders[place](array)
        if self._called:
            self._replay_all()
            return
        for index in range(len(self._launches)):
            self._launch(index)
        with self.backend.scratch():
            self._replace_state()
        self._called = True

    def _replay_all(self) -> None:
        if self._replay is None:
            self._replay = self._captured()
        self._replay()

    def _captured(self) -> Captured:
        if self._state.updates:
            return self.backend.capture([*self._launches, self._replace_state])
        return self.backend.capture(self._launches, waits(self.compiled.program, self.memory), self._first_inputs())

    def _first_inputs(self) -> tuple[int, dict[int, Array]] | None:
        """Return the number of the first step, and the memory of the inputs that only it reads, by place.

        That step can read them from the caller's memory. None if there are no such inputs, or inputs are held.
        """
        program = self.compiled.program
        if self._holds_inputs or not program.steps or program.steps[0].kind is Kind.VIEW:
            return None
        nodes, outputs = set(program.steps[0].nodes), set(program.graph.outputs)
        only_first = {
            place: unpack(self._steps.buffer(v), v.type)
            for place, v in enumerate(program.graph.inputs)
            if v.uses and v not in outputs and nodes.issuperset(v.users)
        }
        return (0, only_first) if only_first else None

    @spent_on("memory, and weights on the device")
    def _allocate(self) -> None:
        """Allocate the arena and bind each step to its memory, unless that was done."""
        if self._ready:
            return
        self._arena = self.backend.xp.empty(self.memory.nbytes, np.uint8)
        self._places.clear()
        self._places |= self._state.allocate()
        for value, start in self.memory.offsets.items():
            stored = stored_dtype(self.backend.xp, value.type.dtype)
            nbytes = value.type.span * stored.itemsize
            if stored != value.type.dtype.numpy:
                nbytes = code_bytes(value.type.span, value.type.dtype)
            self._places[value] = self._arena[start : start + nbytes].view(stored)
        steps = zip(self.compiled.program.steps, self.compiled.lowered, strict=True)
        self._launches = [self._steps.bound(step, lowered) for step, lowered in steps]
        for index, action in self._after.items():
            self._launches[index] = _followed(self._launches[index], action)
        self._shared.clear()
        graph = self.compiled.graph
        self._feeders = [self.backend.feeder(self._steps.buffer(v), v.type) for v in graph.inputs]
        self._fetchers = [self.backend.fetcher(self._state.output(v, self._steps), v.type) for v in graph.outputs]
        self._ready = True

    def _replace_state(self) -> None:
        self._state.replace(self._steps)

    def _launch(self, index: int) -> None:
        """Run one step, and name it in errors. A plan that fails is replaced by the next one of its graph."""
        step, lowered = self.compiled.program.steps[index], self.compiled.lowered[index]
        try:
            with self.backend.scratch():
                self._launches[index]()
            self.backend.finish()
        except ExecutionError as error:
            if lowered is None or not self.backend.give_up(lowered.graph, str(error)):
                raise ExecutionError(f"step {index} {step.signature}: {error}") from error
            self._launches[index] = self._steps.bound(step, lowered)
            if index in self._after:
                self._launches[index] = _followed(self._launches[index], self._after[index])
            self._launch(index)


def _followed(launch: Callable[[], None], action: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        launch()
        action()

    return both
