"""Run ONNX models by the interface of `onnx.backend.base.Backend`.

Device `CPU` runs the compiled program in simulation, and `CUDA` on the GPU. A model is compiled for the shapes of the
inputs of a call. If a shape or a branch depends on the *value* of an input, that input becomes a constant.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper
from onnx.backend.base import Backend, BackendRep

from fusec import driver
from fusec.dynamic_shapes.executable import DynamicExecutable
from fusec.errors import ExecutionError
from fusec.frontends.onnx.importer import Bound, InputsNeededError
from fusec.frontends.onnx.load import load_bound
from fusec.gpu import device as gpu
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.ir import Graph, HostArray
from fusec.system.printable import printable

_GPUS = ("CUDA", "CUDA:0")


class FusecBackendRep(BackendRep):
    """A model that is compiled when it is run. graph, executable: the graph and executable of the last call."""

    def __init__(
        self, model: ModelProto, compile: Callable[..., driver.AnyExecutable | DynamicExecutable] = driver.compile
    ):
        self.model = model
        self.graph: Graph | None = None
        self.executable: driver.AnyExecutable | None = None
        self._compile = compile
        self._bound: dict[str, Bound] = {}  # values of the inputs that are constants of the executable
        self._lengths: dict[str, int] = {}  # lengths of the outputs that are sequences
        held = {t.name for t in model.graph.initializer} | {t.values.name for t in model.graph.sparse_initializer}
        self.inputs = [v.name for v in model.graph.input if v.name not in held]
        types = (v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output))
        self._has_strings = TensorProto.STRING in types

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the model. Inputs are in its order or by name; outputs are in its order, arrays or lists of arrays."""
        given = self.named(inputs)
        executable = self._executable(given)
        results = executable.run(
            None, {spec.name: given[spec.name] for spec in executable.inputs if spec.name in given}
        )
        names = [spec.name for spec in executable.outputs]
        return self.outputs(dict(zip(names, results, strict=True)), self._lengths)

    def outputs(self, results: Mapping[str, HostArray], lengths: Mapping[str, int]) -> tuple[Any, ...]:
        """Return the model's outputs from those of its graph, which has an output for each tensor of a sequence."""
        return tuple(
            [results[f"{v.name}[{i}]"] for i in range(lengths[v.name])] if v.name in lengths else results[v.name]
            for v in self.model.graph.output
        )

    def _executable(self, given: Mapping[str, Bound]) -> driver.AnyExecutable:
        """Return the last executable if it was compiled for these shapes and constants, else a new one."""
        if self.executable is not None and self._fits(self.executable, given):
            return self.executable
        if self._has_strings:  # host steps read them, so that they need not be constants
            made = self._compile(
                self.model,
                shapes={name: np.shape(cast("Any", value)) for name, value in given.items() if value is not None},
            )
        else:
            self.graph, self._lengths = self.compiled(given)
            made = self._compile(self.graph)
        assert not isinstance(made, DynamicExecutable), "a graph has no dims with ranges"
        self.executable = made
        free = {spec.name for spec in self.executable.inputs}
        # copies, because a caller may write into the arrays later
        self._bound = {name: copy.deepcopy(value) for name, value in given.items() if name not in free}
        return self.executable

    def _fits(self, executable: driver.AnyExecutable, given: Mapping[str, Bound]) -> bool:
        free = ((given[spec.name], spec.shape) for spec in executable.inputs if spec.name in given)
        shapes = all(isinstance(value, np.ndarray) and value.shape == shape for value, shape in free)
        return shapes and all(_same(given[name], value) for name, value in self._bound.items())

    def compiled(self, given: Mapping[str, Bound]) -> tuple[Graph, dict[str, int]]:
        """Return the graph for these inputs, and the lengths of the outputs that are sequences."""
        bound = {name: value for name, value in given.items() if not isinstance(value, np.ndarray)}
        while True:
            shapes = {n: cast("HostArray", v).shape for n, v in given.items() if n not in bound}
            try:
                return load_bound(self.model, shapes, bound, "<model>")
            except InputsNeededError as error:
                more = {name: given[name] for name in error.inputs if name not in bound}
                if not more:
                    raise
                bound |= more

    def named(self, inputs: Any) -> dict[str, Any]:
        """Return the inputs by name, as arrays or lists of arrays."""
        if isinstance(inputs, Mapping):
            given = dict(cast("Mapping[str, Any]", inputs))
        else:
            listed: Sequence[Any] = inputs if isinstance(inputs, list | tuple) else [inputs]
            names = self.inputs
            if len(listed) == len(self.model.graph.input):
                names = [v.name for v in self.model.graph.input]
            if len(listed) != len(names):
                raise ExecutionError(
                    f"{len(listed)} inputs given, the model takes {len(names)}: {printable(', '.join(names))}"
                )
            given = dict(zip(names, listed, strict=True))
        if missing := [name for name in self.inputs if name not in given]:
            raise ExecutionError(f"no array for input {missing[0]!r}")
        known = {n: v for n, v in given.items() if n in self.inputs}
        return {n: v if v is None or isinstance(v, list) else np.asarray(v) for n, v in known.items()}


