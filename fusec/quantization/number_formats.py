"""Define the number formats of quantised tensors: their largest number, scales, and rounding as ONNX defines it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from fusec.ir import DType, HostArray
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class NumberFormat:
    """A format in which tensors are stored, symmetric around zero.

    largest: the number that the largest magnitude of a tensor becomes. Integers leave out the lowest one, so that the
        formats are symmetric.
    opset: the first opset of ONNX whose `DequantizeLinear` takes it with a scale per channel or block.
    wide_range: steps shrink with the numbers, so that weights of one product need no scale for each channel.
    """

    dtype: DType
    largest: float
    opset: int
    wide_range: bool = False

    def scale(self, magnitude: HostArray | float, dtype: np.dtype[Any]) -> HostArray:
        """Return the scale with which `magnitude` becomes `largest`, in the tensor's dtype.

        A tensor of zeros has no magnitude; any scale keeps its zeros.
        """
        least = 2.0**-24 if dtype.itemsize == 2 and dtype.kind == "f" else 2.0**-126
        scale = np.maximum(np.asarray(magnitude, np.float64) / self.largest, least)
        return np.where(np.asarray(magnitude) > 0, scale, 1.0).astype(dtype)

    def codes(self, array: HostArray, scale: HostArray) -> HostArray:
        """Quantise: divide by the scale in float32, round to nearest even, and saturate, as `QuantizeLinear` does."""
        quotient = array.astype(np.float32) / scale.astype(np.float32)
        if self.dtype is DType.F8E4M3:
            return np.clip(quotient, -self.largest, self.largest).astype(self.dtype.numpy)
        limits = ml_dtypes.iinfo(self.dtype.numpy)
        return np.clip(np.rint(quotient), limits.min, limits.max).astype(np.int8).astype(self.dtype.numpy)

    def rounded(self, array: HostArray, scale: HostArray) -> HostArray:
        """Quantise and dequantise, in float32."""
        return self.codes(array, scale).astype(np.float32) * scale.astype(np.float32)


OPSET_OF_HALVES = 19  # the first one whose scales may have 16 bits
INT8 = NumberFormat(DType.I8, 127.0, 13)
FP8 = NumberFormat(DType.F8E4M3, 448.0, 19, wide_range=True)
INT4 = NumberFormat(DType.I4, 7.0, 21)
