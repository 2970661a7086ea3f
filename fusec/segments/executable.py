"""Run a model that is split at host steps: segment by segment, each as a program of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np

from fusec.errors import CheckError, ExecutionError, FusecError, VerifyError
from fusec.execution.signature import Interface, SymbolicSpec, bare, by_name
from fusec.graph.string_array import text_bytes
from fusec.ir import Array, DType, Graph, Literal, TensorType, quote
from fusec.reference import evaluate
from fusec.runtime import Executable
from fusec.segments.call_values import Arrays, CallValues, copied, to_host, written
from fusec.segments.loops import BodyProgram, LoopPrograms, Shapes
from fusec.segments.programs import Compile, PreparedSegment, SegmentPrograms
from fusec.segments.records import HostStepRecord, SegmentedExplanation, SegmentRecord
from fusec.system.compile_timer import CompileTimes
from fusec.system.unpicklable import Unpicklable

if TYPE_CHECKING:
    from fusec.diagnostics.launch_hint import Hint
    from fusec.diagnostics.verify import Report
    from fusec.frontends import Source
    from fusec.frontends.onnx.emission.host_values import Answer
    from fusec.frontends.onnx.emission.loop_body import LoopBody
    from fusec.frontends.onnx.segmented.segments import HostStep, Segment


CompileBody = Callable[["Source", Shapes], BodyProgram]


class SegmentedExecutable(Unpicklable):
    """A compiled model with host steps, ready to call. Calls from several threads take turns.

    A host step is a node whose result has a shape that depends on values (NonZero), or whose operand decides a shape
    (Reshape). The segment before it runs as a program, and NumPy computes the host step. The segment after it is
    compiled for the shapes that the call has there. Segments are cached.

    inputs, outputs: names, shapes and types. Dims of outputs that depend on values are "".
    file: name of the model in messages.
    device: `simulated`, or the name of the GPU.
    spent: compile time of the first segment by stage.
    """

    def __init__(self, model: Source, first: Segment, compile: Compile, compile_body: CompileBody, arrays: Arrays):
        """Compile the first segment.

        compile: compiles the graph of a segment.
        compile_body: compiles the body of a loop for the shapes of its inputs.
        arrays: makes arrays on the device that runs the programs.
        """
        self.device = arrays.name
        self.spent: CompileTimes | None = None
        graph = Graph("inputs")
        for slot in first.inputs:
            graph.add_input(slot.name, slot.type)
        self._interface = Interface(graph, (), arrays.xp, arrays.from_any)
        self.inputs = self._interface.inputs
        self.outputs = tuple(
            SymbolicSpec(
                each.name,
                None if each.dims is None else tuple(d if isinstance(d, int) else "" for d in each.dims),
                None if each.dtype is None else each.dtype.numpy,
            )
            for each in model.interface[1]
        )
        self._arrays = arrays
        self.file = model.file
        self._compile_body = compile_body
        self._loops: WeakKeyDictionary[LoopBody, LoopPrograms] = WeakKeyDictionary()
        self._segments = SegmentPrograms(first, compile)
        self._lock = threading.RLock()
        self._last: list[tuple[PreparedSegment, SegmentRecord]] = []

    def __repr__(self) -> str:
        """Describe the model and its programs in one line."""
        from fusec.diagnostics.notebook import segments_text

        return segments_text(self)

    def _repr_html_(self) -> str:
        """Describe the model and its programs for notebooks."""
        from fusec.diagnostics.notebook import segments_html

        return segments_html(self)

    @property
    def programs(self) -> list[Executable]:
        """Return the programs that are compiled: of segments, the first segment first, and of the bodies of loops."""
        return [program for _, program in self._named_programs()]

    def _named_programs(self) -> list[tuple[str, Executable]]:
        """Return the programs, each with its place for reports."""
        found = [(f"segment {depth}", program) for depth, program in self._segments.programs]
        for body in (body for loop in self._loops.values() for body in loop.programs.values()):
            if isinstance(body, SegmentedExecutable):
                found += [(f"loop body, {place}", program) for place, program in body._named_programs()]
            elif isinstance(body, Executable):
                found.append(("loop body", body))
        return found

    @property
    def asked(self) -> bool:
        """Tell if cuDNN was asked about the programs."""
        return all(program.compiled.asked for program in self.programs)

    @property
    def note(self) -> str:
        """Return the note that reports print; see `Compiled.note`."""
        return next((program.compiled.note for program in self.programs), "")

    @property
    def hints(self) -> tuple[Hint, ...]:
        """Return the hints about all programs that are compiled, each once; see `Executable.hints`."""
        return tuple(dict.fromkeys(hint for program in self.programs for hint in program.hints))

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """Run on arrays given in the order of `inputs`, or by name. One output comes bare, several as a tuple."""
        return bare(self.run(None, by_name([spec.name for spec in self.inputs], arrays, named)))

    def run(
        self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None
    ) -> list[Array]:
        """Run as `Executable.run`. Raises ModelError if a segment cannot be compiled for the values that it gets."""
        wanted = self._wanted(output_names, out or {})
        given, all_on_host = self._interface.feeds(feeds, ())
        tensors = {spec.name: array for spec, array in zip(self.inputs, given, strict=True) if array is not None}
        with self._lock:
            results = self._run(CallValues(tensors, self._arrays), wanted, all_on_host)
        return [written(name, array, out, self._arrays) for name, array in zip(wanted, results, strict=True)]

    def _wanted(self, names: Sequence[str] | None, out: Mapping[str, Any]) -> list[str]:
        known = [spec.name for spec in self.outputs]
        wanted = known if names is None else list(names)
        for name in (*wanted, *out):
            if name not in known or name not in wanted:
                raise ExecutionError(f"no output {quote(str(name))}; outputs are {', '.join(map(quote, known))}")
        return wanted

    def _run(self, held: CallValues, wanted: Sequence[str], all_on_host: bool) -> list[Array]:
        """Run segment by segment, and return outputs that share no memory with the inputs."""
        prepared, path = self._segments.first, ()
        computed: dict[int, list[Array]] = {}  # what the host computed, by number of the node
        last: list[tuple[PreparedSegment, SegmentRecord]] = []
        while True:
            seconds = self._compute(prepared, held)
            answers: list[Answer] = []
            records: list[HostStepRecord] = []
            for step in prepared.segment.steps:
                answer, record = self._host_step(step, held, computed)
                answers.append(answer)
                records.append(record)
            last.append((prepared, _record(prepared, records, seconds)))
            if not answers:
                break
            cropped = {step.index for step in prepared.segment.steps if step.crops}
            path = (*path, tuple(map(_key, answers)))
            prepared = self._segments.following(path, prepared, answers)
            for index, names in prepared.segment.host_inputs.items():
                for name, array in zip(names, computed.get(index, ()), strict=True):
                    held.put(name, array, own=index in cropped)
        self._last = last
        found = prepared.segment.results
        slots = (found[name] for name in wanted)
        names = [one if isinstance(one, Literal) else one.name for one in slots]  # pyright: ignore[reportAttributeAccessIssue] - no list
        return [held.result(one, all_on_host) for one in names]

    def _compute(self, prepared: PreparedSegment, held: CallValues) -> float:
        """Run one segment, and return its seconds."""
        graph, start = prepared.segment.graph, time.perf_counter()
        if prepared.program is not None:
            program = prepared.program
            feeds = {spec.name: held.on_device(spec.name) for spec in program.inputs}
            for spec, array in zip(program.outputs, program.run(None, feeds), strict=True):
                held.put(spec.name, array, own=True)
        elif graph is not None:
            with np.errstate(all="ignore"):
                results = evaluate(graph, {value.name: held.on_host(value.name) for value in graph.inputs})
            for name, array in results.items():
                held.put(name, np.asarray(array))  # a reduction of NumPy gives a number
        return time.perf_counter() - start

    def _host_step(
        self, step: HostStep, held: CallValues, computed: dict[int, list[Array]]
    ) -> tuple[Answer, HostStepRecord]:
        """Read the values of a host step, and compute its results if it has some."""
        start = time.perf_counter()
        if step.body is not None:
            made, trips = self._loop(step, step.body, [held.on_device(one) for one in step.reads])
            answer = self._computed(step, made, computed)
            read_bytes, written_bytes = trips + 1, 9 * trips  # the condition; the number of the trip and the condition
        elif step.crops:
            number, trips = held.on_host(step.reads[0]), None
            made = [crop.of(int(number)).apply(held.tensors[name]) for name, crop in step.crops]
            answer = self._computed(step, made, computed)
            read_bytes, written_bytes = number.nbytes, 0
        else:
            on_device = step.custom is not None and step.custom.on_device
            take = held.on_device if on_device else held.on_host
            read, trips, made = [take(one) for one in step.reads], None, list[Array]()
            if step.compute is None:
                answer: Answer = tuple(array.copy() for array in read)  # constants must not change with the caller's
            else:
                with _failing_as(step):
                    made = list(step.compute(read))
                    if on_device:  # a copy, because the function may give the same memory again
                        made = [copied(self._arrays.from_any(array), self._arrays, on_host=False) for array in made]
                    answer = self._computed(step, made, computed)
            read_bytes = 0 if on_device else sum(map(text_bytes, read))
            written_bytes = 0 if on_device else sum(map(text_bytes, made))
        record = replace(_unmeasured(step), read_bytes=read_bytes, written_bytes=written_bytes)
        return answer, replace(record, seconds=time.perf_counter() - start, trips=trips)

    def _loop(self, step: HostStep, body: LoopBody, reads: Sequence[Array]) -> tuple[list[Array], int]:
        """Run a loop, and return its results and the number of its trips."""
        loop = self._loops.get(body)
        if loop is None:
            loop = self._loops[body] = LoopPrograms(body, f"{self.file}, loop {step.node!r}", self._compile_body)
        try:
            results = loop.run(body, reads, partial(to_host, arrays=self._arrays), self._arrays.xp)
        except ExecutionError as error:
            raise ExecutionError(f"node {step.node!r} ({step.op}): {error}") from error
        return results, loop.trips

    @staticmethod
    def _computed(step: HostStep, results: Sequence[Array], computed: dict[int, list[Array]]) -> Answer:
        """Hold the results of a host step, and return their types."""
        computed.setdefault(step.index, []).extend(results)
        return tuple(TensorType(array.shape, DType.of_host(array.dtype)) for array in results)

    def explain(self) -> SegmentedExplanation:
        """Explain each segment, each host step and its cost, in the last call."""
        with self._lock:
            return SegmentedExplanation(
                tuple(_explained(prepared, record) for prepared, record in self._last_or_first())
            )

    def last_segments(self) -> list[tuple[Executable | None, SegmentRecord]]:
        """Return the segments of the last call, each with its program if it has one."""
        with self._lock:
            return [(prepared.program, record) for prepared, record in self._last_or_first()]

    def _last_or_first(self) -> list[tuple[PreparedSegment, SegmentRecord]]:
        return self._last or [(self._segments.first, _record(self._segments.first, None, None))]

    def verify(self, seed: int = 0, progress: Callable[[int, int], None] | None = None) -> Report:
        """Check the programs of all segments that are compiled, as `Executable.verify`. Host steps are the reference.

        Raises ExecutionError if none is compiled.
        """
        from fusec.diagnostics.verify import Report

        with self._lock:
            programs = self._named_programs()
            if not programs:
                raise ExecutionError(
                    f"{self.file}: no segment has a program to verify: all of the model runs on the host so far"
                )
            found = ((place, each) for place, program in programs for each in program.verify(seed, progress).checks)
            return Report(tuple(replace(each, what=f"{place}: {each.what}") for place, each in found))

    def assert_fused(self, pattern: str, *, cudnn_only: bool = False) -> None:
        """Raise CheckError unless the pattern holds in the programs that are compiled; see `Executable.assert_fused`.

        It must occur in one of them, and each place in any of them must be one step.
        """
        from fusec.diagnostics.must_fuse import check

        programs = self.programs
        if not programs:
            raise CheckError(f"{pattern}: no segment has a program: all of the model runs on the host so far")
        having = [program for program in programs if check(program.compiled.program, pattern)[0]]
        for program in having or programs[:1]:
            program.assert_fused(pattern, cudnn_only=cudnn_only)

    def save(self, path: str | os.PathLike[str]) -> NoReturn:
        """Raise FusecError, because a `.fusec` file holds one program."""
        self.refuse(f"cannot be written to {os.fspath(path)}: a .fusec file holds one program")

    def lock(self) -> NoReturn:
        """Raise FusecError, because a lock names the choices of one program."""
        self.refuse("has no lock: a lock names the choices of one program")

    def bind(self, **arrays: Any) -> NoReturn:
        """Raise FusecError, because segments share no state."""
        self.refuse("has no state")

    def refuse(self, what: str) -> NoReturn:
        """Raise FusecError for what only a model of one program has."""
        raise FusecError(f"{self.file}: {what}, and this model {why_not_one(self._segments.first.segment)}")


@contextmanager
def _failing_as(step: HostStep) -> Generator[None]:
    """Raise ExecutionError with the name of the node if a host step fails."""
    try:
        with np.errstate(all="ignore"):
            yield
    except (VerifyError, ValueError, IndexError, MemoryError) as error:
        raise ExecutionError(f"node {step.node!r} ({step.op}): {error}") from error


def _unmeasured(step: HostStep) -> HostStepRecord:
    """Describe a host step before a call."""
    function = None if step.custom is None else step.custom.label
    record = HostStepRecord(step.node, step.op, step.what, step.decides, len(step.reads), function=function)
    return replace(record, on_device=step.custom is not None and step.custom.on_device, most=step.most or None)


def why_not_one(first: Segment) -> str:
    """Say why a model is not one program, and what to do about it. first: its first segment."""
    if not first.steps:
        return "has strings, which only the host has"
    step = first.steps[0]
    if step.custom is not None:
        function = f"the Python function {step.custom.label} of custom_ops"
        return f"is split at node {step.node!r} ({step.op}), which calls {function}"
    return (
        f"is split at node {step.node!r} ({step.op}), which needs {step.what} on the host. If inputs of the model "
        "decide them, give their values: constants={'name': value}, on the command line --constant name=value"
    )


def _key(answer: Answer) -> Hashable:
    return tuple(one if isinstance(one, TensorType) else (one.shape, one.dtype.str, _content(one)) for one in answer)


def _content(array: Array) -> Hashable:
    return tuple(array.flat) if array.dtype == object else array.tobytes()


def _record(prepared: PreparedSegment, steps: Sequence[HostStepRecord] | None, seconds: float | None) -> SegmentRecord:
    segment = prepared.segment
    if steps is None:
        steps = [_unmeasured(step) for step in segment.steps]
    runs_as = "program" if prepared.program is not None else "nothing" if segment.graph is None else "numpy"
    ops = 0 if segment.graph is None else len(segment.graph)
    return SegmentRecord(runs_as, ops, None, tuple(steps), len(segment.waiting), seconds)


def _explained(prepared: PreparedSegment, record: SegmentRecord) -> SegmentRecord:
    return record if prepared.program is None else replace(record, explanation=prepared.program.explain())


# A model is one program, or several with host steps between them.
AnyExecutable = Executable | SegmentedExecutable
