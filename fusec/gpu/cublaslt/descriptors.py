"""Describe a product to cuBLASLt: its operation, its epilogue, and the layouts of its matrices."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fusec.gpu.cublaslt.bindings import Library, MatmulDescAttribute, MatrixLayoutAttribute
from fusec.gpu.cublaslt.match import Matrices, Product
from fusec.ir import DType

ALIGNMENT_BYTES = 16  # of every operand; cuDNN assumes the same
_TYPES = {DType.F32: 0, DType.F16: 2, DType.I8: 3, DType.I32: 10, DType.BF16: 14, DType.F8E4M3: 28}  # cudaDataType_t
_COMPUTE_F32, _COMPUTE_I32, _COMPUTE_TF32 = 68, 72, 77  # cublasComputeType_t
_EPILOGUES = {"": 1, "relu": 2, "gelu": 32}  # cublasLtEpilogue_t
_BIAS = 4


class Descriptors:
    """cuBLASLt's descriptors of a product: the operation and the layouts of its matrices, freed with this object."""

    def __init__(self, lt: Library, product: Product):
        self._lt = lt
        compute = _COMPUTE_TF32 if product.tf32 else _COMPUTE_I32 if product.of_integers else _COMPUTE_F32
        self.operation = self._create("MatmulDesc", compute, _TYPES[product.scales_in])
        names = MatmulDescAttribute
        epilogue = _EPILOGUES[product.activation]
        if product.bias is not None:
            epilogue = (epilogue if product.activation else 0) | _BIAS
        self._set_operation(names.TRANSA, np.int32(product.transpose_a))
        self._set_operation(names.TRANSB, np.int32(product.transpose_b))
        self._set_operation(names.EPILOGUE, np.uint32(epilogue))
        if product.fast_sums:
            self._set_operation(names.FAST_ACCUM, np.int8(1))
        if product.bias is not None:
            assert product.bias_dtype is not None
            self._set_operation(names.BIAS_DATA_TYPE, np.int32(_TYPES[product.bias_dtype]))
        self._pointers = {  # attributes that hold addresses, by the uid of the tensor
            names.BIAS_POINTER: product.bias,
            names.A_SCALE_POINTER: product.scale,  # A's scale times B's
            names.D_SCALE_POINTER: product.result_scale,
        }
        self.set_addresses(defaultdict(lambda: ALIGNMENT_BYTES))  # the heuristic only looks at the alignment
        self.a, self.b, self.d = (self._layout(m, product.batch) for m in (product.a, product.b, product.d))
        if product.c is not None:
            self.c = self._layout(product.c, product.batch)
        elif product.d.dtype is DType.F8E4M3:  # there is no residual in fp8
            self.c = self._layout(replace(product.d, dtype=product.bias_dtype or DType.F16), product.batch)
        else:
            self.c = self.d

    @property
    def all(self) -> tuple[int, ...]:
        """The operation and the layouts of A, B, C and D."""
        return self.operation, self.a, self.b, self.c, self.d

    def set_addresses(self, addresses: Mapping[int, int]) -> None:
        """Set the addresses of the bias and of scales. addresses: by uid."""
        for name, uid in self._pointers.items():
            if uid is not None:
                self._set_operation(name, np.uint64(addresses[uid]))

    def _set_operation(self, name: int, value: np.generic) -> None:
        self._lt.set_attribute("MatmulDesc", self.operation, name, value)

    def _layout(self, matrices: Matrices, batch: int) -> int:
        layout = self._create("MatrixLayout", _TYPES[matrices.dtype], matrices.rows, matrices.columns, matrices.ld)
        names = MatrixLayoutAttribute
        self._lt.set_attribute("MatrixLayout", layout, names.BATCH_COUNT, np.int32(batch))
        self._lt.set_attribute("MatrixLayout", layout, names.STRIDED_BATCH_OFFSET, np.int64(matrices.step))
        return layout

    def _create(self, kind: str, *arguments: int) -> int:
        created = self._lt.create(kind, *arguments)
        weakref.finalize(self, self._lt.call, f"{kind}Destroy", created)
        return created
