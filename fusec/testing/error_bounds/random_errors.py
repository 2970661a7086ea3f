"""Draw the random errors of samples: a sign and a size for each element, the same in each run.

Signs depend on the place of an element or on a hash of the number, so equal numbers are rounded in the same way.
"""

from __future__ import annotations

import math

import numpy as np

from fusec.ir import DType, HostArray

_POOL = 1 << 14
# This number of samples have errors of full size. Each further one has errors REDUCED times those of the one before.
FULL, REDUCED = 24, 10.0**-1.5


class RandomErrors:
    """Errors of `count` samples.

    unit: the unit roundoff of numbers without a dtype.
    scales: the size of each sample's errors.
    salt: number of the current op, so that each op has other errors.
    """

    def __init__(self, count: int, unit: float):
        self.unit = unit
        self._random_signs = np.random.default_rng(count).choice([-1.0, 1.0], _POOL)
        self.scales = [1.0] * min(count, FULL) + [REDUCED**j for j in range(1, count - FULL + 1)]
        self.salt = 0

    def disturbed(self, x: HostArray, relative: float, k: int, operand: int) -> HostArray:
        """Disturb each element of sample k by a relative error whose sign depends on the element's place.

        relative: the size of the error.
        operand: number of the operand, so that each has errors of its own.
        """
        if x.dtype.kind != "f":
            return x
        return x * (1.0 + relative * self.scales[k] * self.signs(x.shape, k * 31 + operand))

    def signed(self, error: HostArray, place: int, k: int) -> HostArray:
        """Return the errors of sample k, with signs that depend on the element's place."""
        return error * (self.scales[k] * self.signs(error.shape, place + k))

    def signs(self, shape: tuple[int, ...], place: int) -> HostArray:
        """Return random signs that depend on the element's place."""
        size = math.prod(shape)
        start = (self.salt * 7919 + place * 104729) % max(_POOL - size, 1)
        return np.resize(self._random_signs[start : start + size], size).reshape(shape)

    def stored(
        self, plain: HostArray, samples: list[HostArray], dtype: DType | None, relative: float, mask: HostArray | None
    ) -> list[HostArray]:
        """Disturb samples by a relative error whose sign is a hash of the number.

        Equal numbers are thus rounded in the same way.

        plain: the exact numbers, which are hashed.
        dtype: the type to store; None if the number stays in a register.
        relative: the size of the error; 0 stands for half a unit of the type.
        mask: 1 where the number is disturbed, 0 elsewhere; None disturbs all.
        """
        relative = relative or (dtype.epsilon / 2 if dtype is not None else self.unit)
        mixed = _mixed(np.abs(plain))
        least = dtype.least if dtype is not None else 0.0
        tiny = (plain != 0) & (np.abs(plain) < least / relative) if least else None
        if tiny is not None and not tiny.any():
            tiny = None
        result: list[HostArray] = []
        for k, sample in enumerate(samples):
            sign = np.where(_mixed(_mixed(mixed ^ self._key(k))) >> np.uint64(63), 1.0, -1.0) * self.scales[k]
            error = sign * relative if mask is None else sign * relative * mask
            disturbed = sample * (1.0 + error)
            result.append(disturbed if tiny is None else disturbed + np.where(tiny, sign * least, 0.0))
        return result

    def _key(self, k: int) -> np.uint64:
        return np.uint64((self.salt * 1000 + k) * 0x9E3779B97F4A7C15 & (2**64 - 1))


def _mixed(array: HostArray) -> HostArray:
    """Hash each element's bits (two rounds of multiplication and folding, as in MurmurHash3's finaliser)."""
    bits = array.view(np.uint64)
    bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return (bits ^ (bits >> np.uint64(29))) * np.uint64(0xC4CEB9FE1A85EC53)
