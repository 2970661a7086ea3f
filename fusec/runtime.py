"""Run a compiled program: on an NVIDIA GPU, or on any machine in the simulator.

Both backends run the same steps over the same memory plan. They differ in the array module (CuPy or NumPy), and in
what runs a cuDNN graph. `fusec.execution` holds what an Executable is made of. Methods that report import
`fusec.diagnostics` when they are called, because a start does not need it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fusec import lockfile
from fusec.artifacts import fusec_file
from fusec.errors import ExecutionError
from fusec.execution.backend import Backend
from fusec.execution.compilation import Compiled
from fusec.execution.program_runner import ProgramRunner
from fusec.execution.shared_weights import SharedWeights
from fusec.execution.signature import Interface, TensorSpec, bare, by_name, on_host
from fusec.execution.simulator_backend import SimulatorBackend
from fusec.gpu.autotune.step_choices import TunedChoices
from fusec.ir import Array, DType, copy_name, quote
from fusec.lowering.packing import in_order, unpack
from fusec.plans.lock_record import Lock
from fusec.schedule.program import Kind, Partition
from fusec.system.compile_timer import CompileTimes

if TYPE_CHECKING:
    from fusec.diagnostics.explain import Explanation
    from fusec.diagnostics.launch_hint import Hint
    from fusec.diagnostics.step_times import Bench
    from fusec.diagnostics.verify import Report

__all__ = ["Backend", "Executable", "SimulatorBackend", "TensorSpec", "by_name", "on_host"]


class Executable(ProgramRunner):
    """A compiled model, ready to call. Calls from several threads take turns.

    The first call runs the steps one by one. The second call captures them, and it and later calls replay the capture.

    inputs, outputs: names, shapes and types.
    compiled: the graphs and the program.
    memory: the place of each stored value in the arena, the memory that all calls share.
    spent: compile time by stage; None if the model was not compiled in this process.
    state: inputs that stay on the device, with the outputs that replace them. `bind` gives them values, and `step`
        replaces them.
    """

    def __init__(self, compiled: Compiled, backend: Backend, weights: SharedWeights | None = None):
        """Prepare a program on a backend. weights: shared with other executables of the same kind of backend."""
        super().__init__(compiled, backend, weights)
        self.spent: CompileTimes | None = None
        self._interface = Interface(compiled.graph, self.state, backend.xp, backend.from_any)
        self.inputs, self.outputs = self._interface.inputs, self._interface.outputs
        self._input_names = tuple(spec.name for spec in self.inputs)

    def __repr__(self) -> str:
        """Describe the program in one line."""
        from fusec.diagnostics.notebook import program_text

        return program_text(self)

    def _repr_html_(self) -> str:
        """Describe the program for notebooks."""
        from fusec.diagnostics.notebook import program_html

        return program_html(self)

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
            self._forget_memory()

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
            self._forget_memory()

    def step(self, *arrays: Any, **named: Any) -> Any:
        """Run on the inputs that are no state, replace the state that has updates, and return the other outputs.

        One output comes bare, several as a tuple.
        """
        free = [s.name for s in self.inputs if s.name not in self.state]
        if len(arrays) > len(free):
            raise ExecutionError(f"{len(arrays)} arrays for {len(free)} inputs")
        replaced = set(self.state.values())
        wanted = [s.name for s in self.outputs if s.name not in replaced]
        return bare(self.run(wanted, {**dict(zip(free, arrays, strict=False)), **named}))

    def value(self, name: str) -> np.ndarray[Any, Any]:
        """Return the value of an input of the state, on the host."""
        if name not in self.state:
            raise ExecutionError(f"{quote(name)} is no state; that is {', '.join(map(quote, self.state)) or 'none'}")
        if name not in self._state.buffers:
            raise ExecutionError(f"state {quote(name)} has no value: bind it")
        with self._lock, self.backend.calling():
            array = unpack(self._state.buffers[name], self._state.values[name].type).copy()
            self.backend.finish()
            return array if isinstance(array, np.ndarray) else array.get()

    @property
    def asked(self) -> bool:
        """Tell if cuDNN was asked about the program."""
        return self.compiled.asked

    @property
    def note(self) -> str:
        """Return the note that reports print; see `Compiled.note`."""
        return self.compiled.note

    @property
    def hints(self) -> tuple[Hint, ...]:
        """Return what a user may want to know about the program, such as steps outside cuDNN, and why."""
        from fusec.diagnostics.hints import hints

        return hints(self.compiled)

    @property
    def device(self) -> str:
        """Return `simulated`, or the name of the GPU."""
        return self.backend.name

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """Run on arrays given in the order of `inputs`, or by name. One output comes bare, several as a tuple.

        Arrays are NumPy, CuPy or anything with DLPack; results are NumPy arrays if every argument was
        on the host, else CuPy arrays. Raises ExecutionError naming the input that does not fit.
        """
        return bare(self.run(None, by_name(self._input_names, arrays, named)))

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
            touches_host = all_on_host and (feeds or picked)  # not: a program of state alone, which need not wait
            if touches_host or (into and any(isinstance(array, np.ndarray) for array in into.values())):
                self.backend.finish()
        if out:
            names = (self.outputs[place].name for place in wanted)
            picked = [out.get(name, array) for name, array in zip(names, picked, strict=True)]
        return picked

    def verify(self, seed: int = 0, progress: Callable[[int, int], None] | None = None) -> Report:
        """Check the passes, and each step as it runs here, on random inputs against float64 references.

        State is unchanged; other values of the last call are overwritten.
        """
        from fusec.diagnostics.verify import verify

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

    def save(self, path: str | os.PathLike[str], *, sources: bool = False) -> None:
        """Write the compiled model to a `.fusec` file, which `fusec.load` reads; on a GPU with the tuned plans.

        sources: also store the weights that only the imported model has; see `fusec.save`.
        """
        compiled, plans = self.contents()
        fusec_file.save(os.fspath(path), [compiled], plans, sources=sources)

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

    def _plans(self) -> lockfile.Plans:
        keys = dict.fromkeys(lowered.graph.key for lowered in self.compiled.lowered if lowered is not None)
        return {(self.compiled.target.name, key): [entry] for key, entry in self.backend.entries(keys).items()}

    def bench(self, runs: int = 20, seed: int = 0) -> Bench:
        """Time calls on random inputs, all steps in one replay, and each step alone against its limit.

        A program with state is refused, because a call would replace the state.
        """
        if self.state:
            raise ExecutionError("a program with state cannot be timed on random inputs")
        from fusec.diagnostics.step_times import measure
        from fusec.diagnostics.verify import random_array

        rng = np.random.default_rng(seed)
        types = {v.name: v.type for v in self.compiled.graph.inputs}
        return measure(self, {name: in_order(random_array(rng, type), type) for name, type in types.items()}, runs)

    def explain(self) -> Explanation:
        """Explain which ops fused into which step and, for every op that did not fuse, the reason."""
        from fusec.diagnostics.explain import explain, float_edges, with_chosen_plans, with_rows_in_place

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
        from fusec.diagnostics.must_fuse import assert_fused

        self.compiled.require_answers(f"holding {pattern!r} in place")
        assert_fused(self.compiled.program, pattern, cudnn_only, self.libraries() if cudnn_only else None)
