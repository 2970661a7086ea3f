"""Run a graph that dynamo captured; it is exported and compiled at its first call."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports] - an extra, and absent where the code is checked

from fusec.driver import compile_dynamic
from fusec.dynamic_shapes.executable import DynamicExecutable
from fusec.errors import FusecError, ModelError
from fusec.frontends import Source
from fusec.frontends.torch_export import source
from fusec.runtime import Executable
from fusec.system.dataclass import dataclass
from fusec.torch_backend.bound_module import Bound, exported, outside_dispatch
from fusec.torch_backend.graph_breaks import GraphBreak
from fusec.torch_backend.graph_inputs import dynamic, is_float, is_static, require_one_device, results_of, sizes
from fusec.torch_backend.tensors import is_channels_last, is_tensor, named, run

MAX_PROGRAMS = 64  # exports of one graph, for different fixed sizes or parameters


@dataclass(frozen=True)
class _Compiled:
    """One export of a graph. key: the parameters, numbers and memory formats for which it was made."""

    key: tuple[Any, ...]
    parameters: list[Any]  # referenced, because the key has their `id`, which another object could get
    executable: DynamicExecutable

    def is_outdated(self, versions: tuple[tuple[int, int], ...]) -> bool:
        """Tell if it was made with other contents of the same parameters."""
        own: tuple[tuple[int, int], ...] = self.key[0]
        return own != versions and [place for place, _ in own] == [place for place, _ in versions]

    def fits(self, key: tuple[Any, ...], tensors: Sequence[Any]) -> bool:
        """Tell if it can run on these tensors."""
        shapes = {spec.name: t.shape for spec, t in zip(self.executable.inputs, tensors, strict=True)}
        return self.key == key and self.executable.fits(shapes)


class CapturedGraph:
    """A graph of dynamo as a function of its inputs, compiled at its first call."""

    def __init__(self, gm: Any, example_inputs: Sequence[Any], options: dict[str, Any]):
        self.gm = gm
        self.options = options
        self.role = "inference"
        self.broken: GraphBreak | None = None  # the graph break that ended it
        self.refused = ""
        self.in_torch = ""  # the reason why torch ran it
        self._warned: set[str] = set()
        self._compiled: list[_Compiled] = []
        places = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self._examples = [n.meta.get("example_value", x) for n, x in zip(places, example_inputs, strict=True)]
        self._parameters = [i for i, (n, x) in enumerate(zip(places, self._examples, strict=True)) if is_static(n, x)]
        self._floats = [i for i, (n, x) in enumerate(zip(places, self._examples, strict=True)) if is_float(n, x)]
        fixed = {*self._parameters, *self._floats}
        self._tensors = [i for i, x in enumerate(self._examples) if is_tensor(x) and i not in fixed]
        self._sizes = sizes(self._examples, self._tensors)
        known = {*self._parameters, *self._tensors, *self._sizes}
        self._numbers = [i for i in range(len(places)) if i not in known]
        self._results: list[tuple[str, Any]] = []
        self._computed: list[Any] = []  # examples of the computed results, with their device and strides
        try:
            self._results, self._inner, self._computed = results_of(gm, places)
        except ModelError as error:
            self.refused = str(error)

    def __call__(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(is_tensor(a) and a.requires_grad for a in args):
            return self._by_torch(args, "gradients are wanted of a graph that was captured without them")
        tensors = [args[i] for i in self._tensors]
        compiled = self._found(args, tensors)
        if compiled is None:
            return self._by_torch(args, self.refused)
        made = run(compiled.executable, tensors)
        return tuple(self._result(kind, at, args, made) for kind, at in self._results)

    @staticmethod
    def _result(kind: str, at: Any, args: Sequence[Any], made: Sequence[Any]) -> Any:
        """Return one result. at: its number, how its size is computed, or its value; see `results_of`."""
        if kind == "size":
            return at.value(args)
        return args[at] if kind == "input" else made[at] if kind == "made" else at

    @property
    def ops(self) -> int:
        """Count the ops of torch in the graph."""
        return sum(node.op.startswith("call_") for node in self.gm.graph.nodes)

    @property
    def summary(self) -> str:
        """Return in one line what runs the graph."""
        if self.in_torch:
            return f"in torch itself: {self.in_torch}"
        programs = [each.executable.at(shapes) for each in self._compiled for shapes in each.executable.shapes]
        if not programs:
            return "was not called"
        last = programs[-1]
        size = last.compiled.program.counts if isinstance(last, Executable) else "several programs with host steps"
        return f"compiled by fusec, {size}"

    def _by_torch(self, args: Sequence[Any], why: str) -> Any:
        self.in_torch = line = why.splitlines()[0]
        if line not in self._warned:
            self._warned.add(line)
            warnings.warn(f"fusec: a graph runs in torch itself: {line}", stacklevel=3)
        return self.gm(*args)

    def _found(self, args: Sequence[Any], tensors: Sequence[Any]) -> _Compiled | None:
        """Return the program for these arguments, compiled if there is none; None if fusec does not support it."""
        parameters = [args[i] for i in self._parameters]
        # a parameter that was changed in place, or belongs to another module, needs another program
        versions = tuple((id(p), 0 if p.is_inference() else p._version) for p in parameters)
        numbers = tuple(float(args[i]) if i in self._floats else args[i] for i in self._numbers)
        key = (versions, numbers, tuple(map(is_channels_last, tensors)))
        found = next((each for each in self._compiled if each.fits(key, tensors)), None)
        if found is not None or self.refused:
            return found
        self._compiled = [each for each in self._compiled if not each.is_outdated(versions)]
        try:
            if len(self._compiled) >= MAX_PROGRAMS:
                raise ModelError(f"it was compiled for {MAX_PROGRAMS} sets of parameters and sizes already")
            made = _Compiled(key, parameters, self._made(args, tensors))
            made.executable.at({s.name: tuple(t.shape) for s, t in zip(made.executable.inputs, tensors, strict=True)})
        except FusecError as error:
            self.refused = str(error)
            return None
        self._compiled.append(made)
        return made

    def _made(self, args: Sequence[Any], tensors: Sequence[Any]) -> DynamicExecutable:
        """Export and compile the graph for these tensors, with the symbolic dims of dynamo."""
        require_one_device([t.device for t in tensors], [t.device for t in self._computed])
        model = outside_dispatch(lambda: self._source(args, tensors))
        options: dict[str, Any] = {"channels_last": named(model, tensors, self._computed), **self.options}
        executable = compile_dynamic(model, **options)
        if len(executable.inputs) != len(tensors):
            raise ModelError(f"it takes {len(tensors)} tensors, as ONNX {len(executable.inputs)}")
        if any(t.is_cuda for t in tensors) and executable.device == "simulated":
            raise ModelError("its inputs are on a GPU, and fusec runs in simulation: the target is another GPU")
        return executable

    def _source(self, args: Sequence[Any], tensors: Sequence[Any]) -> Source:
        module = Bound(self._inner, args, self._parameters, self._tensors, self._sizes)
        dims = tuple(dynamic(self._examples[i], t) for i, t in zip(self._tensors, tensors, strict=True))
        program = None
        if any(dims):
            with contextlib.suppress(ModelError):  # a dim that cannot be symbolic is exported with its size below
                program = exported(module, tensors, dims)
        return source(program or exported(module, tensors, None))
