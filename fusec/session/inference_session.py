"""Offer onnxruntime's `InferenceSession` on top of fusec, so that programs written for it need no change.

`run`, `get_inputs`, `get_outputs`, `io_binding` and `OrtValue` do what onnxruntime's do. The rest of its interface is
missing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from fusec import driver
from fusec.dynamic_shapes.executable import MAX_SHAPES, SymbolicSpec, compile_dynamic, loaded
from fusec.errors import FusecError
from fusec.execution.signature import array_of, require_by_name
from fusec.gpu import device
from fusec.ir import Array, DType
from fusec.runtime import Executable
from fusec.session.io_binding import IOBinding
from fusec.session.ort_value import OrtValue, type_name

if TYPE_CHECKING:
    from onnx import ModelProto

GPU, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
# providers of onnxruntime that mean the GPU
_GPU_PROVIDERS = frozenset({GPU, "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider"})


@dataclass(frozen=True)
class NodeArg:
    """An input or output of a session.

    shape: a symbolic dim is its name, or None if it has no name.
    type: as onnxruntime writes it, such as `tensor(float)`.
    """

    name: str
    shape: list[int | str | None]
    type: str


@dataclass(frozen=True)
class ModelMeta:
    """Metadata of the model file."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]


class InferenceSession:
    """A model, ready to run. It is compiled now if no dim is symbolic, else at the first run with each input shape.

    providers: as in onnxruntime, first choice first; None: the GPU if there is one, else the simulator.
        `CUDAExecutionProvider` (or TensorRT's) is the GPU through fusec, `CPUExecutionProvider` the simulator.
    sess_options, provider_options: accepted and ignored, because they configure onnxruntime only.
    target, precision, tune, budget, disable, deterministic, channels_last, max_shapes, buckets, tune_each: see
        `fusec.compile` and `fusec.compile_dynamic`. A `.fusec` file is compiled already: it takes only target and tune.

    Raises ModelError: when the model cannot be read or compiled.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes | ModelProto,
        sess_options: Any = None,
        providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None = None,
        provider_options: Any = None,
        *,
        target: str = "auto",
        precision: str = "fp32",
        tune: str = "quick",
        budget: float = float("inf"),
        disable: Collection[str] = (),
        deterministic: bool = False,
        channels_last: bool | Collection[str] = False,
        max_shapes: int = MAX_SHAPES,
        buckets: Mapping[str, Sequence[int]] | None = None,
        tune_each: bool = False,
    ):
        simulate = _simulate(providers, target)
        if isinstance(path_or_bytes, str | os.PathLike) and os.fspath(path_or_bytes).endswith(".fusec"):
            self.executable = loaded(path_or_bytes, target, tune)
        else:
            self.executable = compile_dynamic(
                path_or_bytes,
                target=target,
                precision=precision,
                tune=tune,
                budget=budget,
                disable=disable,
                deterministic=deterministic,
                channels_last=channels_last,
                max_shapes=max_shapes,
                buckets=buckets,
                tune_each=tune_each,
                simulate=simulate,
            )
        self._source = self.executable.source
        fixed: dict[str, tuple[int, ...]] = {}
        for spec in self.executable.inputs:
            if spec.shape is not None and all(isinstance(d, int) for d in spec.shape):
                fixed[spec.name] = cast("tuple[int, ...]", spec.shape)
        self._inputs = [_node_arg(spec) for spec in self.executable.inputs]
        self._outputs = [_node_arg(spec) for spec in self.executable.outputs]
        if len(fixed) == len(self.executable.inputs):
            program = self.executable.at(fixed)
            if isinstance(program, Executable):  # with host steps, shapes of outputs are known after a call
                self._outputs = [
                    NodeArg(spec.name, list(spec.shape), type_name(DType.of(spec.dtype))) for spec in program.outputs
                ]

    def get_inputs(self) -> list[NodeArg]:
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        return list(self._outputs)

    def get_providers(self) -> list[str]:
        """Return the providers that run the model."""
        return [CPU] if self.executable.device == "simulated" else [GPU, CPU]

    def get_modelmeta(self) -> ModelMeta:
        return ModelMeta(**self._source.metadata)

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[Array]:
        """Run the model on inputs by name, and return outputs by name (None or no names: all).

        If all inputs are on the host, results are NumPy arrays. If one is on the device, shared by DLPack or
        `__cuda_array_interface__`, results are arrays on the device.
        """
        require_by_name(input_feed, "inputs")
        feeds = {name: value.array if isinstance(value, OrtValue) else value for name, value in input_feed.items()}
        feeds = {name: array_of(name, value) if isinstance(value, list) else value for name, value in feeds.items()}
        return self.executable.run(output_names or None, feeds)

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, OrtValue], run_options: Any = None
    ) -> list[OrtValue]:
        """Run as `run`, with OrtValues as inputs and outputs."""
        return [OrtValue(array) for array in self.run(output_names, input_dict_ort_values)]

    def io_binding(self) -> IOBinding:
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: Any = None) -> None:
        """Run on the bound inputs and outputs."""
        iobinding.run()


def _simulate(providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None, target: str) -> bool:
    """Tell if the first provider is the simulator. Warn if it is a GPU that this machine does not have."""
    if providers is None:
        return False
    names = [entry if isinstance(entry, str) else entry[0] for entry in providers]
    for name in names:
        if name not in _GPU_PROVIDERS and name != CPU:
            known = ", ".join([CPU, *sorted(_GPU_PROVIDERS)])
            raise FusecError(f"fusec has no provider {name!r}; its providers are {known}")
    if not names or names[0] == CPU:
        return bool(names)
    if not device.is_present(driver.resolve_target(target)):
        warnings.warn(f"{names[0]}: this machine has no such GPU; the model runs in simulation", stacklevel=3)
    return False


def _node_arg(spec: SymbolicSpec) -> NodeArg:
    type = "tensor(undefined)" if spec.dtype is None else type_name(DType.of(spec.dtype))
    return NodeArg(spec.name, [d if d != "" else None for d in spec.shape or ()], type)
