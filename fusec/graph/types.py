"""Define the type of a tensor: element type, shape and memory order."""

from __future__ import annotations

import enum
import math
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from fusec.errors import SizeError, VerifyError
from fusec.system.dataclass import dataclass

MAX_TENSOR_BYTES = 1 << 36  # a larger tensor is refused as a mistake, before anything is allocated
MAX_CONSTANT_BYTES = 1 << 31  # constants that fusec computes; an ONNX model cannot hold a larger one inline either


class DType(enum.Enum):
    """An element type. The enum's value is its name in the text form.

    STRING is text. Host steps compute it, no op takes it, and no device holds it: see `NUMBERS`.
    """

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U64 = "u64"
    U32 = "u32"
    U16 = "u16"
    U8 = "u8"
    BOOL = "bool"
    F8E4M3 = "f8e4m3"
    F8E4M3FNUZ = "f8e4m3fnuz"
    F8E5M2 = "f8e5m2"
    F8E5M2FNUZ = "f8e5m2fnuz"
    F8E8M0 = "f8e8m0"
    F4E2M1 = "f4e2m1"
    I4 = "i4"
    U4 = "u4"
    I2 = "i2"
    U2 = "u2"
    STRING = "string"

    @property
    def numpy(self) -> np.dtype[Any]:
        """Return the NumPy dtype; bf16 and the narrow types are those of ml_dtypes. Strings are Python's."""
        return _NUMPY[self]

    @property
    def itemsize(self) -> int:
        """Return bytes per element."""
        return _NUMPY[self].itemsize

    @property
    def is_float(self) -> bool:
        return self in _FLOATS

    @property
    def is_int(self) -> bool:
        return self in _INTEGERS

    @property
    def is_narrow(self) -> bool:
        """Tell if it is a float of 8 bits or fewer, or an integer below 8 bits; ops only move and cast these."""
        return self in _NARROW

    @property
    def is_narrow_int(self) -> bool:
        return self in (DType.I4, DType.U4, DType.I2, DType.U2)

    @property
    def bits(self) -> int:
        """Return bits per element where several share a byte, as on a GPU; NumPy gives each one at least a byte."""
        return _PACKED_BITS.get(self, 8 * self.itemsize)

    @property
    def saturates(self) -> bool:
        """Tell if a cast to it may clamp numbers that are out of its range to its greatest number."""
        return self in _NARROW and not self.is_narrow_int and self is not DType.F8E8M0

    @property
    def epsilon(self) -> float:
        """Return the distance from 1.0 to the next value of a floating type; 0 for other types."""
        return float(ml_dtypes.finfo(_NUMPY[self]).eps) if self.is_float else 0.0

    @property
    def least(self) -> float:
        """Return the smallest positive number that GPUs keep; they flush denormals to zero, except those of fp16."""
        if not self.is_float:
            return 0.0
        info = ml_dtypes.finfo(_NUMPY[self])
        return float(info.smallest_subnormal if self is DType.F16 else info.tiny)

    def holds(self, numbers: np.ndarray[Any, Any]) -> bool:
        """Tell if this type of integers holds each of these numbers as it is."""
        if not numbers.size or numbers.dtype.kind == "b":
            return True
        limits = ml_dtypes.iinfo(_NUMPY[self])
        within = int(limits.min) <= numbers.min() and numbers.max() <= int(limits.max)
        return bool(within and np.array_equal(np.trunc(numbers), numbers))  # NaN is never within

    @classmethod
    def of(cls, dtype: Any) -> DType:
        """Return the DType of a NumPy dtype, or of anything that `numpy.dtype` takes; see `of_host` for strings.

        Raises VerifyError if there is none.
        """
        try:
            return _FROM_NUMPY[np.dtype(dtype)]
        except (KeyError, TypeError):
            raise VerifyError(f"element type {dtype} is not one fusec knows") from None

    @classmethod
    def of_host(cls, dtype: np.dtype[Any]) -> DType:
        """Return the DType of an array on the host, which may have strings. Raises VerifyError if there is none."""
        return DType.STRING if dtype.kind in STRING_KINDS else DType.of(dtype)


