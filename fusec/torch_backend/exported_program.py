"""Run an ExportedProgram of torch with its own arguments: `fusec.from_torch(exported_program)`."""

from __future__ import annotations

from typing import Any

import torch  # pyright: ignore[reportMissingImports] - an extra, and absent where the code is checked
import torch.utils._pytree as pytree  # pyright: ignore[reportMissingImports] - an extra, and absent where the code is checked

from fusec.driver import compile_dynamic
from fusec.dynamic_shapes.executable import DynamicExecutable
from fusec.errors import ExecutionError, ModelError
from fusec.frontends import Source
from fusec.frontends.torch_export import source
from fusec.torch_backend.tensors import named, run


def from_torch(exported_program: Any, **options: Any) -> TorchExecutable:
    """Compile an exported program. The result takes and returns tensors like the exported model.

    options: options of `fusec.compile_dynamic`. Without `channels_last`, tensors use the memory formats of the export.
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

    def __repr__(self) -> str:
        return f"<fusec.TorchExecutable of {self.executable!r}>"

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
        for place in self._tensors:
            if not isinstance(flat[place], torch.Tensor):
                kind = type(flat[place]).__name__
                raise ExecutionError(f"argument {place} is a {kind}, not a tensor of torch; `executable` takes arrays")
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
    return named(model, given, made)


def _is_lent(arg: Any) -> bool:
    return type(arg).__name__ == "TensorArgument"
