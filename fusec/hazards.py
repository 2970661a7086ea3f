"""Graphs that cuDNN accepts and computes wrongly: known by measurement, refused before they are asked for.

Measured on an H200 with cuDNN 9.19, every plan executed and compared (tests/gpu/test_hazards.py does it
again): broadcast operands beyond the forms below gave wrong numbers or a misaligned-address fault, and
boolean tensors in memory were not read as bytes.
"""

from __future__ import annotations

from fusec.cudnn_graph import CudnnGraph, CudnnTensor
from fusec.ir import DType

_PRODUCTS = ("conv_fprop", "conv_dgrad")


def misread(graph: CudnnGraph) -> str | None:
    """Why cuDNN would compute this graph wrongly, or None if no known case applies."""
    for tensor in graph.tensors:
        if tensor.dtype is DType.BOOL and not tensor.virtual and tensor.value is None:
            return "a boolean tensor in memory: cuDNN does not read it as one byte per element"
    convolution = any(c.op in _PRODUCTS for c in graph.calls)
    matrix = any(c.op == "matmul" for c in graph.calls)
    for call in graph.calls:
        if call.op != "pointwise":
            continue
        result = graph.tensor(call.outputs[0])
        for uid in call.inputs:
            operand = graph.tensor(uid)
            if operand.value is not None:
                continue
            if convolution and not _rows_or_columns(operand, result):
                return (
                    f"a convolution's epilogue with an operand {list(operand.dims)} for {list(result.dims)}: only "
                    "full, per-channel and per-pixel operands are computed right"
                )
            if not convolution and not matrix and two_of_three(operand.dims, result.dims):
                return (
                    f"an operand {list(operand.dims)} broadcast along two dims of {list(result.dims)}: a pointwise "
                    "graph of rank 3 computes it wrongly"
                )
    return None


def _wide(result: tuple[int, ...]) -> list[int]:
    return [axis for axis, size in enumerate(result) if size != 1]


def _rows_or_columns(operand: CudnnTensor, result: CudnnTensor) -> bool:
    """Whether an operand is full, one element, per channel (1,C,1,1) or per pixel (N,1,H,W)."""
    wide = _wide(result.dims)
    full = [axis for axis in wide if operand.dims[axis] != 1]
    return not full or full == wide or full == [1] or full == [axis for axis in wide if axis != 1]


def two_of_three(operand: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether an operand is broadcast along exactly two of three dims that are not 1."""
    wide = _wide(result)
    return len(wide) == 3 and sum(operand[axis] == 1 for axis in wide) == 2
