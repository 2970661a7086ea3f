"""Write computations of constants as plain data, so that a file can say how a constant is computed.

Only functions marked as `recorded` have names in files. So a file cannot make fusec call anything else.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from fusec.ir import Array, Op, print_op
from fusec.text import parse_op

F = TypeVar("F", bound=Callable[..., Any])
_BY_NAME: dict[str, Callable[..., Any]] = {}


class UnrecordedError(Exception):
    """A computation or a constant has no form as plain data."""


def recorded(function: F) -> F:
    """Mark a module's function, or a dataclass that can be called, as a computation that files may name."""
    name = function.__name__.strip("_")
    assert name not in _BY_NAME, f"two computations are named {name}"
    _BY_NAME[name] = function
    return function


def computation_data(compute: Callable[..., Array]) -> dict[str, Any]:
    """Return a computation as plain data: its name, and the arguments that are bound to it.

    Raises UnrecordedError if it is not `recorded`, or an argument has no form as plain data.
    """
    function: Any = compute
    given: Mapping[str, Any] = {}
    if isinstance(compute, partial):
        if compute.args:
            raise UnrecordedError(f"{compute.func} has arguments without names")
        function, given = compute.func, compute.keywords
    elif is_dataclass(compute):
        function, given = type(compute), {each.name: getattr(compute, each.name) for each in fields(compute)}
    name = getattr(function, "__name__", "").strip("_")
    if _BY_NAME.get(name) is not function:
        raise UnrecordedError(f"{name or repr(compute)} is not recorded")
    return {"function": name, "given": {key: _encoded(value) for key, value in given.items()}}


def computation_of(data: Mapping[str, Any]) -> Callable[..., Array]:
    """Return the computation that `computation_data` wrote. Raises ValueError or TypeError for other data."""
    function = _BY_NAME.get(data["function"])
    if function is None:
        raise ValueError(f"no computation is named {data['function']!r}")
    given = {str(key): _decoded(value) for key, value in data["given"].items()}
    if isinstance(function, type):
        return function(**given)
    return partial(function, **given) if given else function


def _encoded(value: Any) -> Any:
    if isinstance(value, Op):
        return {"op": print_op(value)}
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(cast("Array", value))
        numbers = base64.b64encode(array.reshape(-1).view(np.uint8).data).decode()
        return {"array": [array.dtype.str, list(array.shape), numbers]}
    if isinstance(value, tuple):
        return [_encoded(each) for each in cast("tuple[Any, ...]", value)]
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return {"float": float(value).hex()}
    raise UnrecordedError(f"an argument is a {type(value).__name__}")


def _decoded(data: Any) -> Any:
    match data:
        case {"op": str(text)}:
            return parse_op(text)
        case {"array": [str(dtype), [*shape], str(numbers)]}:
            kind = np.dtype(dtype)
            if kind.hasobject:
                raise ValueError(f"an array of {kind}")
            return np.frombuffer(base64.b64decode(numbers, validate=True), kind).reshape([int(size) for size in shape])
        case {"float": str(digits)}:
            return float.fromhex(digits)
        case [*items]:
            return tuple(map(_decoded, items))
        case None | bool() | int() | str():
            return data
        case _:
            raise ValueError(f"an argument is {data!r}")
