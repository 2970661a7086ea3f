"""Collect the magnitudes of a tensor over all calibration data, in bounded memory and one pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fusec.errors import ModelError
from fusec.ir import HostArray

BINS = 2048


def on_host(array: Any) -> HostArray:
    """Return an array of NumPy or CuPy as one of NumPy."""
    return array if isinstance(array, np.ndarray) else array.get()


class Histogram:
    """Counts of the magnitudes of a tensor's elements. Arrays on a GPU are counted there, because copies take long.

    counted: also count; else only the largest magnitude is known.

    The bins divide the range from 0 to a power of two. A larger magnitude doubles the range and joins bins in pairs, so
    counts stay exact and data is read once. At least half of the bins are in use. Zeros are counted apart, because
    every scale keeps them.
    """

    def __init__(self, name: str, counted: bool = True):
        self.name = name
        self._counted = counted
        self.counts = np.zeros(BINS, np.int64)
        self.zeros = 0
        self.largest = 0.0
        self._range = 0.0

    @property
    def width(self) -> float:
        """Return the width of a bin."""
        return self._range / BINS

    def add(self, array: HostArray) -> None:
        """Count the elements of an array of NumPy or CuPy. Raises ModelError if one is not a finite number."""
        magnitudes = np.abs(array.reshape(-1).astype(np.float32, copy=False))
        top = float(magnitudes.max()) if magnitudes.size else 0.0
        if not math.isfinite(top):
            raise ModelError(f"tensor {self.name!r} has an infinity or NaN with the calibration data")
        self.largest = max(self.largest, top)
        if not self._counted:
            return
        zeros = magnitudes.size - int(np.count_nonzero(magnitudes))
        self.zeros += zeros
        if not top:
            return
        self._cover(top)
        bins = (magnitudes * np.float32(BINS / self._range)).astype(np.int32)
        np.minimum(bins, BINS - 1, out=bins)  # the end of the range belongs to the last bin
        self.counts += on_host(np.bincount(bins, minlength=BINS))
        self.counts[0] -= zeros

    def _cover(self, top: float) -> None:
        """Double the range until it has `top`."""
        if not self._range:
            # the bins of magnitudes below 2^-100 would be narrower than float32 can divide by
            self._range = 2.0 ** max(math.ceil(math.log2(top)), -100)
        while top > self._range:
            self.counts = np.concatenate([self.counts.reshape(-1, 2).sum(-1), np.zeros(BINS // 2, np.int64)])
            self._range *= 2
