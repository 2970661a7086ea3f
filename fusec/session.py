"""`InferenceSession`: fusec behind the calls of onnxruntime, for programs that were written for that.

`run`, `get_inputs`, `get_outputs`, `io_binding` and `OrtValue` do what onnxruntime's do; the rest of its interface is
not there.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fusec import driver
from fusec.dynamic import MAX_SHAPES, SymbolicSpec, compile_dynamic, loaded
from fusec.errors import ExecutionError, FusecError
from fusec.gpu import device
from fusec.interface import array_of, require_by_name
from fusec.ir import Array, DType, quote
from fusec.runtime import on_host

if TYPE_CHECKING:
    from onnx import ModelProto

GPU, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
# what stands for the GPU in the lists that programs pass to onnxruntime
_GPU_PROVIDERS = frozenset({GPU, "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider"})
# onnxruntime's names of element types
_TYPES: Mapping[DType, str] = {
    DType.F64: "double",
    DType.F32: "float",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F8E4M3: "float8e4m3fn",
    DType.F8E4M3FNUZ: "float8e4m3fnuz",
    DType.F8E5M2: "float8e5m2",
    DType.F8E5M2FNUZ: "float8e5m2fnuz",
    DType.F4E2M1: "float4e2m1",
    DType.I4: "int4",
    DType.U4: "uint4",
}


@dataclass(frozen=True)
class NodeArg:
    """An input or output: `type` as onnxruntime writes it, `tensor(float)`; a symbolic dim is its name, or None."""

    name: str
    shape: list[int | str | None]
    type: str


@dataclass(frozen=True)
class ModelMeta:
    """What the model says of itself."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]