def _same(a: Bound, b: Bound) -> bool:
    """Tell if two values of an input, arrays or lists of arrays, have the same bits."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return np.array_equal(a, b) if a.dtype == object else a.tobytes() == b.tobytes()
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b


class FusecBackend(Backend):
    """`prepare(model).run(inputs)`, `run_model` and `run_node`, as onnx's own test suite calls them."""

    @classmethod
    def prepare(
        cls,
        model: ModelProto,
        device: str = "CPU",
        *,
        target: str = "auto",
        precision: str = "fp32",
        tune: str = "none",
        oracle: Oracle | None = None,
        **kwargs: Any,
    ) -> FusecBackendRep:
        """Return a model that is compiled at its first run, because the shapes of inputs are known then.

        device: `CPU` runs in simulation, also on a machine with a GPU; `CUDA` runs on the GPU.
        target, precision, tune, oracle: as for `fusec.compile`.
        kwargs: ignored; the runner of onnx gives tolerances to every backend.
        """
        simulate = _simulates(device)
        if not simulate and not gpu.is_present(driver.resolve_target(target)):
            raise ExecutionError(f"target {target!r} is not this machine's GPU; device 'CPU' runs it in simulation")
        options = {"target": target, "precision": precision, "tune": tune}
        return FusecBackendRep(model, partial(driver.compile, simulate=simulate, oracle=oracle, **options))

    @classmethod
    def run_model(cls, model: ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[Any, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one node as a model, in the newest opset or in `opset_version`."""
        arrays = [np.asarray(a) for a in inputs]
        names = [n for n in dict.fromkeys(node.input) if n]
        infos = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in zip(names, arrays, strict=True)
        ]
        outputs = [helper.make_empty_tensor_value_info(n) for n in node.output if n]
        graph = helper.make_graph([node], node.name or node.op_type, infos, outputs)
        opset = kwargs.get("opset_version")
        imports = [helper.make_opsetid(node.domain, opset)] if opset else None
        return cls.run_model(helper.make_model(graph, opset_imports=imports), arrays, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Tell if a device exists: `CPU` is the simulator, `CUDA` the first GPU of this machine."""
        return _is_cpu(device) or (device.upper() in _GPUS and gpu.device_name() is not None)


def _is_cpu(device: str) -> bool:
    return device.split(":")[0].upper() == "CPU"


def _simulates(device: str) -> bool:
    """Tell if a device is the simulator. Raises ExecutionError for a device that this machine does not have."""
    if FusecBackend.supports_device(device):
        return _is_cpu(device)
    if device.upper() in _GPUS:
        raise ExecutionError(f"device {device!r}: this machine has no NVIDIA GPU; device 'CPU' runs in simulation")
    raise ExecutionError(f"device {device!r} is neither 'CPU', which runs in simulation, nor 'CUDA', the first GPU")


prepare = FusecBackend.prepare
run_model = FusecBackend.run_model
run_node = FusecBackend.run_node
supports_device = FusecBackend.supports_device
