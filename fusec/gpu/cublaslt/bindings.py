"""Call cuBLASLt's functions by ctypes, as its header declares them (cublasLt.h, the same in CUDA 12 and 13).

CuPy has no bindings of cuBLASLt, only of cuBLAS. Handles, descriptors and addresses are plain numbers here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np


class BlasError(Exception):
    """Status of the library other than success."""


class MatmulDescAttribute(IntEnum):
    """The used part of cublasLtMatmulDescAttributes_t."""

    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8
    A_SCALE_POINTER = 17
    D_SCALE_POINTER = 20
    FAST_ACCUM = 25
    BIAS_DATA_TYPE = 26


class MatrixLayoutAttribute(IntEnum):
    """The used part of cublasLtMatrixLayoutAttribute_t."""

    BATCH_COUNT = 5
    STRIDED_BATCH_OFFSET = 6


class MatmulPreferenceAttribute(IntEnum):
    """The used part of cublasLtMatmulPreferenceAttributes_t."""

    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


ALGORITHM_WORDS = 8  # of 64 bits, in a cublasLtMatmulAlgo_t
# cublasLtMatmulHeuristicResult_t
RESULT = np.dtype(
    [
        ("algorithm", "<u8", (ALGORITHM_WORDS,)),
        ("workspace_bytes", "<u8"),
        ("state", "<i4"),
        ("waves", "<f4"),
        ("reserved", "<i4", (4,)),
    ]
)

_P, _I, _N = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_LAYOUTS = [_P] * 4
_FUNCTIONS: dict[str, Sequence[Any]] = {
    "Create": [_P],
    "Destroy": [_P],
    "MatmulDescCreate": [_P, _I, _I],
    "MatmulDescSetAttribute": [_P, _I, _P, _N],
    "MatmulDescDestroy": [_P],
    "MatrixLayoutCreate": [_P, _I, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
    "MatrixLayoutSetAttribute": [_P, _I, _P, _N],
    "MatrixLayoutDestroy": [_P],
    "MatmulPreferenceCreate": [_P],
    "MatmulPreferenceSetAttribute": [_P, _I, _P, _N],
    "MatmulPreferenceDestroy": [_P],
    "MatmulAlgoGetHeuristic": [_P, _P, *_LAYOUTS, _P, _I, _P, _P],
    "MatmulAlgoCheck": [_P, _P, *_LAYOUTS, _P, _P],
    "MatmulAlgoConfigGetAttribute": [_P, _I, _P, _N, _P],
    "Matmul": [_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _N, _P],
}


class Library:
    """The library at a path. Raises OSError if it does not load."""

    def __init__(self, path: str):
        self._library = ctypes.CDLL(path)
        self._library.cublasLtGetVersion.restype = _N
        self._library.cublasLtGetStatusString.restype = ctypes.c_char_p
        self._functions: dict[str, Any] = {}
        for name, parameters in _FUNCTIONS.items():
            function = self._library[f"cublasLt{name}"]
            function.argtypes, function.restype = parameters, _I
            self._functions[name] = function

    @property
    def version(self) -> int:
        """The version as a number: 131000 for 13.1.0."""
        return int(self._library.cublasLtGetVersion())

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the header, without its prefix. Raises BlasError unless it succeeds."""
        status: int = self._functions[name](*arguments)
        if status:
            raise BlasError(f"cublasLt{name}: {self._library.cublasLtGetStatusString(status).decode()}")

    def create(self, kind: str, *arguments: Any) -> int:
        """Create a handle ("") or a descriptor ("MatmulDesc", "MatrixLayout", "MatmulPreference")."""
        created = ctypes.c_void_p()
        self.call(f"{kind}Create", ctypes.byref(created), *arguments)
        assert created.value is not None
        return created.value

    def set_attribute(self, kind: str, descriptor: int, attribute: int, value: np.generic) -> None:
        """Set an attribute of a descriptor to a number of the type that the header names."""
        stored = np.array([value])
        self.call(f"{kind}SetAttribute", descriptor, int(attribute), stored.ctypes.data, stored.nbytes)


def load() -> Library:
    """Load the library that CuPy finds, too. Raises ImportError, OSError or RuntimeError if there is none."""
    from cuda import pathfinder  # which comes with CuPy

    path = pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path
    if path is None:
        raise OSError("cuda-pathfinder found no path of libcublasLt")
    return Library(path)
