"""Hold a value with its disturbed samples, and describe the rounding of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field

import numpy as np

from fusec.ir import DType, HostArray
from fusec.system.dataclass import dataclass

SAFETY = 8.0  # number of spreads explained by rounding, and the least distance from a discontinuity


@dataclass(frozen=True)
class Rounding:
    """The operations that an evaluation rounds.

    meaning: True if the graph is evaluated in float64. Only constants that are computed from others, or narrowed to
        `storage`, are rounded then. False if it is executed: arithmetic in fp32, results stored in their dtypes.
    tensor_cores: products may round fp32 operands to tf32.
    device: functions run on a GPU and have an error of a few units.
    exported: the graph goes through ONNX. Its attributes, and the numbers in formulas that stand for an op, may be
        rounded to fp32, in f64 graphs, too.
    """

    meaning: bool
    storage: DType = DType.F32
    tensor_cores: bool = False
    device: bool = False
    exported: bool = False


@dataclass
class Samples:
    """A value without errors, and several disturbed samples of it.

    A sample that is the same array object as `plain` has no error.
    unstored: the disturbed samples before they were rounded to 16 bits for storage; None if they were not. An op
        that is fused after this one may read these.
    """

    plain: HostArray
    disturbed: list[HostArray] = field(repr=False)
    unstored: list[HostArray] | None = field(default=None, repr=False)

    @property
    def exact(self) -> bool:
        return all(s is self.plain for s in self.disturbed)

    def changed(self, change: Callable[[int, HostArray], HostArray]) -> Samples:
        """Apply a function to each sample, stored or not; it gets the sample's number first."""
        unstored = None if self.unstored is None else [change(k, s) for k, s in enumerate(self.unstored)]
        return Samples(self.plain, [change(k, s) for k, s in enumerate(self.disturbed)], unstored)

    def spread(self) -> HostArray:
        """Return the largest distance of a sample by element; infinite if only one of the two is finite."""
        result = np.zeros(self.plain.shape)
        for sample in self.disturbed:
            if sample is not self.plain:
                np.maximum(result, distance(sample, self.plain), out=result)
        return result

    def reach(self) -> tuple[HostArray, HostArray]:
        """Return the largest distances of a sample below and above, by element.

        Finite samples count on both sides, because the sign of an error is random. A sample that overflowed counts on
        its own side alone.
        """
        below = above = np.zeros(self.plain.shape)
        for sample in self.disturbed:
            if sample is not self.plain:
                far = distance(sample, self.plain)
                overflowed = np.isinf(sample) & np.isfinite(self.plain)
                below = np.maximum(below, np.where(overflowed & (sample > 0), 0.0, far))
                above = np.maximum(above, np.where(overflowed & (sample < 0), 0.0, far))
        return below, above


def distance(a: HostArray, b: HostArray) -> HostArray:
    """Return |a - b| by element: 0 between equal infinities or NaNs, infinite between finite and non-finite."""
    a, b = (v.astype(np.float64, copy=False) for v in (a, b))
    with np.errstate(all="ignore"):
        result = np.abs(a - b)
        odd = ~np.isfinite(result)
        if odd.any():
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            result = np.where(odd, np.where(same, 0.0, np.inf), result)
    return result


def in_float64(array: HostArray) -> HostArray:
    """Return floats in float64, and other arrays as they are."""
    return array.astype(np.float64, copy=False) if DType.of(array.dtype).is_float else array


def digits(dtype: DType) -> int:
    """Count the bits of a floating type's significand."""
    return 1 - round(math.log2(dtype.epsilon))
