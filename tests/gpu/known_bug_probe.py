"""Run one graph that `known_bugs` refuses on the GPU, unguarded, and print its error against the simulator.

A script of its own: some of these graphs fault and take the CUDA context with them.
Usage: python known_bug_probe.py conv|pointwise DIMS OPERAND_DIMS, dims joined by commas.
"""

from __future__ import annotations

import sys

import numpy as np
from plan_check import compare

from fusec.gpu.backend import CudnnBackend
from fusec.ir import DType, TensorType, channels_last
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor


def graph(kind: str, dims: tuple[int, ...], operand: tuple[int, ...]) -> CudnnGraph:
    """A tensor of `dims` (made by a 3x3 convolution, or given) times a broadcast operand."""

    def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
        order = channels_last(len(shape)) if len(shape) > 3 else ()
        return TensorType(shape, DType.F32, order).strides

    half, fp32 = DType.F16, DType.F32
    tensors = [CudnnTensor(1, dims, strides(dims), half), CudnnTensor(2, operand, strides(operand), half)]
    calls: list[CudnnCall] = []
    source = 1
    if kind == "conv":
        weight = (dims[1], dims[1], 3, 3)
        tensors.append(CudnnTensor(3, weight, strides(weight), half))
        tensors.append(CudnnTensor(4, dims, strides(dims), fp32, virtual=True))
        window = (("pre_padding", (1, 1)), ("post_padding", (1, 1)), ("stride", (1, 1)), ("dilation", (1, 1)))
        calls.append(CudnnCall("conv_fprop", (1, 3), (4,), "", window))
        source = 4
    tensors.append(CudnnTensor(5, dims, strides(dims), half))
    calls.append(CudnnCall("pointwise", (source, 2), (5,), "mul"))
    return CudnnGraph(tuple(tensors), tuple(calls))


if __name__ == "__main__":
    dims, operand = (tuple(int(d) for d in text.split(",")) for text in sys.argv[2:])
    checked = compare(CudnnBackend("none"), graph(sys.argv[1], dims, operand), np.random.default_rng(0))
    print(checked.error)
