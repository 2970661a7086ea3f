"""Bind inputs and outputs of a session to memory once, for many runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fusec.errors import ExecutionError, FusecError
from fusec.ir import Array, quote
from fusec.runtime import on_host
from fusec.session.device_memory import array_module, at_address, device_of, require_first, to_host
from fusec.session.ort_value import OrtValue, array_of_value

if TYPE_CHECKING:
    from fusec.session.inference_session import InferenceSession
    from fusec.session.model_interface import NodeArg


class IOBinding:
    """Inputs and outputs of a session, bound to memory for `run_with_iobinding`."""

    def __init__(self, session: InferenceSession):
        self._session = session
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, Any] = {}  # the array to write, or the device of a new array
        self._results: dict[str, Array] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray[Any, Any]) -> None:
        """Bind an input to an array on the host. Each run reads it again."""
        self._inputs[_known(name, self._session.takes, "input")] = np.asarray(arr_on_cpu)

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Bind an input to contiguous memory at an address on `cuda` or `cpu`. It must outlive the binding.

        element_type: a NumPy type, or a number from ONNX's TensorProto.
        """
        require_first(device_id)
        array = at_address(device_type, element_type, shape, buffer_ptr)
        self._inputs[_known(name, self._session.takes, "input")] = array

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Bind an output to memory at an address, or to a new array on that device."""
        require_first(device_id)
        _known(name, self._session.get_outputs(), "output")
        if buffer_ptr is None:
            self._outputs[name] = device_of(device_type)
        elif element_type is None or shape is None:
            raise FusecError(f"output {quote(name)}: an address needs element_type and shape")
        else:
            self._outputs[name] = at_address(device_type, element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Bind an input to the memory of an OrtValue of fusec or onnxruntime."""
        self._inputs[_known(name, self._session.takes, "input")] = array_of_value(ortvalue)

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        """Bind an output to the memory of an OrtValue of fusec or onnxruntime."""
        self._outputs[_known(name, self._session.get_outputs(), "output")] = array_of_value(ortvalue)

    def bind_ortvalue(self, name: str, ortvalue: Any) -> None:
        """Bind the input or output of that name to the memory of an OrtValue."""
        if any(arg.name == name for arg in self._session.takes):
            self.bind_ortvalue_input(name, ortvalue)
        else:
            self.bind_ortvalue_output(name, ortvalue)

    def get_outputs(self) -> list[OrtValue]:
        """Return the results of the last run, in the order in which the outputs were bound."""
        return [OrtValue(self._results[name]) for name in self._bound()]

    def get_outputs_as_ortvaluevector(self) -> list[OrtValue]:
        """Return `get_outputs()`; onnxruntime has a C++ vector here."""
        return self.get_outputs()

    def copy_outputs_to_cpu(self) -> list[np.ndarray[Any, Any]]:
        """Return the results of the last run as arrays on the host."""
        return [to_host(self._results[name]) for name in self._bound()]

    def clear_binding_inputs(self) -> None:
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        self._outputs.clear()
        self._results.clear()

    def synchronize_inputs(self) -> None:
        """Do nothing, because a run waits for the work on its caller's stream."""

    def synchronize_outputs(self) -> None:
        """Wait until the results of the last run are complete."""
        for array in self._results.values():
            if not on_host(array):
                array[:0].get() if array.ndim else array.get()

    def run(self) -> None:
        """Run the session on the bound inputs, and write the bound outputs."""
        if not self._outputs:
            raise ExecutionError("no output is bound: call bind_output first")
        given = {name: array for name, array in self._outputs.items() if not isinstance(array, str)}
        names = list(self._outputs)
        results = self._session.run_arrays(names, self._inputs, given)
        for name, array in zip(names, results, strict=True):
            wanted = self._outputs[name]
            moved = array
            if isinstance(wanted, str) and wanted == "cpu":
                moved = to_host(array)
            elif isinstance(wanted, str) and on_host(array):
                moved = array_module(wanted).asarray(array)
            self._results[name] = moved

    def _bound(self) -> list[str]:
        if not self._results:
            raise ExecutionError("the binding has no results yet: call run_with_iobinding first")
        return list(self._outputs)


def _known(name: str, args: Sequence[NodeArg], kind: str) -> str:
    if all(arg.name != name for arg in args):
        raise ExecutionError(f"no {kind} {quote(name)}; {kind}s are {', '.join(quote(arg.name) for arg in args)}")
    return name
