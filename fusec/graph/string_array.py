"""Read arrays of text as arrays of Python strings, which is how tensors of strings are held on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusec.errors import VerifyError
from fusec.graph.types import STRING_KINDS


def as_strings(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return text as an array of dtype object that holds strings, the array itself if it is one.

    NumPy's own types of text become Python strings. Raises VerifyError if an element is no string.
    """
    if array.dtype != object and array.dtype.kind in STRING_KINDS:
        return array.astype(object)
    if array.dtype != object:
        raise VerifyError(f"takes strings, not {array.dtype}")
    for element in array.flat:
        if not isinstance(element, str):
            raise VerifyError(f"takes strings, but an element is of type {type(element).__name__}")
    return array


def text_bytes(array: np.ndarray[Any, Any]) -> int:
    """Count the bytes of an array on the host. Strings count as UTF-8."""
    if array.dtype != object:
        return array.nbytes
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in array.flat)