STRING_KINDS = "OUT"  # kinds of NumPy dtypes that hold text: Python's strings, and NumPy's of fixed and variable length
HALVES = (DType.F16, DType.BF16)  # floating-point types of 16 bits
BYTES = (DType.I8, DType.U8)  # integer types of 8 bits
NUMBERS = tuple(dtype for dtype in DType if dtype is not DType.STRING)
_FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
_INTEGERS = frozenset({DType.I64, DType.I32, DType.I16, DType.I8, DType.U64, DType.U32, DType.U16, DType.U8})
_NARROW: dict[DType, np.dtype[Any]] = {
    DType.F8E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.F8E4M3FNUZ: np.dtype(ml_dtypes.float8_e4m3fnuz),
    DType.F8E5M2: np.dtype(ml_dtypes.float8_e5m2),
    DType.F8E5M2FNUZ: np.dtype(ml_dtypes.float8_e5m2fnuz),
    DType.F8E8M0: np.dtype(ml_dtypes.float8_e8m0fnu),
    DType.F4E2M1: np.dtype(ml_dtypes.float4_e2m1fn),
    DType.I4: np.dtype(ml_dtypes.int4),
    DType.U4: np.dtype(ml_dtypes.uint4),
    DType.I2: np.dtype(ml_dtypes.int2),
    DType.U2: np.dtype(ml_dtypes.uint2),
}
_PACKED_BITS = {DType.F4E2M1: 4, DType.I4: 4, DType.U4: 4, DType.I2: 2, DType.U2: 2}
_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.I64: np.dtype(np.int64),
    DType.I32: np.dtype(np.int32),
    DType.I16: np.dtype(np.int16),
    DType.I8: np.dtype(np.int8),
    DType.U64: np.dtype(np.uint64),
    DType.U32: np.dtype(np.uint32),
    DType.U16: np.dtype(np.uint16),
    DType.U8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.bool_),
    **_NARROW,
    DType.STRING: np.dtype(object),
}
_FROM_NUMPY = {v: k for k, v in _NUMPY.items() if k in NUMBERS}


@dataclass(frozen=True)
class TensorType:
    """Shape, element type and layout of a tensor.

    order: the dims from outermost to innermost in memory; `()` is row-major. An NCHW shape in NHWC memory has
        `order=(0, 2, 3, 1)`.
    within: shape of a larger tensor of which this one is a part. The part has the strides of the larger tensor; the
        memory plan decides where it begins. `()`: the tensor is packed.
    """

    shape: tuple[int, ...]
    dtype: DType
    order: tuple[int, ...] = ()
    within: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.within and (
            len(self.within) != len(self.shape) or any(w < d for w, d in zip(self.within, self.shape, strict=True))
        ):
            raise VerifyError(f"{list(self.shape)} is not within {list(self.within)}")
        if min(self.shape, default=0) < 0:
            raise VerifyError(f"negative dimension in shape {list(self.shape)}")
        if self.nbytes > MAX_TENSOR_BYTES:
            raise SizeError(self, self.nbytes, MAX_TENSOR_BYTES)
        if self.order:
            if sorted(self.order) != list(range(len(self.shape))):
                raise VerifyError(f"memory order {self.order} does not permute {len(self.shape)} dims")
            if self.order == tuple(range(len(self.shape))):
                object.__setattr__(self, "order", ())

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def device_bytes(self) -> int:
        """Return the bytes on a GPU, where elements below 8 bits share bytes."""
        return -(-self.size * self.dtype.bits // 8)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Return the stride of each dim, in elements."""
        shape = self.within or self.shape
        strides = [0] * self.rank
        step = 1
        for dim in reversed(self.order or range(self.rank)):
            strides[dim] = step
            step *= max(shape[dim], 1)
        return tuple(strides)

    @property
    def span(self) -> int:
        """Count the elements of memory from the first to the last one of the tensor, both included."""
        if not self.within or not self.size:
            return self.size
        return 1 + sum((d - 1) * stride for d, stride in zip(self.shape, self.strides, strict=True))

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(self.shape, dtype, self.order)

    def with_order(self, order: tuple[int, ...]) -> TensorType:
        return TensorType(self.shape, self.dtype, order)

    def same_value_type(self, other: TensorType) -> bool:
        """Tell if shape and dtype are equal; the layout is not compared, because it does not change the value."""
        return self.shape == other.shape and self.dtype == other.dtype

    def __str__(self) -> str:
        order = "{" + ",".join(map(str, self.order)) + "}" if self.order else ""
        within = " of [" + ",".join(map(str, self.within)) + "]" if self.within else ""
        return f"{self.dtype.value}[{','.join(map(str, self.shape))}]{order}{within}"


def channels_last(rank: int) -> tuple[int, ...]:
    """Return the memory order N, spatial dims, C for a tensor of shape N, C, spatial dims (rank 3 or more)."""
    return (0, *range(2, rank), 1)
