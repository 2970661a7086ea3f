"""Let a user's Python function compute an ONNX op that fusec does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fusec.errors import ModelError, VerifyError
from fusec.graph.string_array import as_strings
from fusec.graph.types import STRING_KINDS
from fusec.ir import Array
from fusec.ops.spec import require
from fusec.system.dataclass import dataclass

DEFAULT_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class CustomOp:
    """A Python function that computes an ONNX op.

    function: takes an array for each operand, None for one that the node leaves out, and the attributes of the node as
        keywords. It returns an array, or a tuple or list of arrays for several results. It must not write to its
        arguments.
    on_device: the arrays are on the device that runs the model: CuPy's on a GPU, NumPy's in simulation. By default they
        are NumPy's, on the host.
    """

    function: Callable[..., Any]
    on_device: bool = False

    @property
    def label(self) -> str:
        """Return the name of the function for messages."""
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def results(
        self, operands: Sequence[Array | None], attributes: Mapping[str, Any], wanted: Sequence[int]
    ) -> tuple[Any, ...]:
        """Call the function and return some of its results, as arrays that nothing else holds.

        wanted: the indices of these results.

        Raises VerifyError if the function fails, or gives too few results or one that is no array.
        """
        try:
            given = self.function(*map(_read_only, operands), **attributes)
        except Exception as error:  # a user's function may raise anything
            raise VerifyError(f"its function {self.label} raised {type(error).__name__}: {error}") from error
        results: Sequence[Any] = given if isinstance(given, tuple | list) else (given,)
        least = max(wanted, default=-1) + 1
        require(len(results) >= least, f"its function {self.label} gave {len(results)} results, not {least}")
        return tuple(self._own(results[index], index) for index in wanted)

    def _own(self, result: Any, index: int) -> Any:
        """Copy a result, because the function may give the same memory again. The device copies arrays of its own."""
        if self.on_device and not isinstance(result, np.ndarray | np.generic) and hasattr(result, "__dlpack__"):
            return result
        try:
            array = np.array(result, order="C")
        except (TypeError, ValueError) as error:
            kind = type(result).__name__
            raise VerifyError(f"result {index} of its function {self.label} is a {kind}, not an array") from error
        if array.dtype.kind not in STRING_KINDS:
            return array
        try:
            return as_strings(array)
        except VerifyError as error:
            what = f"result {index} of its function {self.label} is no array of numbers or strings"
            raise VerifyError(what) from error


CustomOps = Mapping[str, CustomOp]  # by the name that `qualified` gives


def custom_ops_of(given: Mapping[str, Callable[..., Any] | CustomOp] | None) -> CustomOps:
    """Read functions by name, `domain::Op`, or `Op` of the default domain.

    Raises ModelError if a name is not of this form, or has no function.
    """
    found: dict[str, CustomOp] = {}
    for name, function in (given or {}).items():
        domain, _, op = str(name).rpartition("::")
        if not op:
            raise ModelError(f"custom op {name!r}: write its domain and name, as in 'my.domain::Op'")
        made = function if isinstance(function, CustomOp) else CustomOp(function)
        if not callable(made.function):
            raise ModelError(f"custom op {name!r}: needs a function, not {made.function!r}")
        found[qualified("" if domain in DEFAULT_DOMAINS else domain, op)] = made
    return found


def qualified(domain: str, op: str) -> str:
    """Return the name of an op with its domain, as `custom_ops` has it."""
    return f"{domain}::{op}" if domain else op


def _read_only(array: Array | None) -> Array | None:
    """Return a view that cannot be written, because the array may be the caller's. CuPy has no such views."""
    if not isinstance(array, np.ndarray):
        return array
    view = array.view()
    view.flags.writeable = False
    return view
