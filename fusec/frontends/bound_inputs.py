"""Turn values that the user gives for inputs of a model into constants, and check them against the declaration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusec.errors import ModelError, VerifyError
from fusec.ir import Constant, DType, Graph, Literal
from fusec.system.printable import printable

Dims = tuple[int | str, ...] | None


def bound_literal(name: str, given: Any, dtype: DType | None, dims: Dims) -> Literal:
    """Return the constant for an input.

    given: an array of the input's own type, or Python numbers and lists, which take its type if it holds them. A number
        alone also stands for an input of one element.
    dtype, dims: as the model declares them; None if it does not.
    Raises ModelError if the value has another type or shape.
    """
    array = _array(name, given, dtype)
    if array.ndim == 0 and not isinstance(given, np.ndarray) and all(d == 1 or isinstance(d, str) for d in dims or ()):
        array = array.reshape((1,) * len(dims or ()))
    if dtype is not None and array.dtype != dtype.numpy:
        raise ModelError(f"the constant for input {name!r} is {array.dtype}, the model declares {dtype.value}")
    if not _fits(array.shape, dims):
        shown = ", ".join(printable(str(d)) if d != "" else "?" for d in dims or ())
        raise ModelError(f"the constant for input {name!r} has shape {list(array.shape)}, the model declares [{shown}]")
    try:
        return Literal.of_host(array, name)
    except VerifyError as error:
        raise ModelError(f"the constant for input {name!r}: {error}") from error


def _array(name: str, given: Any, dtype: DType | None) -> np.ndarray[Any, Any]:
    """Return the value as an array. Python numbers become the declared type, unless that changes them."""
    try:
        array = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise ModelError(f"the constant for input {name!r} is no array: {error}") from error
    if array.dtype.kind == "U":
        array = array.astype(object)
    if dtype is None or isinstance(given, np.ndarray | np.generic) or array.dtype == dtype.numpy:
        return array
    kinds = "iuf" if dtype.is_float else "iu" if dtype.is_int else "b"
    if array.dtype.kind not in kinds and array.size:
        raise ModelError(f"the constant for input {name!r} is {given!r}, the model declares {dtype.value}")
    if dtype.is_int and not dtype.holds(array):
        raise ModelError(f"the constant for input {name!r} is {given!r}, which {dtype.value} does not hold")
    with np.errstate(all="ignore"):
        typed = array.astype(dtype.numpy)
    if not dtype.is_float and not np.array_equal(typed.astype(array.dtype), array):
        raise ModelError(f"the constant for input {name!r} is {given!r}, which {dtype.value} does not hold")
    return typed


def _fits(shape: Sequence[int], dims: Dims) -> bool:
    if dims is None:
        return True
    return len(shape) == len(dims) and all(isinstance(d, str) or d == size for d, size in zip(dims, shape, strict=True))


def with_constants(graph: Graph, constants: Mapping[str, Literal]) -> Graph:
    """Return a copy of a graph in which some inputs are constants."""
    copy = graph.clone()
    first = next(iter(copy.nodes), None)
    free = [value for value in copy.inputs if value.name not in constants]
    for value in copy.inputs:
        if value.name in constants:
            literal = constants[value.name]
            copy.replace(value, copy.add(Constant(literal), name=value.name, before=first))
    return copy.extract(free, list(copy.nodes), copy.outputs, copy.output_names)
