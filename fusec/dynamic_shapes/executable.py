"""Run a model with symbolic dims; it is compiled for each set of input shapes, the first time it sees them.

A `DynamicExecutable` is called like an `Executable`. It caches the programs it used last, and they share weights.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from fusec import frontends
from fusec.dynamic_shapes.padding import Padding, pad
from fusec.dynamic_shapes.save_shapes import representatives, save
from fusec.dynamic_shapes.size_ranges import sizing_of
from fusec.dynamic_shapes.sizing import Key, Shapes, Sizes, Sizing, spec_of
from fusec.errors import ExecutionError
from fusec.execution.signature import array_of, bare, by_name, require_by_name
from fusec.frontends.padding_proof import Crop
from fusec.ir import Array
from fusec.ops.random import STATE_NAME
from fusec.runtime import Executable
from fusec.segments.executable import AnyExecutable
from fusec.system.unpicklable import Unpicklable

if TYPE_CHECKING:
    from fusec.diagnostics.explain import Explanation
    from fusec.diagnostics.step_times import Bench
    from fusec.diagnostics.verify import Report
    from fusec.segments.records import SegmentedExplanation

MAX_SHAPES = 8


class DynamicExecutable(Unpicklable):
    """A model that is compiled for each set of input shapes it is called with. Only one thread compiles at a time."""

    def __init__(
        self,
        source: frontends.Source,
        compile: Callable[[Shapes], AnyExecutable],
        device: str,
        *,
        max_shapes: int = MAX_SHAPES,
        buckets: Mapping[str, Sequence[int]] | None = None,
        sizing: Sizing | None = None,
        proved: Mapping[Key, tuple[Crop, ...]] | None = None,
        available: Sequence[Key] | None = None,
    ):
        """Make an executable without programs.

        compile: makes a program for input shapes.
        sizing: inputs and outputs with the ranges of their dims; None: as the model declares them.
        proved: crops of all input shapes that may be padded; None: they are proved when a call has them.
        available: the only input shapes that a file has programs for; None: any can be compiled.
        """
        self.source = source
        self.available = None if available is None else tuple(available)
        self.device = device
        self.sizing = sizing or sizing_of(source)
        self.inputs = tuple(map(spec_of, self.sizing.inputs))
        self.outputs = tuple(map(spec_of, self.sizing.outputs))
        self.padding = Padding(source, self.sizing, buckets or {}, 64 * max_shapes, proved)
        self._compile = compile
        self._max_shapes = max_shapes
        self._lock = threading.RLock()
        self._draws = count()  # calls that did not give the state of random numbers
        self._programs: OrderedDict[Key, AnyExecutable] = OrderedDict()

    def __repr__(self) -> str:
        """Describe the model and its programs in one line."""
        from fusec.diagnostics.notebook import shapes_text

        return shapes_text(self)

    def _repr_html_(self) -> str:
        """Describe the model and its programs for notebooks."""
        from fusec.diagnostics.notebook import shapes_html

        return shapes_html(self)

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Return the input shapes that have programs, the one used last at the end."""
        names = [spec.name for spec in self.inputs]
        return [dict(zip(names, key, strict=True)) for key in self._programs]

    def at(self, shapes: Shapes | Sizes) -> AnyExecutable:
        """Return the program for these shapes, and compile it if there is none.

        shapes: shapes by name of an input, or sizes by name of a symbolic dim.
        Raises ExecutionError if the shapes do not fit the model or each other.
        Raises ModelError if the model does not compile for these shapes.
        """
        given = self.sizing.by_input(shapes)
        self.sizing.dims(given)
        return self._at(tuple(given[spec.name] for spec in self.inputs))

    def fits(self, shapes: Shapes) -> bool:
        """Tell if these input shapes agree with the model and each other."""
        try:
            self.sizing.dims(shapes)
        except ExecutionError:
            return False
        return True

    def program(self, shapes: Shapes | Sizes | None = None) -> AnyExecutable:
        """Return the program for these shapes, as `at`. None: the likely sizes, else the shapes that were used last.

        Raises ExecutionError if no sizes are likely and there is no program yet.
        """
        if shapes is not None:
            return self.at(shapes)
        likely = self.sizing.likely
        if likely is not None:
            return self.at(self.padding.padded(likely, self.padding.changed(self.sizing.dims(likely))))
        if not self._programs:
            raise ExecutionError(
                f"{self.source.file}: there is no program yet: call it, give shapes, or compile it with ranges"
            )
        return self.at(self.shapes[-1])

    def explain(self, shapes: Shapes | Sizes | None = None) -> Explanation | SegmentedExplanation:
        """Explain the fusions of one program; see `program` and `Executable.explain`."""
        return self.program(shapes).explain()

    def verify(
        self,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
        shapes: Shapes | Sizes | None = None,
    ) -> Report:
        """Check one program against float64 references; see `program` and `Executable.verify`."""
        return self.program(shapes).verify(seed, progress)

    def bench(self, runs: int = 20, seed: int = 0, shapes: Shapes | Sizes | None = None) -> Bench:
        """Time one program on random inputs; see `program` and `Executable.bench`.

        Raises FusecError for a model with host steps.
        """
        return _one(self.program(shapes)).bench(runs, seed)

    def assert_fused(self, pattern: str, *, cudnn_only: bool = False) -> None:
        """Raise CheckError unless the pattern is fused in every program; see `Executable.assert_fused`."""
        for program in list(self._programs.values()) or [self.program()]:
            program.assert_fused(pattern, cudnn_only=cudnn_only)

    def save(self, path: str | os.PathLike[str], *, sources: bool = False) -> None:
        """Write a `.fusec` file with several programs, which `fusec.load` reads as a DynamicExecutable.

        It has programs for the buckets of each dim, or for the least, likely and largest size of its range. It also has
        the programs that were used. Input shapes that are padded to them are proved now. A loaded file refuses all
        other shapes, because it does not hold the model.
        sources: also store the weights that only the imported model has; see `fusec.save`.
        Raises FusecError if there are too many programs, the model has host steps, or the file cannot be written.
        """
        programs = [self.at(shapes) for shapes in representatives(self.sizing, self.padding)]
        programs += [program for program in self._programs.values() if program not in programs]
        programs = programs or [self.program()]
        save(path, [_one(program).contents() for program in programs], self.sizing, self.padding, sources=sources)

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """Run on arrays in the order of the inputs, or by name. Several outputs are returned as a tuple."""
        return bare(self.run(None, by_name([spec.name for spec in self.inputs], arrays, named)))

    def run(
        self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None
    ) -> list[Array]:
        """Run as `Executable.run`, for any input shapes in which dims of one name have one size."""
        require_by_name(feeds, "inputs")
        shapes = {
            name: tuple(int(d) for d in (array if hasattr(array, "shape") else array_of(name, array)).shape)
            for name, array in feeds.items()
            if name != STATE_NAME
        }
        padded_dims = self.padding.changed(self.sizing.dims(shapes))
        if not padded_dims:
            program = self._at(tuple(shapes[spec.name] for spec in self.inputs))
            return program.run(output_names, self._with_random_state(program, feeds), out)
        large = self.padding.padded(shapes, padded_dims)
        crop = self.padding.crops(shapes)
        program = self.at(large)
        assert isinstance(program, Executable), "padding is proved for graphs of one program only"
        padded = {name: pad(name, array, shapes[name], large[name], program) for name, array in feeds.items()}
        known = [spec.name for spec in program.outputs]
        results = program.run(output_names, padded)
        wanted = known if output_names is None else list(output_names)
        cropped = [crop[known.index(name)].apply(array) for name, array in zip(wanted, results, strict=True)]
        for index, name in enumerate(wanted):
            if out is not None and name in out:
                out[name][...] = cropped[index]
                cropped[index] = out[name]
        return cropped

    def _with_random_state(self, program: AnyExecutable, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add seed 0 and the number of the call, which all programs share, if the program draws random numbers."""
        if STATE_NAME in feeds or all(spec.name != STATE_NAME for spec in program.inputs):
            return feeds
        return {**feeds, STATE_NAME: np.array([0, next(self._draws)], np.uint64)}

    def _at(self, key: Key) -> AnyExecutable:
        with self._lock:
            if key not in self._programs:
                shapes = {spec.name: shape for spec, shape in zip(self.inputs, key, strict=True)}
                with _without_garbage_collection() if self._programs else nullcontext():
                    made = self._compile(shapes)
                while len(self._programs) >= self._max_shapes:
                    self._programs.popitem(last=False)
                self._programs[key] = made
            self._programs.move_to_end(key)
            return self._programs[key]


def _one(program: AnyExecutable) -> Executable:
    """Return a program. Raises FusecError for a model with host steps, which is more than one."""
    if not isinstance(program, Executable):
        program.refuse("is more than one program")
    return program


@contextmanager
def _without_garbage_collection() -> Generator[None]:
    """Pause Python's garbage collector while a program is compiled.

    Compilation makes many objects that stay, so the collector would search weights and all modules repeatedly.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
