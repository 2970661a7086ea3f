"""Test graphs that fusec never asks cuDNN about, each with a similar one that is. cuDNN would crash or be wrong."""

from __future__ import annotations

import dataclasses

import pytest
from gpu.cudnn_graphs import conv, conv_feeding_matmul, image, matmul, matrix, norm, pointwise

from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor
from fusec.lowering.known_bugs import deadly


def replaced(graph: CudnnGraph, uid: int, **changes: object) -> CudnnGraph:
    tensors = tuple(dataclasses.replace(t, **changes) if t.uid == uid else t for t in graph.tensors)
    return dataclasses.replace(graph, tensors=tensors)


def weights(dims: tuple[int, ...]) -> CudnnGraph:
    return replaced(conv("bias", "relu"), 2, dims=dims)


def reduction(result: tuple[int, ...]) -> CudnnGraph:
    tensors = (image(1, (64, 128, 1, 1)), image(2, result, DType.F32))
    return CudnnGraph(tensors, (CudnnCall("reduction", (1,), (2,), "add"),))


RELU = pointwise("relu", (1, 8, 64))
BIG = (2**15, 2**8, 2**8)
CASES = {
    "conv feeds matmul": (conv_feeding_matmul(), matmul((1, 8, 64), (1, 64, 4), (1, 8, 4)), "feeds a matmul"),
    "empty matmul": (matmul((1, 0, 64), (1, 64, 4), (1, 0, 4)), matmul((1, 1, 64), (1, 64, 4), (1, 1, 4)), "size zero"),
    "empty pointwise": (pointwise("relu", (1, 0, 64), result=(1, 0, 64)), RELU, "size zero"),
    "filters of no whole group": (weights((64, 48, 3, 3)), weights((64, 32, 3, 3)), "no whole number of groups"),
    "filters not shared by the groups": (weights((63, 16, 3, 3)), weights((64, 16, 3, 3)), "no whole number of groups"),
    "more filter channels than the image": (weights((64, 128, 3, 3)), conv("bias", "relu"), "no whole number"),
    "result smaller": (pointwise("relu", (2, 8, 64)), pointwise("relu", (2, 8, 64), result=(2, 8, 64)), "operand"),
    "result larger": (pointwise("relu", (1, 8, 64), result=(2, 8, 64)), RELU, "larger than its operands"),
    "ranks differ": (pointwise("add", (1, 8, 64), (64,)), pointwise("add", (1, 8, 64), (1, 1, 64)), "operand"),
    "reduction to another size": (reduction((64, 64, 1, 1)), reduction((64, 1, 1, 1)), "a reduction of"),
    "instance norm of other channels": (
        norm("instancenorm", (8, 16, 8, 8), (1, 8, 1, 1)),
        norm("instancenorm", (8, 16, 8, 8), (1, 16, 1, 1)),
        "instance norm",
    ),
    "output overlaps itself": (
        replaced(RELU, 2, strides=(512, 32, 1)),
        replaced(RELU, 2, strides=(1024, 128, 1)),
        "share memory",
    ),
    "negative strides": (replaced(RELU, 1, strides=(512, 64, -1)), RELU, "negative strides"),
    "no output": (replaced(RELU, 2, virtual=True), RELU, "no output"),
    "2^31 elements": (
        pointwise("relu", BIG, result=BIG),
        pointwise("relu", (2**15, 2**8, 2**7), result=(2**15, 2**8, 2**7)),
        "32 bits",
    ),
    "one uid twice": (
        CudnnGraph((matrix(1, (1, 8, 64)), *RELU.tensors), RELU.calls),
        RELU,
        "one uid",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_guard_trips_on_the_case_and_not_on_its_sibling(name: str) -> None:
    bad, good, words = CASES[name]
    reason = deadly(bad)
    assert reason is not None
    assert words in reason
    assert deadly(good) is None


def test_size_one_dims_may_have_any_stride_in_an_output() -> None:
    one = CudnnTensor(2, (1, 8, 64), (1, 64, 1), DType.F16)
    assert deadly(CudnnGraph((RELU.tensors[0], one), RELU.calls)) is None


def prologue(strides: tuple[int, ...]) -> CudnnGraph:
    """A convolution that reads a cast of its image."""
    plain = conv("bias", "relu")
    uid = max(t.uid for t in plain.tensors) + 1
    source = dataclasses.replace(plain.tensor(1), uid=uid, dtype=DType.F32, strides=strides)
    tensors = (*replaced(plain, 1, virtual=True).tensors, source)
    return CudnnGraph(tensors, (CudnnCall("pointwise", (uid,), (1,), "identity"), *plain.calls))


def test_a_cast_that_also_reorders_before_a_convolution() -> None:
    """On an H200 its kernel did not end; from channels last it is right."""
    _, channels, height, width = conv("bias", "relu").tensor(1).dims
    row_major = (channels * height * width, height * width, width, 1)
    assert "not stored channels last" in (deadly(prologue(row_major)) or "")
    assert deadly(prologue(conv("bias", "relu").tensor(1).strides)) is None
