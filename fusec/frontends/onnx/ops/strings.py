"""Import ops of strings: the host computes them, because a device has no strings."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fusec.errors import VerifyError
from fusec.frontends.onnx.emission.emit import Emitter, Table
from fusec.ir import Array, DType, Value
from fusec.ops.spec import require

_CASES: dict[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


def is_string(x: Value) -> bool:
    return x.type.dtype is DType.STRING


def require_strings(*operands: Value) -> None:
    for x in operands:
        require(is_string(x), f"takes strings, not {x.type}")


def mapped(function: Callable[..., Any], dtype: DType, *operands: Array) -> Array:
    """Apply a function to the elements of arrays, which are broadcast. Returns an array of the type."""
    count = len(operands)
    result = np.frompyfunc(function, count, 1)(*operands)
    return np.asarray(result, object).astype(dtype.numpy)  # of rank 0 it is no array


def string_concat(g: Emitter, x: Value, y: Value, /) -> Value:
    require_strings(x, y)

    def compute(arrays: Sequence[Array]) -> tuple[Array, ...]:
        return (mapped(str.__add__, DType.STRING, *arrays),)

    return g.on_host("the strings", compute, x, y)[0]


def string_split(g: Emitter, x: Value, /, *, delimiter: str = "", maxsplit: int | None = None) -> tuple[Value, ...]:
    """Import StringSplit: the parts of each string, filled up with empty ones, and their number.

    Without a delimiter, parts are separated by any whitespace.
    """
    require_strings(x)
    most = -1 if maxsplit is None else maxsplit

    def compute(arrays: Sequence[Array]) -> tuple[Array, ...]:
        parts = [text.split(delimiter or None, most) for text in arrays[0].flat]
        width = max(map(len, parts), default=0)
        filled = np.empty((len(parts), width), object)
        for row, found in zip(filled, parts, strict=True):
            row[:] = [*found, *[""] * (width - len(found))]
        counts = np.array([len(found) for found in parts], np.int64)
        return filled.reshape(*x.type.shape, width), counts.reshape(x.type.shape)

    return g.on_host("the strings", compute, x)


def string_normalizer(
    g: Emitter,
    x: Value,
    /,
    *,
    case_change_action: str = "NONE",
    is_case_sensitive: int = 0,
    locale: str = "",
    stopwords: tuple[str, ...] = (),
) -> Value:
    """Import StringNormalizer: leave out words, and change the case of the others.

    locale: not used, because Unicode alone decides the case of a letter.
    """
    require_strings(x)
    row = x.type.rank == 2 and x.type.shape[0] == 1
    require(x.type.rank == 1 or row, f"takes a list of strings, or one row of them, not {x.type}")
    require(case_change_action in _CASES, f"case_change_action {case_change_action!r} is not known")
    change = _CASES[case_change_action]
    compared = str if is_case_sensitive else str.lower
    dropped = {compared(word) for word in stopwords}

    def compute(arrays: Sequence[Array]) -> tuple[Array, ...]:
        words = [change(word) for word in arrays[0].flat if compared(word) not in dropped] or [""]
        return (np.array(words, object).reshape(*([1] * row), len(words)),)

    return g.on_host("the strings", compute, x)[0]


def regex_full_match(g: Emitter, x: Value, /, *, pattern: str = "") -> Value:
    """Import RegexFullMatch, whose patterns are those of RE2: classes such as \\w have ASCII characters only."""
    require_strings(x)
    require("[[:" not in pattern, f"pattern {pattern!r}: named classes are not supported")  # Python has none
    try:
        compiled = re.compile(pattern, re.ASCII)
    except (re.error, RecursionError, OverflowError) as error:
        raise VerifyError(f"pattern {pattern!r}: {error}") from error

    def compute(arrays: Sequence[Array]) -> tuple[Array, ...]:
        return (mapped(lambda text: compiled.fullmatch(text) is not None, DType.BOOL, arrays[0]),)

    return g.on_host("the strings", compute, x)[0]


def equal_strings(g: Emitter, x: Value, y: Value) -> Value:
    """Return for each pair of strings if they are equal."""
    require_strings(x, y)
    return g.on_host("the strings", lambda arrays: (mapped(str.__eq__, DType.BOOL, *arrays),), x, y)[0]


def cast_strings(g: Emitter, x: Value, to: DType) -> Value:
    """Read numbers from strings, or write them as strings.

    Doubles are written with the digits that give the same number when they are read, other floats with 8 digits, as
    onnxruntime does.
    """
    if is_string(x):
        return g.on_host("the strings", lambda arrays: (_read(arrays[0], to),), x)[0]
    digits = "" if x.type.dtype is DType.F64 else ".8g"
    kind = float if x.type.dtype.is_float or x.type.dtype.is_narrow else int

    def compute(arrays: Sequence[Array]) -> tuple[Array, ...]:
        return (mapped(lambda number: _written(kind(number), digits), DType.STRING, arrays[0]),)

    return g.on_host("the numbers", compute, x)[0]


def _read(strings: Array, to: DType) -> Array:
    """Return the numbers that strings stand for. Raises VerifyError for other strings."""
    try:
        if to is DType.BOOL:
            return mapped(lambda text: float(text) != 0, to, strings)
        return mapped(int if to.is_int else float, to, strings)
    except (ValueError, OverflowError) as error:
        raise VerifyError(f"a string is no number of type {to.value}: {error}") from error


def _written(number: float, digits: str) -> str:
    if isinstance(number, int):
        return str(number)
    special = "NaN" if math.isnan(number) else "INF" if number > 0 else "-INF"
    return format(number, digits) if math.isfinite(number) else special


def codes(g: Emitter, x: Value, words: Sequence[str], missing: int) -> Value:
    """Return the place of each string in a list, or `missing`. Of equal words in the list, the last one counts."""
    require_strings(x)
    places = {word: place for place, word in enumerate(words)}

    def compute(arrays: Sequence[Array]) -> tuple[Array, ...]:
        return (mapped(lambda text: places.get(text, missing), DType.I64, arrays[0]),)

    return g.on_host("the strings", compute, x)[0]


TABLE: Table = {
    ("StringConcat", 20): string_concat,
    ("StringSplit", 20): string_split,
    ("StringNormalizer", 10): string_normalizer,
    ("RegexFullMatch", 20): regex_full_match,
}
