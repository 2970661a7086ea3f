"""Map fusec's dtypes to the element types of ONNX, for the exporter and for the front end."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import TensorProto

from fusec.ir import DType

ELEMENT_TYPES: Mapping[DType, int] = {
    DType.F64: TensorProto.DOUBLE,
    DType.F32: TensorProto.FLOAT,
    DType.F16: TensorProto.FLOAT16,
    DType.BF16: TensorProto.BFLOAT16,
    DType.I64: TensorProto.INT64,
    DType.I32: TensorProto.INT32,
    DType.I16: TensorProto.INT16,
    DType.I8: TensorProto.INT8,
    DType.U64: TensorProto.UINT64,
    DType.U32: TensorProto.UINT32,
    DType.U16: TensorProto.UINT16,
    DType.U8: TensorProto.UINT8,
    DType.BOOL: TensorProto.BOOL,
    DType.F8E4M3: TensorProto.FLOAT8E4M3FN,
    DType.F8E4M3FNUZ: TensorProto.FLOAT8E4M3FNUZ,
    DType.F8E5M2: TensorProto.FLOAT8E5M2,
    DType.F8E5M2FNUZ: TensorProto.FLOAT8E5M2FNUZ,
    DType.F8E8M0: TensorProto.FLOAT8E8M0,
    DType.F4E2M1: TensorProto.FLOAT4E2M1,
    DType.I4: TensorProto.INT4,
    DType.U4: TensorProto.UINT4,
    DType.I2: TensorProto.INT2,
    DType.U2: TensorProto.UINT2,
    DType.STRING: TensorProto.STRING,
}
