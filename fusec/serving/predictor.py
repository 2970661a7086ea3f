"""Run a `.fusec` file on arrays with any number of rows: `fusec.Predictor`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from fusec.diagnostics.verify import random_array
from fusec.driver import load
from fusec.dynamic_shapes.executable import DynamicExecutable
from fusec.errors import ExecutionError, FusecError
from fusec.execution.signature import SymbolicSpec, array_of, require_by_name
from fusec.ir import DType, TensorType, quote
from fusec.lowering.packing import in_order
from fusec.runtime import Executable
from fusec.serving.batch_sizes import BatchSizes, find_batch_sizes, split_rows
from fusec.serving.choose_device import AUTO, choose
from fusec.system.dataclass import dataclass

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class PredictorOptions:
    """Options of `Predictor`; see there. They travel with the path when a predictor is pickled."""

    device: str | int = AUTO
    target: str = "auto"
    tune: str = "quick"
    warm_up: bool = True


@dataclass(frozen=True)
class _Loaded:
    executable: Executable | DynamicExecutable
    sizes: BatchSizes


class Predictor:
    """A compiled model as a function from a dict of arrays to a dict of arrays, which worker processes can load.

    Nothing is loaded before the first use. Pickling keeps path and options only, so a worker loads the file itself and
    uses its own GPU. Calls from several threads take turns.

    Rows are split, and the last ones padded, to the batch sizes that the file has programs for. That needs a proof that
    rows are independent, which is made when the file is loaded. Without it a call must have a shape of the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: str | int = AUTO,
        target: str = "auto",
        tune: str = "quick",
        warm_up: bool = True,
    ):
        """Name a file and how to run it.

        device: `auto`: GPU 0 that the process sees, else simulation; `simulated`; or the number of a GPU, for a process
            that has not used CUDA yet.
        target, tune: as for `fusec.load`.
        warm_up: run every program twice when the file is loaded, so that calls replay recorded steps. In simulation
            there is nothing to record, and only the smallest program runs, once.
        """
        self.path = str(Path(path).absolute())
        self._options = PredictorOptions(device, target, tune, warm_up)
        self._lock = threading.Lock()
        self._loaded: _Loaded | None = None

    def __reduce__(self) -> tuple[Callable[[str, PredictorOptions], Predictor], tuple[str, PredictorOptions]]:
        return _restored, (self.path, self._options)

    def __repr__(self) -> str:
        state = "not loaded" if self._loaded is None else f"on {self.device}"
        return f"Predictor({self.path!r}, {state})"

    def load(self) -> Predictor:
        """Load the file and warm up now, unless that was done. Returns the predictor itself.

        Raises ModelError, TargetError: as `fusec.load`, or when the GPU cannot be chosen.
        """
        self._ready()
        return self

    @property
    def executable(self) -> Executable | DynamicExecutable:
        """Return the loaded executable."""
        return self._ready().executable

    @property
    def device(self) -> str:
        """Return `simulated`, or the name of the GPU."""
        return self.executable.device

    @property
    def inputs(self) -> tuple[SymbolicSpec, ...]:
        """Return names, shapes and types of the inputs. Dim 0 is "batch" if calls may have any number of rows."""
        return self._described(self.executable.inputs)

    @property
    def outputs(self) -> tuple[SymbolicSpec, ...]:
        """Return names, shapes and types of the outputs, as `inputs`."""
        return self._described(self.executable.outputs)

    def _described(self, specs: Sequence[Any]) -> tuple[SymbolicSpec, ...]:
        first = ("batch",) if self.sizes.largest else ()
        return tuple(
            SymbolicSpec(s.name, s.shape if s.shape is None else (*first, *s.shape[len(first) :]), s.dtype)
            for s in specs
        )

    @property
    def sizes(self) -> BatchSizes:
        """Return the batch sizes of the file's programs, or the reason why rows are not split and padded."""
        return self._ready().sizes

    def __call__(self, feeds: Arrays, outputs: Sequence[str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Run on arrays by name of the input, and return arrays on the host by name of the output.

        outputs: names of the outputs to return; None: all.
        Raises ExecutionError if a name, shape or type does not fit.
        """
        executable = self.executable
        require_by_name(feeds, "inputs")
        names = [spec.name for spec in executable.outputs] if outputs is None else list(outputs)
        arrays = {name: a if hasattr(a, "shape") else array_of(name, a) for name, a in feeds.items()}
        rows = self._rows(arrays)
        sizes = () if rows is None else self.sizes.of(self._rest(arrays))
        if rows is None or not sizes or rows in sizes:
            return dict(zip(names, map(_on_host, executable.run(names, arrays)), strict=True))
        parts = [self._part(arrays, names, run) for run in split_rows(max(rows, 1), sizes)]
        return {name: np.concatenate([part[name] for part in parts])[:rows] for name in names}

    def _part(self, arrays: Arrays, names: Sequence[str], run: tuple[int, int, int]) -> dict[str, np.ndarray[Any, Any]]:
        """Run some rows, padded to a batch size. Rows are copied to a new array in the order that the model takes."""
        start, count, size = run
        feeds: dict[str, Any] = {}
        for spec in self.executable.inputs:
            array = _on_host(arrays[spec.name])
            order = getattr(spec, "order", ())
            row = array[start : start + count] if len(array) else np.zeros((1, *array.shape[1:]), array.dtype)
            padded = row if len(row) == size else np.concatenate([row, np.repeat(row[-1:], size - len(row), axis=0)])
            feeds[spec.name] = in_order(padded, TensorType(padded.shape, DType.of(padded.dtype), order))
        results = self.executable.run(names, feeds)
        return {name: _on_host(result)[:count] for name, result in zip(names, results, strict=True)}

    def _rows(self, arrays: Arrays) -> int | None:
        """Return the number of rows; None if the inputs have none in common, so that the executable reports it."""
        specs = self.executable.inputs
        if set(arrays) != {spec.name for spec in specs} or any(len(array.shape) == 0 for array in arrays.values()):
            return None
        found = {int(array.shape[0]) for array in arrays.values()}
        if len(found) > 1 and self.sizes.largest:
            counts = ", ".join(f"{quote(name)} {int(array.shape[0])}" for name, array in arrays.items())
            raise ExecutionError(f"inputs have different numbers of rows: {counts}")
        return found.pop() if len(found) == 1 else None

    def _rest(self, arrays: Arrays) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(int(d) for d in arrays[spec.name].shape[1:]) for spec in self.executable.inputs)

    def _ready(self) -> _Loaded:
        if self._loaded is None:
            with self._lock:
                if self._loaded is None:
                    self._loaded = self._load()
        return self._loaded

    def _load(self) -> _Loaded:
        options = self._options
        simulate = choose(options.device)
        opened = load(self.path, target=options.target, tune=options.tune, simulate=simulate)
        executable = cast("Executable | DynamicExecutable", opened)  # `load` names only the more frequent one
        if isinstance(options.device, int) and executable.device == "simulated":
            raise FusecError(f"{self.path}: GPU {options.device} was asked for, but the file is not for that GPU")
        if isinstance(executable, Executable) and executable.state:
            raise FusecError(f"{self.path}: has state, which calls change: run it with fusec.load")
        sizes = find_batch_sizes(executable)
        if options.warm_up:
            _warm_up(executable)
        return _Loaded(executable, sizes)


def _restored(path: str, options: PredictorOptions) -> Predictor:
    """Make a predictor again in the process that unpickles it."""
    return Predictor(path, device=options.device, target=options.target, tune=options.tune, warm_up=options.warm_up)


def _warm_up(executable: Executable | DynamicExecutable) -> None:
    rng = np.random.default_rng(0)
    if isinstance(executable, Executable):
        programs = [executable]
    else:
        names = [spec.name for spec in executable.inputs]
        keys = sorted(executable.available or (), key=lambda key: [dim for shape in key for dim in shape])
        keys = keys[:1] if executable.device == "simulated" else keys
        programs = [executable.at(dict(zip(names, key, strict=True))) for key in keys]
    for program in programs:
        for _ in range(1 if executable.device == "simulated" else 2):
            program.run(
                None,
                {
                    spec.name: in_order(random_array(rng, type), type)
                    for spec in program.inputs
                    for type in [TensorType(spec.shape, DType.of(spec.dtype), spec.order)]
                },
            )


def _on_host(array: Any) -> np.ndarray[Any, Any]:
    return array if isinstance(array, np.ndarray) else array.get() if hasattr(array, "get") else np.asarray(array)
