"""Run torch models: `torch.compile(model, backend="fusec")` and `fusec.from_torch(exported_program)`.

Only inference is supported. torch itself runs a graph that fusec does not support, after one warning with the reason.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch  # pyright: ignore[reportMissingImports] - an extra, and absent where the code is checked
import torch.utils._pytree as pytree  # pyright: ignore[reportMissingImports] - as above

from fusec.driver import compile_dynamic
from fusec.dynamic_shapes.executable import DynamicExecutable
from fusec.errors import ExecutionError, FusecError, ModelError
from fusec.frontends import Source
from fusec.frontends.torch_export import CARRIERS, DTYPES, EXPORT_ERRORS, from_numpy, reason, source, to_numpy
from fusec.ir import channels_last

MAX_PROGRAMS = 64  # exports of one graph, for different fixed sizes or parameters


def from_torch(exported_program: Any, **options: Any) -> TorchExecutable:
    """Compile an exported program. The result takes and returns tensors like the exported model.

    options: those of `fusec.compile_dynamic`. Without `channels_last`, tensors use the memory formats of the export.
    Programs are compiled for the shapes they are called with. Later changes of the model's parameters have no effect.
    Raises ModelError for a training graph, or one that cannot be imported.
    """
    model = source(exported_program)
    if "channels_last" not in options:
        options["channels_last"] = _as_exported(exported_program, model)
    return TorchExecutable(exported_program, compile_dynamic(model, **options))


class TorchExecutable:
    """A compiled ExportedProgram; `executable` runs it."""

    def __init__(self, program: Any, executable: DynamicExecutable):
        self.executable = executable
        self._in_spec, self._out_spec = program.call_spec.in_spec, program.call_spec.out_spec
        signature = program.graph_signature
        self._tensors: list[int] = []
        self._fixed: dict[int, Any] = {}
        inputs = [spec.arg for spec in signature.input_specs if spec.kind.name == "USER_INPUT"]
        for place, arg in enumerate(inputs):
            if type(arg).__name__ == "TensorArgument":
                self._tensors.append(place)
            else:
                self._fixed[place] = _value(arg, "input")
        self._outputs: list[tuple[bool, Any]] = []  # (True, number of the computed tensor) or (False, fixed value)
        count = 0
        for spec in signature.output_specs:
            computed = type(spec.arg).__name__ == "TensorArgument"
            self._outputs.append((computed, count if computed else _value(spec.arg, "output")))
            count += computed
        if [len(self._tensors), count] != [len(executable.inputs), len(executable.outputs)]:
            raise ModelError(
                f"the model takes {len(self._tensors)} tensors and gives {count}; "
                f"as ONNX it has {len(executable.inputs)} inputs and {len(executable.outputs)} outputs"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on tensors in the structure of the model's arguments. Raises ExecutionError if they do not fit."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._in_spec:
            raise ExecutionError(f"the arguments have the structure {spec}, the model was exported for {self._in_spec}")
        for place, value in self._fixed.items():
            if flat[place] != value:
                raise ExecutionError(
                    f"argument {place} is {flat[place]!r}; the model was exported for {value!r}, which is part of it"
                )
        results = run(self.executable, [flat[place] for place in self._tensors])
        given = [results[at] if computed else at for computed, at in self._outputs]
        return pytree.tree_unflatten(given, self._out_spec)


def _value(arg: Any, kind: str) -> Any:
    """Return the value of a constant argument, which is part of the model."""
    if type(arg).__name__ != "ConstantArgument":
        raise ModelError(f"{kind} {arg.name!r} is a number that is not always the same ({type(arg).__name__})")
    return arg.value


def _as_exported(program: Any, model: Source) -> list[str]:
    """Return the inputs and outputs that were channels last when a program was exported."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    given = [values.get(s.arg.name) for s in signature.input_specs if s.kind.name == "USER_INPUT" and _is_lent(s.arg)]
    made = [values.get(spec.arg.name) for spec in signature.output_specs if _is_lent(spec.arg)]
    return _named(model, given, made)


def _is_lent(arg: Any) -> bool:
    return type(arg).__name__ == "TensorArgument"


