"""Compile a model with symbolic dims for each set of input shapes, the first time it sees them.

A `DynamicExecutable` is called like an `Executable`. It caches the programs it used last, and they share weights.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fusec import driver, frontends
from fusec.dynamic_shapes.padding_proof import Crop, crops
from fusec.errors import ExecutionError, FusecError, ModelError
from fusec.execution.compile_options import CompileOptions
from fusec.execution.shape_family import ShapeFamily
from fusec.execution.signature import array_of, require_by_name
from fusec.gpu import device
from fusec.ir import Array, Graph, quote
from fusec.lowering.packing import to_logical
from fusec.passes.layout.io_layout import names, require_known
from fusec.runtime import Executable, SimulatorBackend, by_name, on_host
from fusec.system.printable import printable

if TYPE_CHECKING:
    from onnx import ModelProto

MAX_SHAPES = 8
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class SymbolicSpec:
    """An input or output: each dim is a size, or the name of a symbolic dim ("" if it has no name).

    `shape` and `dtype` are None if the model does not declare them.
    """

    name: str
    shape: tuple[int | str, ...] | None
    dtype: np.dtype[Any] | None


def compile_dynamic(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph | frontends.Source,
    *,
    target: str = "auto",
    precision: str = "fp32",
    tune: str = "quick",
    budget: float = float("inf"),
    disable: Collection[str] = (),
    deterministic: bool = False,
    channels_last: bool | Collection[str] = False,
    progress: driver.Progress | None = None,
    constants: Mapping[str, Any] | None = None,
    max_shapes: int = MAX_SHAPES,
    buckets: Mapping[str, Sequence[int]] | None = None,
    share_kernels: bool = False,
    tune_each: bool = False,
    simulate: bool = False,
) -> DynamicExecutable:
    """Return an executable for all input shapes of a model. Nothing is compiled yet.

    fusec compiles one program per set of input shapes, the first time it sees them. Parameters that are not listed
    here are those of `compile`.

    max_shapes: number of programs to cache, those used last.
    buckets: sizes to compile for, by name of a symbolic dim. A smaller size is padded to the next one. That needs a
        proof that no row of the results depends on another row; a call raises ModelError if there is none.
    share_kernels: on a GPU, let cuDNN compile each kernel once for all sizes, so that a new size compiles none.
    tune_each: time plans and kernels for each size. By default a size within a factor of 4 of a tuned size reuses its
        choices, which takes tenths of a second.
    simulate: run in simulation even if the target's GPU is present.

    Raises ModelError: when the model cannot be read.
    """
    if max_shapes < 1:
        raise FusecError(f"max_shapes is {max_shapes}, but must be 1 or more")
    source = (model if isinstance(model, frontends.Source) else frontends.Source(model)).with_constants(constants or {})
    if not isinstance(channels_last, bool):
        require_known([spec.name for specs in source.interface for spec in specs], names(channels_last))
    options = CompileOptions(
        target=target,
        precision=precision,
        tune=tune,
        budget_s=budget,
        disable=disable,
        deterministic=deterministic,
        channels_last=channels_last,
        simulate=simulate,
        progress=progress,
    )
    symbolic = any(d is None or isinstance(d, str) for spec in source.interface[0] for d in spec.dims or (None,))
    family = ShapeFamily(
        share_kernels=share_kernels,
        first_plans=tune == "none" and not simulate,
        transfers=not tune_each and not simulate,
        more_sizes=symbolic,
    )

    def compiled(shapes: Shapes) -> Executable:
        return driver.compile_model(source, options, shapes, driver.Shared(family))

    here = "" if simulate or not device.is_present(driver.resolve_target(target)) else device.device_name()
    return DynamicExecutable(source, compiled, here or SimulatorBackend.name, max_shapes, buckets or {})


def loaded(
    path: str | os.PathLike[str], target: str = "auto", tune: str = "quick", simulate: bool = False
) -> DynamicExecutable:
    """Load a `.fusec` file, whose shapes are fixed, as a DynamicExecutable."""
    program = driver.load(path, target=target, tune=tune, simulate=simulate)
    source = frontends.Source(program.compiled.source, file=os.fspath(path))
    return DynamicExecutable(source, lambda shapes: program, program.device, 1, {})


class DynamicExecutable:
    """A model that is compiled for each set of input shapes it is called with. Only one thread compiles at a time."""

    def __init__(
        self,
        source: frontends.Source,
        compile: Callable[[Shapes], Executable],
        device: str,
        max_shapes: int,
        buckets: Mapping[str, Sequence[int]],
    ):
        self.source = source
        self.device = device
        inputs, outputs = source.interface
        self.inputs = tuple(_spec(each) for each in inputs)
        self.outputs = tuple(_spec(each) for each in outputs)
        symbols = {d for spec in self.inputs for d in spec.shape or () if isinstance(d, str) and d}
        for symbol, sizes in buckets.items():
            if symbol not in symbols:
                known = printable(", ".join(sorted(symbols))) or "none"
                raise ModelError(f"{source.file}: there is no symbolic dim {symbol!r}; those of the inputs: {known}")
            if not sizes or any(size < 1 for size in sizes):
                raise FusecError(f"buckets of {symbol!r} are {list(sizes)}, but must be sizes of 1 or more")
        self._buckets = {symbol: sorted(set(sizes)) for symbol, sizes in buckets.items()}
        self._compile = compile
        self._max_shapes = max_shapes
        self._lock = threading.RLock()
        self._programs: OrderedDict[tuple[tuple[int, ...], ...], Executable] = OrderedDict()
        self._crops: OrderedDict[tuple[tuple[int, ...], ...], tuple[Crop, ...]] = OrderedDict()

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Return the input shapes that have programs, the one used last at the end."""
        names = [spec.name for spec in self.inputs]
        return [dict(zip(names, key, strict=True)) for key in self._programs]

    def at(self, shapes: Shapes) -> Executable:
        """Return the program for input shapes by name, and compile it if there is none.

        Raises ExecutionError: when the shapes do not fit the model or each other.
        Raises ModelError: when the model does not compile for these shapes.
        """
        given = {name: tuple(shape) for name, shape in shapes.items()}
        self._dims(given)
        return self._at(tuple(given[spec.name] for spec in self.inputs))

    def fits(self, shapes: Shapes) -> bool:
        """Tell if these input shapes agree with the model and each other."""
        try:
            self._dims({name: tuple(shape) for name, shape in shapes.items()})
        except ExecutionError:
            return False
        return True

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        """Run on arrays in the order of the inputs, or by name. Several outputs are returned as a tuple."""
        results = self.run(None, by_name([spec.name for spec in self.inputs], arrays, named))
        return results[0] if len(results) == 1 else tuple(results)

    def run(
        self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None
    ) -> list[Array]:
        """Run as `Executable.run`, for any input shapes in which dims of one name have one size."""
        require_by_name(feeds, "inputs")
        shapes = {
            name: tuple(int(d) for d in (array if hasattr(array, "shape") else array_of(name, array)).shape)
            for name, array in feeds.items()
        }
        dims = self._dims(shapes)
        sizes = {symbol: self._padded(symbol, dims[symbol]) for symbol in self._buckets}
        padded_dims = {symbol: size for symbol, size in sizes.items() if size != dims[symbol]}
        if not padded_dims:
            return self.at(shapes).run(output_names, feeds, out)
        large = {spec.name: _resized(spec, shapes[spec.name], padded_dims) for spec in self.inputs}
        crop = self._proved_crops(shapes, dims, padded_dims)
        program = self.at(large)
        padded = {name: _pad(name, array, shapes[name], large[name], program) for name, array in feeds.items()}
        known = [spec.name for spec in program.outputs]
        results = program.run(output_names, padded)
        wanted = known if output_names is None else list(output_names)
        cropped = [crop[known.index(name)].apply(array) for name, array in zip(wanted, results, strict=True)]
        for index, name in enumerate(wanted):
            if out is not None and name in out:
                out[name][...] = cropped[index]
                cropped[index] = out[name]
        return cropped

    def _dims(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Return the sizes of the named symbolic dims. Raises ExecutionError: when the shapes do not fit."""
        known = {spec.name for spec in self.inputs}
        for name in shapes:
            if name not in known:
                raise ExecutionError(
                    f"no input {quote(str(name))}; inputs are {', '.join(quote(s.name) for s in self.inputs)}"
                )
        dims: dict[str, tuple[int, str]] = {}
        for spec in self.inputs:
            if spec.name not in shapes:
                raise ExecutionError(f"input {quote(spec.name)} is missing")
            if spec.shape is None:
                continue
            shape = shapes[spec.name]
            fits = len(shape) == len(spec.shape)
            if not fits or any(isinstance(d, int) and d != size for d, size in zip(spec.shape, shape, strict=True)):
                want = ", ".join(printable(str(d)) if d != "" else "?" for d in spec.shape)
                raise ExecutionError(f"input {quote(spec.name)} has shape [{want}], the array {list(shape)}")
            for dim, size in zip(spec.shape, shape, strict=True):
                if isinstance(dim, str) and dim:
                    first = dims.setdefault(dim, (size, spec.name))
                    if first[0] != size:
                        raise ExecutionError(
                            f"dim {dim!r} is {first[0]} in input {quote(first[1])}, {size} in input {quote(spec.name)}"
                        )
        return {dim: size for dim, (size, _) in dims.items()}

    def _at(self, key: tuple[tuple[int, ...], ...]) -> Executable:
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

    def _padded(self, symbol: str, size: int) -> int:
        """Return the bucket of a size; a size larger than all buckets is its own."""
        return next((bucket for bucket in self._buckets[symbol] if bucket >= size), size) if size else size

    def _proved_crops(
        self, exact: Mapping[str, tuple[int, ...]], dims: Mapping[str, int], padded_dims: Mapping[str, int]
    ) -> tuple[Crop, ...]:
        """Return the crop of each output, cached by the input shapes.

        exact: input shapes before padding.
        dims: sizes of all named dims before padding.
        padded_dims: sizes after padding, of the dims that are padded.

        Raises ModelError: when padding could change a result.
        """
        key = tuple(exact[spec.name] for spec in self.inputs)
        with self._lock:
            if key in self._crops:
                self._crops.move_to_end(key)
                return self._crops[key]
            shapes, graph = dict(exact), self.source.load(exact)
            found = tuple(Crop() for _ in graph.outputs)
            for symbol, size in padded_dims.items():  # one dim at a time, because a proof is about one size
                shapes = {spec.name: _resized(spec, shapes[spec.name], {symbol: size}) for spec in self.inputs}
                wider = self.source.load(shapes)
                axes = {spec.name: [i for i, d in enumerate(spec.shape or ()) if d == symbol] for spec in self.inputs}
                try:
                    steps = crops(graph, wider, axes, dims[symbol], size)
                except ModelError as error:
                    raise ModelError(
                        f"{self.source.file}: dim {symbol!r} cannot be padded from {dims[symbol]} to {size}: {error}"
                    ) from error
                found = tuple(step.then(crop) for step, crop in zip(steps, found, strict=True))
                graph = wider
            self._crops[key] = found
            while len(self._crops) > 64 * self._max_shapes:
                self._crops.popitem(last=False)
            return found


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


def _resized(spec: SymbolicSpec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return a shape with other sizes for some named dims."""
    named = spec.shape or (None,) * len(shape)
    return tuple(sizes.get(d, size) if isinstance(d, str) else size for d, size in zip(named, shape, strict=True))


def _spec(declared: frontends.Declaration) -> SymbolicSpec:
    return SymbolicSpec(declared.name, declared.dims, None if declared.dtype is None else declared.dtype.numpy)


def _pad(name: str, array: Any, shape: tuple[int, ...], large: tuple[int, ...], program: Executable) -> Array:
    """Pad the array of an input to the larger shape with copies of its last rows, which are valid input data."""
    if shape == large:
        return array
    host = on_host(array)
    own = np.asarray(array) if host else program.backend.from_any(array)
    xp = np if host else program.backend.xp
    order = next(spec.order for spec in program.inputs if spec.name == name) or tuple(range(len(shape)))
    widths = [(0, large[d] - shape[d]) for d in order]
    return to_logical(xp.pad(own.transpose(order), widths, mode="edge"), order)