class OrtValue:
    """An array on the host or the device, whose memory a binding reads or writes."""

    def __init__(self, array: Any):
        self._array = array

    @classmethod
    def ortvalue_from_numpy(cls, array: np.ndarray[Any, Any], device_type: str = "cpu", device_id: int = 0) -> OrtValue:
        """A copy of an array, where it is wanted: `cpu` or `cuda`."""
        _require_first(device_id)
        return cls(_xp(device_type).array(array))

    @classmethod
    def ortvalue_from_shape_and_type(
        cls, shape: Sequence[int], element_type: Any, device_type: str = "cpu", device_id: int = 0
    ) -> OrtValue:
        """Memory for an array; what it holds is arbitrary."""
        _require_first(device_id)
        return cls(_xp(device_type).empty(tuple(shape), np.dtype(element_type)))

    @classmethod
    def from_dlpack(cls, array: Any) -> OrtValue:
        """An array of anyone's, its memory shared: NumPy, or what speaks DLPack or `__cuda_array_interface__`."""
        return cls(array)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The array on the host."""
        return _to_host(self._array)

    def device_name(self) -> str:
        """`cpu` or `cuda`."""
        return "cpu" if on_host(self._array) else "cuda"

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def data_type(self) -> str:
        """As onnxruntime writes it."""
        return _type(DType.of(self._array.dtype))

    def data_ptr(self) -> int:
        """The address of the first element."""
        held = getattr(self._array, "__cuda_array_interface__", None) or self._array.__array_interface__
        return int(held["data"][0])

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    @property
    def array(self) -> Array:
        """The array itself."""
        return self._array


class IOBinding:
    """Inputs and outputs of a session, bound to memory once and used by `run_with_iobinding`."""

    def __init__(self, session: InferenceSession):
        self._session = session
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, Any] = {}  # an array to write into, or the device a new one shall be on
        self._results: dict[str, Array] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray[Any, Any]) -> None:
        """An input from an array on the host, which is read at each run."""
        self._inputs[_known(name, self._session.get_inputs(), "input")] = np.asarray(arr_on_cpu)

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """An input from memory at an address, on `cuda` or `cpu`, contiguous; it must outlive the binding."""
        _require_first(device_id)
        array = _at_address(device_type, element_type, shape, buffer_ptr)
        self._inputs[_known(name, self._session.get_inputs(), "input")] = array

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """An output into memory at an address, or into a new array on that device."""
        _require_first(device_id)
        _known(name, self._session.get_outputs(), "output")
        if buffer_ptr is None:
            _check_device(device_type)
            self._outputs[name] = device_type
        elif element_type is None or shape is None:
            raise FusecError(f"output {quote(name)}: an address needs element_type and shape")
        else:
            self._outputs[name] = _at_address(device_type, element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """An input from an OrtValue's memory."""
        self._inputs[_known(name, self._session.get_inputs(), "input")] = ortvalue.array

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """An output into an OrtValue's memory."""
        self._outputs[_known(name, self._session.get_outputs(), "output")] = ortvalue.array

    def bind_ortvalue(self, name: str, ortvalue: OrtValue) -> None:
        """An input or an output, whichever has the name."""
        if any(arg.name == name for arg in self._session.get_inputs()):
            self.bind_ortvalue_input(name, ortvalue)
        else:
            self.bind_ortvalue_output(name, ortvalue)

    def get_outputs(self) -> list[OrtValue]:
        """The results of the last run, in the order they were bound."""
        return [OrtValue(self._results[name]) for name in self._bound()]

    def copy_outputs_to_cpu(self) -> list[np.ndarray[Any, Any]]:
        """The same, on the host."""
        return [_to_host(self._results[name]) for name in self._bound()]

    def clear_binding_inputs(self) -> None:
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        self._outputs.clear()
        self._results.clear()

    def synchronize_inputs(self) -> None:
        """Nothing to wait for: a run waits for what its caller's stream holds."""

    def synchronize_outputs(self) -> None:
        """Wait until the results of the last run are there."""
        for array in self._results.values():
            if not on_host(array):
                array[:0].get() if array.ndim else array.get()

    def run(self) -> None:
        """What `run_with_iobinding` does."""
        if not self._outputs:
            raise ExecutionError("no output is bound")
        given = {name: array for name, array in self._outputs.items() if not isinstance(array, str)}
        names = list(self._outputs)
        results = self._session.executable.run(names, self._inputs, given)
        for name, array in zip(names, results, strict=True):
            wanted = self._outputs[name]
            moved = array
            if isinstance(wanted, str) and wanted == "cpu":
                moved = _to_host(array)
            elif isinstance(wanted, str) and on_host(array):
                moved = _xp(wanted).asarray(array)
            self._results[name] = moved

    def _bound(self) -> list[str]:
        if not self._results:
            raise ExecutionError("the binding has not been run")
        return list(self._outputs)