def _named(model: Source, given: Sequence[Any], made: Sequence[Any]) -> list[str]:
    """Return the names of the inputs and outputs that are channels last, from their tensors in order."""
    inputs, outputs = model.interface
    pairs = (*zip(inputs, given, strict=False), *zip(outputs, made, strict=False))
    return [declared.name for declared, tensor in pairs if _is_channels_last(tensor)]


def _is_channels_last(tensor: Any) -> bool:
    """Tell if a tensor, or the example of one, is packed channels last and not row-major as well."""
    if not _is_tensor(tensor) or tensor.ndim not in (4, 5) or tensor.layout is not torch.strided:
        return False
    shape, strides = ([_hint(size) for size in sizes] for sizes in (tensor.shape, tensor.stride()))
    wide = [dim for dim in channels_last(tensor.ndim) if shape[dim] != 1]
    step = 1
    for dim in reversed(wide):
        if strides[dim] != step:
            return False
        step *= shape[dim]
    return wide != sorted(wide)


def _hint(size: Any) -> int:
    """Return a size; of a symbolic one the example value, because any other query would make the size fixed."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.has_hint() else -1


def run(executable: DynamicExecutable, tensors: Sequence[Any]) -> list[Any]:
    """Return the outputs for tensors in the order of the inputs.

    Memory on the device is shared, and work is queued on the caller's stream.
    """
    on_gpu = next((t.device for t in tensors if t.is_cuda), None)
    with _stream(on_gpu):
        feeds = {spec.name: _lent(t, executable) for spec, t in zip(executable.inputs, tensors, strict=True)}
        results = executable.run(None, feeds)
        declared = (spec.dtype for spec in executable.outputs)
        return [_tensor(a, a.dtype if t is None else t) for a, t in zip(results, declared, strict=True)]


def _lent(tensor: Any, executable: DynamicExecutable) -> Any:
    """Return an array that shares the memory of a tensor."""
    if not tensor.is_cuda:
        return to_numpy(tensor)
    if tensor.device.index != 0:
        raise ExecutionError(f"a tensor is on {tensor.device}, fusec runs on cuda:0")
    if executable.device == "simulated":
        raise ExecutionError("the model runs in simulation here: its inputs must be on the CPU")
    from fusec.gpu.launch.cupy_arrays import borrowed  # needs cupy, which only a GPU machine must have

    held, carrier = tensor.detach(), CARRIERS.get(tensor.dtype)
    return borrowed(held if carrier is None else held.view(carrier), DTYPES[tensor.dtype].numpy)


def _tensor(array: Any, element_type: Any) -> Any:
    """Return a tensor that shares the memory of a result. element_type: NumPy's; the GPU has bytes for narrow types."""
    if not hasattr(array, "__cuda_array_interface__"):
        return from_numpy(array)
    dtype = next(t for t, known in DTYPES.items() if known.numpy == element_type)
    carrier = CARRIERS.get(dtype)
    if carrier is None:
        return torch.from_dlpack(array)
    return torch.from_dlpack(array.view(str(carrier).removeprefix("torch."))).view(dtype)


def _stream(device: Any) -> AbstractContextManager[Any]:
    """Make torch's current stream the stream of CuPy."""
    if device is None:
        return nullcontext()
    from fusec.gpu.launch.cupy_arrays import on_stream  # as above

    return on_stream(torch.cuda.current_stream(device).cuda_stream)


# torch.compile ---------------------------------------------------------------------------------------------------


MODES = {"default": "quick", "reduce-overhead": "quick", "max-autotune": "full", "max-autotune-no-cudagraphs": "full"}


