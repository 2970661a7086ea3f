"""Run the steps of a compiled program: bind them to memory, run them, capture them, and replay the capture."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial

import numpy as np

from fusec.errors import ExecutionError
from fusec.execution.backend import Backend, Captured
from fusec.execution.compilation import Compiled
from fusec.execution.shared_weights import SharedWeights, layout
from fusec.execution.state import DeviceState
from fusec.execution.step_binding import Constants, Steps
from fusec.ir import Array, Literal, TensorType, Value, operand_all
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.packing import code_bytes, stored_dtype, unpack, zeros
from fusec.schedule.dependencies import lanes, waits
from fusec.schedule.memory_plan import MemoryPlan, plan_memory
from fusec.schedule.program import Kind, Partition, inputs_of
from fusec.system.compile_timer import spent_on
from fusec.system.unpicklable import Unpicklable

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


class ProgramRunner(Unpicklable):
    """The steps of a program on a backend, with their memory.

    The first run executes the steps one by one. The second run captures them, and it and later runs replay the capture.

    compiled: the graphs and the program.
    memory: the place of each stored value in the arena, the memory that all runs share.
    state: inputs that stay on the device, with the outputs that replace them.
    """

    @spent_on("weights and steps")
    def __init__(self, compiled: Compiled, backend: Backend, weights: SharedWeights | None = None):
        """Prepare a program on a backend. weights: shared with other programs on the same kind of backend."""
        self.compiled = compiled
        self.backend = backend
        self.state = dict(compiled.options.state)
        self._state = DeviceState(compiled.program, self.state, backend.xp)
        self._holds_inputs = False
        self.memory = self._plan_memory()
        self._lock = threading.Lock()
        self._constants = Constants(weights, backend.packed)
        self._arena: Array = backend.xp.zeros(0, np.uint8)  # allocated by the first run
        self._places: dict[Value, Array] = {}
        self._steps = Steps(backend, self._constants, self._places)
        self._launches: list[Callable[[], None]] = []
        self._after: Mapping[int, Callable[[], None]] = {}
        self._feeders: list[Callable[[Array], None]] = []
        self._fetchers: list[Callable[[Array | None, bool], Array]] = []
        self._shared: list[Array] = []  # keeps constants for other programs until this one's steps are bound
        self._ready = self._called = False  # memory is allocated; the steps ran
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
            loaded = weights_thread.submit(operand_all, missing)
            backend.prepare(graphs, self.memory.nbytes + sum(sizes.values()), others)
            self._constants.held = loaded.result()
        if weights is not None:
            with backend.calling():
                bindings = (b for lowered in compiled.lowered if lowered is not None for b in lowered.constants)
                self._shared = [self._constants(binding.literal, binding.type) for binding in bindings]

    def _plan_memory(self) -> MemoryPlan:
        program, elsewhere = self.compiled.program, self._state.stored
        held = program.graph.inputs if self._holds_inputs else ()
        plan = partial(plan_memory, program, held=held, whole_bytes=self.backend.xp is np)
        memory = plan(elsewhere)
        if self.backend.side_by_side and not elsewhere:
            wider = plan(side_by_side=True)
            if wider.nbytes <= memory.nbytes + SIDE_BY_SIDE_BYTES:
                return wider
        return memory

    @property
    def kernels(self) -> set[Partition]:
        """Return the steps that a kernel of fusec runs; none before the first call."""
        return self._steps.kernels

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

    def after_steps(self, actions: Mapping[int, Callable[[], None]]) -> None:
        """Call functions after steps, by number, from now on. What they queue on the device is captured with the steps.

        Only for programs with state, whose steps run in order.
        """
        if not self.state:
            raise ExecutionError("only the steps of a program with state run in order")
        with self._lock:
            self._after = dict(actions)
            self._forget_memory()

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
                self._forget_memory()

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

    def rehearse(self, choose: StepChooser, state: Mapping[str, Array] | None = None) -> None:
        """Choose plans and kernels by the time of the whole model, before the first call.

        state: values that some inputs of the state have meanwhile; the others, like all inputs, are random. A program
            with state is unchanged without them, or if its state has values, because running it would replace these.
        """
        if self.state and (state is None or self._state.buffers):
            return
        given = state or {}
        steps = list(zip(self.compiled.program.steps, self.compiled.lowered, strict=True))
        with self._lock, self.backend.calling():
            for name in self.state:
                self._state.buffer(name)
            self._allocate()
            for value, feed in zip(self.compiled.graph.inputs, self._feeders, strict=True):
                if value.name in given:
                    feed(given[value.name])
            inputs = [(self._steps.buffer(v), v.type) for v in self.compiled.graph.inputs if v.name not in given]
            runnables = [step if lowered is None else lowered.graph for step, lowered in steps]
            for number in choose(inputs, runnables, self._launches, lambda number: self._steps.bound(*steps[number])):
                self._launches[number] = self._steps.bound(*steps[number])
            if self.state:
                self.backend.finish()
                self._state.buffers.clear()
                self._forget_memory()

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
        self._constants.held.clear()
        for value in self.compiled.program.graph.values():
            if value.literal is not None:
                value.literal.forget_early()
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

    def _forget_memory(self) -> None:
        """Allocate memory and bind the steps again before the next run, because captured steps use old addresses."""
        self._ready, self._called, self._replay = False, False, None


def _followed(launch: Callable[[], None], action: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        launch()
        action()

    return both
