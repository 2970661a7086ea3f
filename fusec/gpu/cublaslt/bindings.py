"""Call cuBLASLt's functions by ctypes, as its header declares them (cublasLt.h, the same in CUDA 12 and 13).

Handles, descriptors and addresses are plain numbers. The library is found as CuPy finds it, by cuda-pathfinder.
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
    """cublasLtMatmulDescAttributes_t, as far as it is used here."""

    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8
    BIAS_DATA_TYPE = 26


class MatrixLayoutAttribute(IntEnum):
    """cublasLtMatrixLayoutAttribute_t."""

    BATCH_COUNT = 5
    STRIDED_BATCH_OFFSET = 6


class MatmulPreferenceAttribute(IntEnum):
    """cublasLtMatmulPreferenceAttributes_t."""

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
    """Functions of the library at a path; each raises BlasError unless it succeeds. OSError without it."""

    def __init__(self, path: str):
        self._library = ctypes.CDLL(path)
        self._library.cublasLtGetVersion.restype = _N
        self._library.cublasLtGetStatusString.restype = ctypes.c_char_p
        self._functions: dict[str, Any] = {}
        for name, parameters in _FUNCTIONS.items():
            function = self._functions[name] = self._library[f"cublasLt{name}"]
            function.argtypes, function.restype = parameters, _I

    @property
    def version(self) -> int:
        """131000 for 13.1.0."""
        return int(self._library.cublasLtGetVersion())

    def _call(self, name: str, *arguments: Any) -> None:
        status: int = self._functions[name](*arguments)
        if status:
            raise BlasError(f"cublasLt{name}: {self._library.cublasLtGetStatusString(status).decode()}")

    def _made(self, name: str, *arguments: Any) -> int:
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made), *arguments)
        assert made.value is not None
        return made.value

    def create(self) -> int:
        return self._made("Create")

    def destroy(self, handle: int) -> None:
        self._call("Destroy", handle)

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        return self._made("MatmulDescCreate", compute, scale)

    def matmul_desc_set_attribute(self, operation: int, attribute: int, value: int, nbytes: int) -> None:
        self._call("MatmulDescSetAttribute", operation, attribute, value, nbytes)

    def matmul_desc_destroy(self, operation: int) -> None:
        self._call("MatmulDescDestroy", operation)

    def matrix_layout_create(self, dtype: int, rows: int, columns: int, ld: int) -> int:
        return self._made("MatrixLayoutCreate", dtype, rows, columns, ld)

    def matrix_layout_set_attribute(self, layout: int, attribute: int, value: int, nbytes: int) -> None:
        self._call("MatrixLayoutSetAttribute", layout, attribute, value, nbytes)

    def matrix_layout_destroy(self, layout: int) -> None:
        self._call("MatrixLayoutDestroy", layout)

    def matmul_preference_create(self) -> int:
        return self._made("MatmulPreferenceCreate")

    def matmul_preference_set_attribute(self, preference: int, attribute: int, value: int, nbytes: int) -> None:
        self._call("MatmulPreferenceSetAttribute", preference, attribute, value, nbytes)

    def matmul_preference_destroy(self, preference: int) -> None:
        self._call("MatmulPreferenceDestroy", preference)

    def matmul_algo_get_heuristic(
        self,
        handle: int,
        operation: int,
        a: int,
        b: int,
        c: int,
        d: int,
        preference: int,
        most: int,
        to: int,
        count: int,
    ) -> None:
        """`to`: memory for so many RESULTs at `most`; `count`: for an i32."""
        self._call("MatmulAlgoGetHeuristic", handle, operation, a, b, c, d, preference, most, to, count)

    def matmul_algo_check(
        self, handle: int, operation: int, a: int, b: int, c: int, d: int, algorithm: int, result: int
    ) -> None:
        """result: memory for one RESULT."""
        self._call("MatmulAlgoCheck", handle, operation, a, b, c, d, algorithm, result)

    def matmul_algo_config_get_attribute(
        self, algorithm: int, attribute: int, to: int, nbytes: int, written: int
    ) -> None:
        self._call("MatmulAlgoConfigGetAttribute", algorithm, attribute, to, nbytes, written)

    def matmul(
        self,
        handle: int,
        operation: int,
        alpha: int,
        a: int,
        a_layout: int,
        b: int,
        b_layout: int,
        beta: int,
        c: int,
        c_layout: int,
        d: int,
        d_layout: int,
        algorithm: int,
        workspace: int,
        workspace_bytes: int,
        stream: int,
    ) -> None:
        """D = act(alpha * A B + beta * C), queued on the stream; alpha and beta are addresses on the host."""
        operands = (alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout)
        self._call("Matmul", handle, operation, *operands, algorithm, workspace, workspace_bytes, stream)


def load() -> Library:
    """Load the library that CuPy finds. Raises ImportError, OSError or RuntimeError if there is none."""
    from cuda import pathfinder  # which comes with CuPy

    path = pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path
    if path is None:
        raise OSError("cuda-pathfinder found no path of libcublasLt")
    return Library(path)