def backend(
    gm: Any, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph for torch.compile; `options` are those of `fusec.compile_dynamic`, `mode` says how to tune.

    A graph is exported and compiled at its first call, and once for all sizes that dynamo keeps symbolic. Without the
    option `channels_last`, inputs keep their memory format, and outputs have the one of eager torch.
    torch runs a graph, with a warning, if gradients are needed or fusec does not support the graph.
    """
    if mode is not None and mode not in MODES:
        raise FusecError(f"the backend has no mode {mode!r}; modes are {', '.join(MODES)}")
    given = {**({} if mode is None else {"tune": MODES[mode]}), **(options or {})}
    known = [name for name in inspect.signature(compile_dynamic).parameters if name != "model"]
    if unknown := [name for name in given if name not in known]:
        raise FusecError(f"the backend has no option {unknown[0]!r}; options are {', '.join(known)}")
    return _Graph(gm, example_inputs, given)


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


class _Graph:
    """A graph of dynamo as a function of its inputs, compiled at its first call."""

    def __init__(self, gm: Any, example_inputs: Sequence[Any], options: dict[str, Any]):
        self.gm = gm
        self.options = options
        self.refused = ""
        self._warned: set[str] = set()
        self._compiled: list[_Compiled] = []
        places = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self._examples = [n.meta.get("example_value", x) for n, x in zip(places, example_inputs, strict=True)]
        self._parameters = [i for i, (n, x) in enumerate(zip(places, self._examples, strict=True)) if _is_static(n, x)]
        self._floats = [i for i, (n, x) in enumerate(zip(places, self._examples, strict=True)) if _is_float(n, x)]
        fixed = {*self._parameters, *self._floats}
        self._tensors = [i for i, x in enumerate(self._examples) if _is_tensor(x) and i not in fixed]
        self._sizes = _sizes(self._examples, self._tensors)
        known = {*self._parameters, *self._tensors, *self._sizes}
        self._numbers = [i for i in range(len(places)) if i not in known]
        self._results: list[tuple[str, Any]] = []
        self._computed: list[Any] = []  # examples of the computed results, with their device and strides
        try:
            self._results, self._inner, self._computed = _results_of(gm, places)
        except ModelError as error:
            self.refused = str(error)

    def __call__(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(_is_tensor(a) and a.requires_grad for a in args):
            return self._in_torch(args, "gradients are wanted: call it under torch.no_grad() or torch.inference_mode()")
        tensors = [args[i] for i in self._tensors]
        compiled = self._found(args, tensors)
        if compiled is None:
            return self._in_torch(args, self.refused)
        made = run(compiled.executable, tensors)
        return tuple(args[at] if kind == "input" else made[at] if kind == "made" else at for kind, at in self._results)

    def _in_torch(self, args: Sequence[Any], why: str) -> Any:
        line = why.splitlines()[0]
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
        key = (versions, numbers, tuple(map(_is_channels_last, tensors)))
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
        _require_one_device([t.device for t in tensors], [t.device for t in self._computed])
        module = _Bound(self._inner, args, self._parameters, self._tensors, self._sizes)
        dims = tuple(_dynamic(self._examples[i], t) for i, t in zip(self._tensors, tensors, strict=True))
        program = None
        if any(dims):
            with contextlib.suppress(ModelError):  # a dim that cannot be symbolic is exported with its size below
                program = _exported(module, tensors, dims)
        model = source(program or _exported(module, tensors, None))
        options: dict[str, Any] = {"channels_last": _named(model, tensors, self._computed), **self.options}
        executable = compile_dynamic(model, **options)
        if len(executable.inputs) != len(tensors):
            raise ModelError(f"it takes {len(tensors)} tensors, as ONNX {len(executable.inputs)}")
        if any(t.is_cuda for t in tensors) and executable.device == "simulated":
            raise ModelError("its inputs are on a GPU, and fusec runs in simulation: the target is another GPU")
        return executable


class _Bound(torch.nn.Module):  # pyright: ignore[reportUntypedBaseClass] - torch is absent where the code is checked
    """A graph as a module that takes only tensors. It has parameters and numbers, and takes sizes from the tensors."""

    def __init__(
        self,
        inner: Any,
        args: Sequence[Any],
        parameters: Sequence[int],
        tensors: Sequence[int],
        sizes: Mapping[int, tuple[int, int]],
    ):
        super().__init__()
        self.inner = inner
        self.places, self.sizes = tuple(tensors), dict(sizes)
        known = {*parameters, *tensors}
        self.fixed = [None if i in known else _Item(a.item()) if _is_tensor(a) else a for i, a in enumerate(args)]
        self.held = {i: f"p{i}" for i in parameters}
        for i, name in self.held.items():
            if isinstance(args[i], torch.nn.Parameter):
                self.register_parameter(name, args[i])
            else:
                self.register_buffer(name, args[i])

    def forward(self, *inputs: Any) -> Any:
        full: list[Any] = list(self.fixed)
        for i, name in self.held.items():
            full[i] = getattr(self, name)
        for i, tensor in zip(self.places, inputs, strict=True):
            full[i] = tensor
        for i, (tensor, dim) in self.sizes.items():
            full[i] = full[tensor].shape[dim]
        return self.inner(*full)


def _exported(module: Any, tensors: Sequence[Any], dims: Sequence[Any] | None) -> Any:
    """Export a module. Raises ModelError if torch cannot."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # because torch warns about its own deprecations
            return torch.export.export(module, tuple(tensors), dynamic_shapes=None if dims is None else (tuple(dims),))
    except EXPORT_ERRORS as error:
        raise ModelError(f"torch cannot export it: {reason(error)}") from error


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _is_static(node: Any, example: Any) -> bool:
    """Tell if dynamo marks an input as a module's parameter or buffer."""
    marked = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type") is not None
    return _is_tensor(example) and (marked or isinstance(example, torch.nn.Parameter))


def _is_float(node: Any, example: Any) -> bool:
    """Tell if an input is a number that dynamo passes as a tensor, of which the graph only takes the item."""
    alone = _is_tensor(example) and example.ndim == 0 and example.device.type == "cpu"
    return alone and bool(node.users) and all(n.op == "call_method" and n.target == "item" for n in node.users)


@dataclass(frozen=True)
class _Item:
    """A number with the method `item`, for a graph that takes the item of a tensor."""

    value: float

    def item(self) -> float:
        return self.value


def _sizes(examples: Sequence[Any], tensors: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return, for each input that is a symbolic number, the tensor and dim whose size it is."""
    found: dict[int, tuple[int, int]] = {}
    for place, number in enumerate(examples):
        if isinstance(number, torch.SymInt):
            for tensor in tensors:
                for dim, size in enumerate(examples[tensor].shape):
                    if isinstance(size, torch.SymInt) and size.node.expr == number.node.expr:
                        found.setdefault(place, (tensor, dim))
    return found


def _dynamic(example: Any, tensor: Any) -> dict[int, Any]:
    """Return the dims of a tensor that dynamo keeps symbolic."""
    return {
        dim: torch.export.Dim.AUTO
        for dim, size in enumerate(example.shape)
        if isinstance(size, torch.SymInt) and tensor.shape[dim] > 1
    }


def _require_one_device(inputs: Sequence[Any], results: Sequence[Any]) -> None:
    """Raise ModelError unless all tensors are on the CPU, or all on the GPU of fusec, as results are with inputs."""
    found = sorted({str(device) for device in (*inputs, *results)})
    if not inputs:
        raise ModelError("it takes no tensor")
    if found not in (["cpu"], ["cuda:0"]):
        raise ModelError(f"its tensors are on {', '.join(found)}: all must be on the CPU, or all on cuda:0")


def _results_of(gm: Any, places: Sequence[Any]) -> tuple[list[tuple[str, Any]], Any, list[Any]]:
    """Return the kind of each result (`input`, `made` or `fixed`), a graph of the made ones, and their examples."""
    copy = torch.fx.Graph()
    twins: dict[Any, Any] = {}
    copy.graph_copy(gm.graph, twins)
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    made: dict[Any, int] = {}
    results: list[tuple[str, Any]] = []
    for result in output.args[0]:
        if not isinstance(result, torch.fx.Node):
            results.append(("fixed", result))
        elif result.op == "placeholder":
            results.append(("input", places.index(result)))
        elif not _is_tensor(result.meta.get("example_value")):
            raise ModelError(f"it returns {result.name}, which is no tensor")
        else:
            results.append(("made", made.setdefault(result, len(made))))
    if not made:
        raise ModelError("it computes no tensor")
    copy.output(tuple(twins[node] for node in made))
    return results, torch.fx.GraphModule(gm, copy), [node.meta["example_value"] for node in made]
