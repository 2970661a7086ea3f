"""A value and what rounding may have made of it; what the form under test rounds at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fusec.ir import DType

Array = np.ndarray[Any, Any]

SAFETY = 8.0  # how many observed spreads are put down to rounding; also how near a jump is too near


@dataclass(frozen=True)
class Rounding:
    """What the form under test rounds.

    meaning: it is evaluated in float64; only constants that are computed from others, or narrowed to
    `storage`, were rounded. Otherwise it executes: arithmetic in fp32, results stored as their dtype says.
    tensor_cores: products may round fp32 operands to tf32. device: a GPU's functions, good to a few units.
    """

    meaning: bool
    storage: DType = DType.F32
    tensor_cores: bool = False
    device: bool = False


@dataclass
class Samples:
    """A value undisturbed, and disturbed some times over. A sample that is the very array has met no error.

    unstored: the disturbed samples before they were rounded to 16 bits for storage, where they were: an op fused
    behind may read these.
    """

    plain: Array
    disturbed: list[Array] = field(repr=False)
    unstored: list[Array] | None = field(default=None, repr=False)

    @property
    def exact(self) -> bool:
        return all(s is self.plain for s in self.disturbed)

    def spread(self) -> Array:
        """The largest distance of a sample, by element; infinite where one is NaN or infinite on its own."""
        result = np.zeros(self.plain.shape)
        for sample in self.disturbed:
            if sample is not self.plain:
                np.maximum(result, distance(sample, self.plain), out=result)
        return result


def distance(a: Array, b: Array) -> Array:
    """|a - b| by element: 0 between equal infinities and between NaNs, infinite between finite and not."""
    a, b = (v.astype(np.float64, copy=False) for v in (a, b))
    with np.errstate(all="ignore"):
        result = np.abs(a - b)
        odd = ~np.isfinite(result)
        if odd.any():
            alike = (a == b) | (np.isnan(a) & np.isnan(b))
            result = np.where(odd, np.where(alike, 0.0, np.inf), result)
    return result
