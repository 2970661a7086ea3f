"""Import the ops that translate labels: numbers to numbers on the device, strings on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.frontends.onnx.ops.strings import is_string, mapped
from fusec.ir import Array, DType, Literal, Value
from fusec.ops import Gather, Reduce, pw
from fusec.ops.spec import require

_DEFAULTS: Mapping[str, Any] = {"string": "_Unused", "int64": -1, "float": -0.0}


def label_encoder(g: Emitter, x: Value, /, **given: Any) -> Value:
    """Import LabelEncoder: the value of the key that equals x, or the default. Of equal keys the last one counts."""
    if "classes_strings" in given:  # version 1: labels and their places in a list
        return _classes(g, x, given["classes_strings"], given)
    keys, values = _list(given, "keys"), _list(given, "values")
    require(keys.size == values.size > 0, f"{keys.size} keys and {values.size} values")
    return _translated(g, x, keys, values, _default(given, values))


def category_mapper(
    g: Emitter, x: Value, /, *, cats_int64s: tuple[int, ...], cats_strings: tuple[str, ...], **given: Any
) -> Value:
    """Import CategoryMapper: the number of a string, or the string of a number."""
    require(len(cats_int64s) == len(cats_strings) > 0, f"{len(cats_int64s)} numbers, {len(cats_strings)} strings")
    numbers, strings = np.array(cats_int64s, np.int64), np.array(cats_strings, object)
    keys, values = (strings, numbers) if is_string(x) else (numbers, strings)
    return _translated(g, x, keys, values, _default(given, values))


def _classes(g: Emitter, x: Value, classes: Sequence[str], given: Mapping[str, Any]) -> Value:
    """Return the place of each string among the classes, or the class of each place."""
    numbers, strings = np.arange(len(classes)), np.array(classes, object)
    keys, values = (strings, numbers) if is_string(x) else (numbers, strings)
    return _translated(g, x, keys, values, _default(given, values))


def _list(given: Mapping[str, Any], name: str) -> np.ndarray:
    """Return the keys or the values, which one of several attributes has."""
    tensor = given.get(f"{name}_tensor")
    if isinstance(tensor, Literal):
        return tensor.array.reshape(-1)
    for kind, dtype in ("strings", object), ("int64s", np.int64):
        if found := given.get(f"{name}_{kind}", ()):
            return np.array(found, dtype)
    return np.array(given.get(f"{name}_floats", ()), np.float32)


def _default(given: Mapping[str, Any], values: np.ndarray) -> np.ndarray:
    """Return the value of what no key equals."""
    tensor = given.get("default_tensor")
    if isinstance(tensor, Literal):
        require(tensor.type.size == 1, f"default_tensor is {tensor.type}, not one value")
        return tensor.array.reshape(()).astype(values.dtype)
    kind = "string" if values.dtype == object else "float" if values.dtype.kind == "f" else "int64"
    return np.array(given.get(f"default_{kind}", _DEFAULTS[kind]), values.dtype)


def _translated(g: Emitter, x: Value, keys: np.ndarray, values: np.ndarray, default: np.ndarray) -> Value:
    """Return the value of each key, and the default for all else. NaN equals NaN."""
    require(is_string(x) == (keys.dtype == object), f"its keys are {keys.dtype.name}, but it takes {x.type}")
    if object in (keys.dtype, values.dtype):
        return _on_host(g, x, dict(zip(map(_key, keys.tolist()), values.tolist(), strict=True)), default)
    numbers = g.constant(keys.astype(x.type.dtype.numpy))
    wide = g.reshape(x, (*x.type.shape, 1))
    equal = g(pw("cmp_eq"), wide, numbers)
    if x.type.dtype.is_float and np.isnan(keys).any():
        both = g(pw("logical_and"), g(pw("is_nan"), wide), g(pw("is_nan"), numbers))
        equal = g(pw("logical_or"), equal, both)
    found = g(pw("where"), equal, g.constant(np.arange(1, keys.size + 1)), g.constant(np.array(0)))
    place = g(Reduce("max", (x.type.rank,), keepdims=False), found)
    return g(Gather(0), g.constant(np.concatenate([default.reshape(1).astype(values.dtype), values])), place)


def _on_host(g: Emitter, x: Value, known: Mapping[Any, Any], default: np.ndarray) -> Value:
    """Look labels up on the host, because keys or values are strings."""

    def compute(arrays: Sequence[Array]) -> tuple[Array, ...]:
        return (mapped(lambda label: known.get(_key(label), default.item()), DType.of_host(default.dtype), arrays[0]),)

    return g.on_host("the labels", compute, x)[0]


def _key(label: Any) -> Any:
    """Return a label as a key that equals itself, which NaN does not."""
    return None if label != label else label


TABLE: Mapping[str, OpFunction] = {"CategoryMapper": category_mapper, "LabelEncoder": label_encoder}
