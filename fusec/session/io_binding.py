"""Bind inputs and outputs of a session to memory once, for many runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fusec.errors import ExecutionError, FusecError
from fusec.ir import Array, quote
from fusec.runtime import on_host
from fusec.session.device_memory import array_module, at_address, check_device, require_first, to_host
from fusec.session.ort_value import OrtValue

if TYPE_CHECKING:
    from fusec.session.inference_session import InferenceSession, NodeArg


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
        require_first(device_id)
        array = at_address(device_type, element_type, shape, buffer_ptr)
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
        require_first(device_id)
        _known(name, self._session.get_outputs(), "output")
        if buffer_ptr is None:
            check_device(device_type)
            self._outputs[name] = device_type
        elif element_type is None or shape is None:
            raise FusecError(f"output {quote(name)}: an address needs element_type and shape")
        else:
            self._outputs[name] = at_address(device_type, element_type, shape, buffer_ptr)

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
        return [to_host(self._results[name]) for name in self._bound()]

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
        """Run the session with the bound inputs, and write the bound outputs."""
        if not self._outputs:
            raise ExecutionError("no output is bound")
        given = {name: array for name, array in self._outputs.items() if not isinstance(array, str)}
        names = list(self._outputs)
        results = self._session.executable.run(names, self._inputs, given)
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
            raise ExecutionError("the binding has not been run")
        return list(self._outputs)


def _known(name: str, args: Sequence[NodeArg], kind: str) -> str:
    if all(arg.name != name for arg in args):
        raise ExecutionError(f"no {kind} {quote(name)}; {kind}s are {', '.join(quote(arg.name) for arg in args)}")
    return name