class InferenceSession:
    """A model, ready to run; a model without symbolic dims is compiled at once, another for the shapes it is given.

    providers: as in onnxruntime, first choice first; None: the GPU if there is one, else the simulator.
        `CUDAExecutionProvider` (or TensorRT's) is the GPU through fusec, `CPUExecutionProvider` the simulator.
    sess_options, provider_options: taken so that programs need no change; what they say concerns onnxruntime alone.
    target, precision, tune, budget, disable, deterministic, channels_last, max_shapes, buckets, tune_each: see
        `fusec.compile` and `fusec.compile_dynamic`. A `.fusec` file is compiled already: it takes target and tune
        alone.
    Raises ModelError for what cannot be read, or not be compiled.
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
            self._outputs = [
                NodeArg(spec.name, list(spec.shape), _type(DType.of(spec.dtype))) for spec in program.outputs
            ]

    def get_inputs(self) -> list[NodeArg]:
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        return list(self._outputs)

    def get_providers(self) -> list[str]:
        """What runs the model."""
        return [CPU] if self.executable.device == "simulated" else [GPU, CPU]

    def get_modelmeta(self) -> ModelMeta:
        return ModelMeta(**self._source.metadata)

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[Array]:
        """Outputs by name (None or nothing: all) from inputs by name. Inputs on the host give NumPy arrays; any on the
        device, which DLPack or `__cuda_array_interface__` shares, gives arrays on the device."""
        require_by_name(input_feed, "inputs")
        feeds = {name: value.array if isinstance(value, OrtValue) else value for name, value in input_feed.items()}
        feeds = {name: array_of(name, value) if isinstance(value, list) else value for name, value in feeds.items()}
        return self.executable.run(output_names or None, feeds)

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, OrtValue], run_options: Any = None
    ) -> list[OrtValue]:
        """The same from and to OrtValues."""
        return [OrtValue(array) for array in self.run(output_names, input_dict_ort_values)]

    def io_binding(self) -> IOBinding:
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: Any = None) -> None:
        """Run on what is bound."""
        iobinding.run()


def _simulate(providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None, target: str) -> bool:
    """Whether the providers ask for the simulator; a warning where they ask for a GPU that is not here."""
    if providers is None:
        return False
    names = [entry if isinstance(entry, str) else entry[0] for entry in providers]
    for name in names:
        if name not in _GPU_PROVIDERS and name != CPU:
            known = ", ".join([CPU, *sorted(_GPU_PROVIDERS)])
            raise FusecError(f"provider {name!r} is none that fusec stands for: {known}")
    if not names or names[0] == CPU:
        return bool(names)
    if not device.is_present(driver.resolve_target(target)):
        warnings.warn(f"{names[0]}: there is no such GPU here; the model runs in simulation", stacklevel=3)
    return False


def _node_arg(spec: SymbolicSpec) -> NodeArg:
    type = "tensor(undefined)" if spec.dtype is None else _type(DType.of(spec.dtype))
    return NodeArg(spec.name, [d if d != "" else None for d in spec.shape or ()], type)


def _type(dtype: DType) -> str:
    return f"tensor({_TYPES.get(dtype, dtype.numpy.name)})"


def _known(name: str, args: Sequence[NodeArg], kind: str) -> str:
    if all(arg.name != name for arg in args):
        raise ExecutionError(f"no {kind} {quote(name)}; {kind}s are {', '.join(quote(arg.name) for arg in args)}")
    return name


def _require_first(device_id: int) -> None:
    if device_id:
        raise FusecError(f"fusec runs on device 0, not on device {device_id}")


def _check_device(device_type: str) -> None:
    if device_type not in ("cpu", "cuda"):
        raise FusecError(f"a device is cpu or cuda, not {device_type!r}")


def _xp(device_type: str) -> Any:
    """The array module of a device."""
    _check_device(device_type)
    if device_type == "cpu":
        return np
    if device.device_name() is None:
        raise FusecError("there is no GPU here to hold an array on cuda")
    from fusec.gpu.arrays import cupy  # needs cupy, which only a GPU machine must have

    return cupy


def _at_address(device_type: str, element_type: Any, shape: Sequence[int], address: int) -> Array:
    """An array over memory that is another's."""
    dtype = np.dtype(element_type)
    if device_type == "cuda":
        return _xp("cuda").asarray(SimpleNamespace(__cuda_array_interface__=_interface(dtype, shape, address)))
    _check_device(device_type)
    return np.asarray(SimpleNamespace(__array_interface__=_interface(dtype, shape, address)))


def _interface(dtype: np.dtype[Any], shape: Sequence[int], address: int) -> dict[str, Any]:
    if dtype.str[1] == "V":  # bfloat16 and other types that are not NumPy's own
        raise FusecError(f"memory of {dtype} cannot be bound by its address: bind an OrtValue")
    return {"shape": tuple(shape), "typestr": dtype.str, "data": (address, False), "version": 3}


def _to_host(array: Any) -> np.ndarray[Any, Any]:
    if on_host(array):
        return np.asarray(array)
    return array.get() if hasattr(array, "get") else _xp("cuda").asarray(array).get()
