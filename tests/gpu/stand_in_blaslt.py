"""cuBLASLt as far as fusec uses it, in NumPy over host memory: it trusts what it is given.

Layouts, transpositions, epilogues and types are read from the descriptors alone, so that whoever describes a matrix
wrongly gets a wrong answer.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from typing import Any

import ml_dtypes
import numpy as np
from gpu.stand_in_gpu import Machine

from fusec.gpu.cublaslt.bindings import RESULT, BlasError, MatmulDescAttribute, MatmulPreferenceAttribute

TYPES = {0: np.float32, 2: np.float16, 3: np.int8, 10: np.int32, 14: ml_dtypes.bfloat16, 28: ml_dtypes.float8_e4m3fn}
FP8, I8, I32 = 28, 3, 10
COMPUTE_I32 = 72
POINTERS = (
    MatmulDescAttribute.BIAS_POINTER,
    MatmulDescAttribute.A_SCALE_POINTER,
    MatmulDescAttribute.D_SCALE_POINTER,
)


class Bindings:
    """Of `Library`. wrong, failing: algorithms that compute something else, or do not run."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.names = itertools.count(1)
        self.operations: dict[int, dict[int, int]] = {}
        self.layouts: dict[int, dict[str, int]] = {}
        self.preferences: dict[int, dict[int, int]] = {}
        self.algorithms: tuple[int, ...] = (66, 71, 52)
        self.wrong: set[int] = set()
        self.failing: set[int] = set()
        self.ran: list[int] = []
        self.times_us: dict[int, float] = {}  # by algorithm; 20 where not said
        self.asked = 0  # how many times for its heuristics

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the header by the method of that name in snake case."""
        getattr(self, re.sub("(?<!^)(?=[A-Z])", "_", name).lower())(*arguments)

    def create(self, kind: str, *arguments: int) -> int:
        if not kind:
            return 4711
        create = {
            "MatmulDesc": self.matmul_desc_create,
            "MatrixLayout": self.matrix_layout_create,
            "MatmulPreference": self.matmul_preference_create,
        }
        return create[kind](*arguments)

    def set_attribute(self, kind: str, descriptor: int, attribute: int, value: np.generic) -> None:
        stored = np.array([value])
        self.call(f"{kind}SetAttribute", descriptor, attribute, stored.ctypes.data, stored.nbytes)

    def destroy(self, handle: int) -> None:
        assert handle == 4711

    # descriptors -----------------------------------------------------------------------------------

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        assert scale == (I32 if compute == COMPUTE_I32 else 0), "scales are in fp32, or in the integers of sums"
        name = next(self.names)
        self.operations[name] = {-1: compute}
        return name

    def matmul_desc_set_attribute(self, name: int, attribute: int, address: int, size: int) -> None:
        signed = attribute not in (MatmulDescAttribute.EPILOGUE, *POINTERS)
        assert size == (8 if attribute in POINTERS else 1 if attribute == MatmulDescAttribute.FAST_ACCUM else 4)
        self.operations[name][attribute] = _number(address, size, signed)

    def matmul_desc_destroy(self, name: int) -> None:
        del self.operations[name]

    def matrix_layout_create(self, dtype: int, rows: int, columns: int, ld: int) -> int:
        assert ld >= rows, "columns overlap"
        name = next(self.names)
        self.layouts[name] = {"dtype": dtype, "rows": rows, "columns": columns, "ld": ld, "batch": 1, "step": 0}
        return name

    def matrix_layout_set_attribute(self, name: int, attribute: int, address: int, size: int) -> None:
        which = {5: ("batch", 4), 6: ("step", 8)}[attribute]
        assert size == which[1]
        self.layouts[name][which[0]] = _number(address, size, True)

    def matrix_layout_destroy(self, name: int) -> None:
        del self.layouts[name]

    def matmul_preference_create(self) -> int:
        name = next(self.names)
        self.preferences[name] = {}
        return name

    def matmul_preference_set_attribute(self, name: int, attribute: int, address: int, size: int) -> None:
        assert size == (8 if attribute == MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES else 4)
        self.preferences[name][attribute] = _number(address, size, False)

    def matmul_preference_destroy(self, name: int) -> None:
        del self.preferences[name]

    # algorithms ------------------------------------------------------------------------------------

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
        assert handle == 4711
        self.asked += 1
        assert self.preferences[preference][MatmulPreferenceAttribute.REDUCTION_SCHEME_MASK] == 2
        if not self.algorithms:
            raise BlasError("not supported")
        self._check(operation, a, b, c, d)
        kinds = RESULT
        results = np.frombuffer(memoryview((ctypes.c_uint8 * (kinds.itemsize * most)).from_address(to)), kinds)
        for place, algorithm in enumerate(self.algorithms[:most]):
            results[place]["algorithm"][0] = algorithm
            results[place]["workspace_bytes"] = 1024 * place
        ctypes.c_int32.from_address(count).value = min(most, len(self.algorithms))

    def matmul_algo_config_get_attribute(self, algo: int, attribute: int, to: int, size: int, written: int) -> None:
        value = ctypes.c_uint64.from_address(algo).value if attribute == 0 else attribute
        assert size == (2 if attribute > 6 else 4)
        ctypes.memmove(to, value.to_bytes(size, "little"), size)
        ctypes.c_uint64.from_address(written).value = size

    def matmul_algo_check(
        self, handle: int, operation: int, a: int, b: int, c: int, d: int, algo: int, result: int
    ) -> None:
        algorithm = ctypes.c_uint64.from_address(algo).value
        if algorithm not in self.algorithms:
            raise BlasError("invalid value")
        self._check(operation, a, b, c, d)
        kinds = RESULT
        found = np.frombuffer(memoryview((ctypes.c_uint8 * kinds.itemsize).from_address(result)), kinds)
        found[0]["workspace_bytes"] = 1024 * self.algorithms.index(algorithm)

    def _check(self, operation: int, *layouts: int) -> None:
        a, b, c, d = (self.layouts[name] for name in layouts)
        desc = self.operations[operation]
        rows, inner = (a["columns"], a["rows"]) if desc[3] else (a["rows"], a["columns"])
        also, columns = (b["columns"], b["rows"]) if desc[4] else (b["rows"], b["columns"])
        assert (rows, columns, inner) == (d["rows"], d["columns"], also), "sizes do not fit"
        assert (c["rows"], c["columns"]) == (d["rows"], d["columns"])
        assert a["batch"] == b["batch"] == c["batch"] == d["batch"]
        added = d["dtype"]
        assert (desc[-1] == COMPUTE_I32) == (a["dtype"] == I8) == (d["dtype"] == I32)
        if a["dtype"] == I8:
            assert b["dtype"] == I8 and desc[3] and not desc[4] and desc[MatmulDescAttribute.EPILOGUE] == 1, "no form"
            assert not any(size % 4 for size in (rows, inner, a["ld"], b["ld"])), "not in the table"
        if a["dtype"] == FP8:
            assert desc[3] and not desc[4] and not any(size % 16 for size in (rows, inner, a["ld"], b["ld"]))
            added = c["dtype"] if d["dtype"] == FP8 else added
            assert added != FP8 and (d["dtype"] != 0 or not desc[MatmulDescAttribute.EPILOGUE] & 4), "not in the table"
        else:
            assert not {*POINTERS[1:]} & desc.keys(), "scales of fp8"
        assert c["dtype"] == added
        if desc[MatmulDescAttribute.EPILOGUE] & 4:
            assert desc[MatmulDescAttribute.BIAS_DATA_TYPE] == added

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
        algo: int,
        workspace: int,
        workspace_bytes: int,
        stream: int,
    ) -> None:
        self._check(operation, a_layout, b_layout, c_layout, d_layout)
        assert workspace or not workspace_bytes, "no scratch memory"
        algorithm = ctypes.c_uint64.from_address(algo).value
        if algorithm in self.failing:
            raise BlasError("execution failed")
        if self.layouts[d_layout]["dtype"] == FP8 and c == d:
            raise BlasError("an unsupported value")  # as the library says of C in another type at the address of D
        desc = dict(self.operations[operation])  # a capture holds those of its time
        layouts = [dict(self.layouts[name]) for name in (a_layout, b_layout, c_layout, d_layout)]
        number = ctypes.c_int32 if desc[-1] == COMPUTE_I32 else ctypes.c_float
        scales = [number.from_address(at).value for at in (alpha, beta)]

        def work() -> None:
            self.ran.append(algorithm)
            self.machine.now_us += self.times_us.get(algorithm, 20.0)
            addresses = zip((a, b, c or d, d), layouts, strict=True)
            left, right, added, result = (_stack(at, layout) for at, layout in addresses)
            wide = np.int64 if desc[-1] == COMPUTE_I32 else np.float32
            x = left.astype(wide).transpose(0, 2, 1) if desc[3] else left.astype(wide)
            y = right.astype(wide).transpose(0, 2, 1) if desc[4] else right.astype(wide)
            with np.errstate(
                over="ignore", invalid="ignore"
            ):  # the device says nothing of what replays of replays grow to
                total = scales[0] * _number_at(desc, MatmulDescAttribute.A_SCALE_POINTER) * (x @ y)
            if scales[1]:
                total = total + scales[1] * added.astype(np.float32)
            epilogue = desc[MatmulDescAttribute.EPILOGUE]
            if epilogue & 4:
                rows, kind = layouts[3]["rows"], TYPES[desc[MatmulDescAttribute.BIAS_DATA_TYPE]]
                total = total + _flat(desc[MatmulDescAttribute.BIAS_POINTER], rows, kind).astype(np.float32)[:, None]
            if epilogue & 2:
                total = np.maximum(total, 0)
            if epilogue & 32:
                total = 0.5 * total * (1 + np.tanh(np.sqrt(2 / np.pi) * (total + 0.044715 * total**3)))
            total = total * _number_at(desc, MatmulDescAttribute.D_SCALE_POINTER)
            if layouts[3]["dtype"] == FP8:
                total = np.clip(total, -448, 448)
            result[...] = 0 if algorithm in self.wrong else total.astype(result.dtype)

        self.machine.do(work)


def _number_at(desc: dict[int, int], attribute: int) -> float:
    return ctypes.c_float.from_address(desc[attribute]).value if attribute in desc else 1.0


def _number(address: int, size: int, signed: bool) -> int:
    return int.from_bytes(ctypes.string_at(address, size), "little", signed=signed)


def _flat(address: int, size: int, dtype: Any) -> np.ndarray:
    nbytes = size * np.dtype(dtype).itemsize
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8).view(dtype)


def _stack(address: int, layout: dict[str, int]) -> np.ndarray:
    dtype = np.dtype(TYPES[layout["dtype"]])
    size = (layout["batch"] - 1) * layout["step"] + (layout["columns"] - 1) * layout["ld"] + layout["rows"]
    strides = [step * dtype.itemsize for step in (layout["step"], 1, layout["ld"])]
    shape = (layout["batch"], layout["rows"], layout["columns"])
    return np.lib.stride_tricks.as_strided(_flat(address, size, dtype), shape, strides)
