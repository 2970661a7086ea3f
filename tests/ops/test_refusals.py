"""Test the operands and attributes that inference refuses, op by op, with the messages."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fusec.errors import VerifyError
from fusec.ir import DType, Op, TensorType
from fusec.ops import (
    ALL,
    AllFinite,
    Attention,
    AttentionBackward,
    AttentionTrain,
    AvgPool,
    BatchNorm,
    BatchNormBackward,
    BatchNormBySums,
    BatchNormTrain,
    Cast,
    ChannelSums,
    Concat,
    Conv,
    ConvTranspose,
    ConvWgrad,
    Cumulate,
    Expand,
    Gather,
    GridSample,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LayerNormBackward,
    LocalResponseNorm,
    MatMul,
    MaxPool,
    MaxPoolBackward,
    PackedMatMul,
    Pad,
    RandomBits,
    Recurrent,
    Reduce,
    Relayout,
    Reshape,
    Resize,
    RmsNorm,
    RoiAlign,
    RoiPool,
    Rotary,
    Scatter,
    Slice,
    Softmax,
    Split,
    TopK,
    Transpose,
    pw,
)


def types(text: str) -> list[TensorType]:
    """`f32[2,3] i64[]` -> two types."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", text)
    return [TensorType(tuple(map(int, filter(None, dims.split(",")))), DType(dtype)) for dtype, dims in found]


def conv(strides: Any = (1, 1), pads: Any = (0,) * 4, dilations: Any = (1, 1), groups: int = 1) -> Conv:
    return Conv(strides, pads, dilations, groups)


def transposed(extra: Any = (0, 0), groups: int = 1, pads: Any = (0,) * 4) -> ConvTranspose:
    return ConvTranspose((1, 1), pads, (1, 1), extra, groups)


def wgrad(window: Any = (3, 3), groups: int = 1) -> ConvWgrad:
    return ConvWgrad(window, (1, 1), (0,) * 4, (1, 1), groups)


def unpool() -> MaxPoolBackward:
    return MaxPoolBackward((2, 2), (1, 1), (0,) * 4, (1, 1))


def pool(window: Any = (2, 2), pads: Any = (0,) * 4, strides: Any = (1, 1)) -> MaxPool:
    return MaxPool(window, strides, pads, (1, 1))


def resize(sizes: Any = (1, 4), scales: Any = (1.0, 2.0), **other: str) -> Resize:
    return Resize(sizes, scales, **other)


REFUSALS: list[tuple[Op, str, str]] = [
    # pointwise
    (pw("add"), "f32[2]", "add takes 2 operands, not 1"),
    (pw("relu"), "", "relu takes 1 operands, not 0"),
    (pw("add"), "f32[2] f16[2]", "operands differ in dtype: f32, f16"),
    (pw("add"), "f32[2,3] f32[2]", "shapes [2, 3], [2] do not broadcast"),
    (pw("add"), "f32[0] f32[2]", "shapes [0], [2] do not broadcast"),
    (pw("exp"), "i32[2]", "exp takes floating-point operands, not i32"),
    (pw("is_nan"), "i32[2]", "is_nan takes floating-point operands, not i32"),
    (pw("abs"), "bool[2]", "abs takes numbers, not bool"),
    (pw("logical_and"), "f32[2] f32[2]", "logical_and takes bools, not f32"),
    (pw("cmp_lt"), "f8e4m3[2] f8e4m3[2]", "cmp_lt does not compare f8e4m3"),
    (pw("where"), "f32[2] f32[2] f32[2]", "the condition is f32, not bool"),
    (pw("where"), "bool[2] f32[2] f64[2]", "operands differ in dtype: bool, f32, f64"),
    (pw("gen_index", axis=2), "f32[2,3]", "axis 2 is out of range for rank 2"),
    (pw("gen_index", axis=-1), "f32[2,3]", "axis -1 is out of range for rank 2"),
    (pw("clip", min=float("nan")), "f32[2]", "clip: min is NaN"),
    (Cast(DType.F16), "f32[2] f32[2]", "cast takes 1 operands, not 2"),
    # windows
    (conv(), "f32[1,2,5,5]", "conv takes 2 operands, not 1"),
    (conv(), "i32[1,2,5,5] i32[2,2,3,3]", "conv takes floating-point or i8 operands, not i32"),
    (conv(), "f32[1,2,5,5] f16[2,2,3,3]", "operands differ in dtype: f32, f16"),
    (conv(), "f32[1,2] f32[2,2]", "conv takes 1 to 3 spatial dims, x has shape [1, 2]"),
    (conv(), "f32[1,2,1,1,1,1] f32[2,2,1,1,1,1]", "conv takes 1 to 3 spatial dims, x has shape [1, 2, 1, 1, 1, 1]"),
    (conv(), "f32[1,2,5,5] f32[2,2,3]", "weight has rank 3, x rank 4"),
    (conv(strides=(1,)), "f32[1,2,5,5] f32[2,2,3,3]", "strides needs 2 entries, not 1"),
    (conv(strides=(1, 0)), "f32[1,2,5,5] f32[2,2,3,3]", "strides must be positive: [1, 0]"),
    (conv(dilations=(1,)), "f32[1,2,5,5] f32[2,2,3,3]", "dilations needs 2 entries, not 1"),
    (conv(dilations=(0, 1)), "f32[1,2,5,5] f32[2,2,3,3]", "dilations must be positive: [0, 1]"),
    (conv(pads=(1, 1)), "f32[1,2,5,5] f32[2,2,3,3]", "pads needs 4 entries, not 2"),
    (conv(pads=(1, 1, -1, 0)), "f32[1,2,5,5] f32[2,2,3,3]", "conv: negative pads [1, 1, -1, 0]"),
    (conv(groups=0), "f32[1,2,5,5] f32[2,2,3,3]", "groups is 0"),
    (conv(), "f32[1,3,5,5] f32[2,4,3,3]", "weight takes 4 channels, x has 3 (groups=1)"),
    (conv(groups=2), "f32[1,4,5,5] f32[3,2,3,3]", "3 filters do not divide into 2 groups"),
    (conv(), "f32[1,2,2,5] f32[2,2,3,3]", "a window of 3 (dilation 1) does not fit 2 padded by 0+0"),
    (conv(), "f32[1,2,5,5] f32[2,2,0,3]", "a window of 0 (dilation 1) does not fit 5 padded by 0+0"),
    (transposed(), "f32[1,2,5,5]", "conv_transpose takes 2 operands, not 1"),
    (transposed(), "i8[1,2,5,5] i8[2,2,3,3]", "conv_transpose takes floating-point operands, not i8"),
    (transposed(), "f32[1,2] f32[2,2]", "conv_transpose takes 1 to 3 spatial dims, x has shape [1, 2]"),
    (transposed((0,)), "f32[1,2,5,5] f32[2,2,3,3]", "output_padding needs 2 entries, not 1"),
    (transposed((-1, 0)), "f32[1,2,5,5] f32[2,2,3,3]", "negative output_padding (-1, 0)"),
    (transposed(groups=3), "f32[1,4,5,5] f32[4,2,3,3]", "groups=3 with 4 channels"),
    (transposed(), "f32[1,4,5,5] f32[2,2,3,3]", "weight takes 2 channels, x has 4"),
    (transposed(), "f32[1,2,0,5] f32[2,2,3,3]", "empty window or image: [2, 2, 3, 3] over [1, 2, 0, 5]"),
    (transposed(pads=(3, 0, 2, 0)), "f32[1,2,3,3] f32[2,2,3,3]", "the pads leave nothing of the output: [0, 5]"),
    (pool(), "f32[1,2,5,5] f32[1]", "max_pool takes 1 operands, not 2"),
    (pool(), "bool[1,2,5,5]", "max_pool takes numbers, not bool"),
    (pool(), "f32[1,2]", "max_pool takes 1 to 3 spatial dims, x has shape [1, 2]"),
    (pool((2,)), "f32[1,2,5,5]", "window [2] for 2 dims"),
    (pool((2, 0)), "f32[1,2,5,5]", "window [2, 0] for 2 dims"),
    (pool(pads=(2, 0, 0, 0)), "f32[1,2,5,5]", "a pad of 2 is as large as the window 2 (dilation 1)"),
    (pool(pads=(-1, 0, 0, 0)), "f32[1,2,5,5]", "max_pool: negative pads [-1, 0, 0, 0]"),
    (pool(strides=(0, 1)), "f32[1,2,5,5]", "strides must be positive: [0, 1]"),
    (pool(), "f32[1,2,5,1]", "a window of 2 (dilation 1) does not fit 1 padded by 0+0"),
    (AvgPool((2,), (1,), (0, 0), (1,)), "", "avg_pool takes 1 operands, not 0"),
    (AvgPool((2,), (1,), (0, 0), (1,)), "i8[1,2,5]", "avg_pool takes floating-point operands, not i8"),
    # products and norms
    (MatMul(), "f32[2,3]", "matmul takes 2 operands, not 1"),
    (PackedMatMul(2), "f32[2,3] i4[5,3]", "packed_matmul takes 3 or 4 operands, not 2"),
    (PackedMatMul(2), "i8[2,3] i4[5,3] f32[5,2]", "packed_matmul takes floats of rank 2 or more, not i8[2,3]"),
    (PackedMatMul(2), "f32[3] i4[5,3] f32[5,2]", "packed_matmul takes floats of rank 2 or more, not f32[3]"),
    (PackedMatMul(2), "f32[2,3] i16[5,3] f32[5,2]", "codes i16[5,3] are no matrix of integers of 4 or 8 bits"),
    (PackedMatMul(2), "f32[2,3] i4[5,4] f32[5,2]", "inner dims differ: [2, 3] and codes [5, 4]"),
    (PackedMatMul(0), "f32[2,3] i4[5,3] f32[5,2]", "blocks of 0"),
    (PackedMatMul(2), "f32[2,3] i4[5,3] f32[5,3]", "scales f32[5,3], not [5, 2] floats"),
    (PackedMatMul(2), "f32[2,3] i4[5,3] f32[5,2] u4[5,2]", "zeros u4[5,2] for codes i4[5,3]"),
    (MatMul(), "u8[2,3] u8[3,2]", "matmul takes floats, i8, f8e4m3 or integers of 32 or 64 bits, not u8"),
    (MatMul(), "i32[2,3] i64[3,2]", "operands differ in dtype: i32, i64"),
    (MatMul(), "f32[3] f32[3,2]", "operands have shapes [3] and [3, 2]"),
    (MatMul(), "f32[2,3] f32[2,3]", "inner dims differ: [2, 3] and [2, 3]"),
    (MatMul(), "f32[2,1,3] f32[3,3,1]", "shapes [2], [3] do not broadcast"),
    (Attention(), "f32[1,2,3,4] f32[1,2,3,4]", "attention takes 3 to 4 operands, not 2"),
    (Attention(), "f32[2,3,4] f32[2,3,4] f32[2,3,4]", "attention: q has shape [2, 3, 4], not four dims"),
    (Attention(), "f32[2,1,3,4] f32[1,1,3,4] f32[1,1,3,4]", "attention: batches of 2, 1 and 1"),
    (Attention(), "f32[1,1,3,4] f32[1,1,3,5] f32[1,1,3,4]", "attention: q has 4 features, k has 5"),
    (Attention(), "f32[1,2,3,4] f32[1,2,3,4] f32[1,1,3,4]", "attention: k has shape [1, 2, 3, 4], v [1, 1, 3, 4]"),
    (Attention(), "f32[1,3,3,4] f32[1,2,3,4] f32[1,2,3,4]", "attention: 3 heads of q do not divide among 2 of k and v"),
    (
        Attention(),
        "f32[1,1,3,4] f32[1,1,5,4] f32[1,1,5,4] f32[5,3]",
        "attention: a bias of shape [5, 3] for scores [1, 1, 3, 5]",
    ),
    (Attention(), "i32[1,1,3,4] i32[1,1,3,4] i32[1,1,3,4]", "attention takes floating-point operands, not i32"),
    (Attention(), "f32[1,1,3,4] f32[1,1,3,4] f32[1,1,3,4] f16[3,3]", "operands differ in dtype: f32, f32, f32, f16"),
    (Rotary(), "f32[2,4]", "rotary takes 3 operands, not 1"),
    (Rotary(), "f32[2,4] f16[2,4] f32[2,4]", "operands differ in dtype: f32, f16, f32"),
    (Rotary(), "f32[2,3] f32[2,3] f32[2,3]", "rotary: x has shape [2, 3], not two halves"),
    (Rotary(), "f32[2,4] f32[2,4] f32[3,4]", "rotary: [3, 4] does not broadcast to [2, 4]"),
    (BatchNorm(), "f32[1,2,3]", "batch_norm takes 5 operands, not 1"),
    (BatchNorm(), "f32[1,2] f32[2] f32[2] f32[3] f32[2]", "batch_norm: parameter of shape [3] for 2 channels"),
    (BatchNorm(), "f32[2] f32[2] f32[2] f32[2] f32[2]", "batch_norm needs a channel dim, x has shape [2]"),
    (InstanceNorm(), "f32[1,2] f32[2] f32[2]", "instance_norm needs spatial dims, x has shape [1, 2]"),
    (InstanceNorm(), "f32[1,2,3] f32[2]", "instance_norm takes 3 operands, not 2"),
    (GroupNorm(2), "f32[1,4,2] f32[4]", "group_norm takes 3 operands, not 2"),
    (GroupNorm(3), "f32[1,4,2] f32[4] f32[4]", "4 channels do not divide into 3 groups"),
    (GroupNorm(0), "f32[1,4,2] f32[4] f32[4]", "4 channels do not divide into 0 groups"),
    (GroupNorm(2), "f16[1,4,2] f32[4] f32[4]", "operands differ in dtype: f16, f32, f32"),
    (LayerNorm(), "f32[2,3]", "layer_norm takes 2 to 3 operands, not 1"),
    (LayerNorm(2), "f32[2,3] f32[3]", "axis 2 is out of range for rank 2"),
    (LayerNorm(), "f32[2,3] f32[2]", "layer_norm: parameter of shape [2] for normalised dims [3]"),
    (LayerNorm(), "f32[2,3] f32[2,3]", "layer_norm: parameter of shape [2, 3] for normalised dims [3]"),
    (LayerNorm(), "i32[2,3] i32[3]", "layer_norm takes floating-point operands, not i32"),
    (RmsNorm(), "f32[2,3]", "rms_norm takes 2 operands, not 1"),
    (RmsNorm(-3), "f32[2,3] f32[3]", "axis -3 is out of range for rank 2"),
    (LocalResponseNorm(3), "f32[3]", "lrn needs a channel dim, x has shape [3]"),
    (LocalResponseNorm(0), "f32[1,3]", "lrn: size is 0"),
    (LocalResponseNorm(3), "i32[1,3]", "lrn takes floating-point operands, not i32"),
    (LocalResponseNorm(3), "f32[1,3] f32[1,3]", "lrn takes 1 operands, not 2"),
    # reductions
    (Reduce("sum", (0,)), "f32[2] f32[2]", "reduce takes 1 operands, not 2"),
    (Reduce("median", (0,)), "f32[2]", "reduce knows no kind 'median'"),
    (Reduce("l2", (0,)), "i32[2]", "reduce l2 takes floating-point operands, not i32"),
    (Reduce("sum", (0,)), "bool[2]", "reduce takes numbers, not bool"),
    (Reduce("sum", (1, 0)), "f32[2,2]", "axes [1, 0] are not ascending"),
    (Reduce("sum", (0, 0)), "f32[2,2]", "axes [0, 0] are not ascending"),
    (Reduce("sum", (2,)), "f32[2,2]", "axes [2] for rank 2"),
    (Reduce("sum", (-1,)), "f32[2,2]", "axes [-1] for rank 2"),
    (Reduce("max", (1,)), "f32[2,0]", "max over an empty dim"),
    (Reduce("log_sum_exp", (1,)), "f32[2,0]", "log_sum_exp over an empty dim"),
    (Softmax(), "f32[2] f32[2]", "softmax takes 1 operands, not 2"),
    (Softmax(), "i32[2]", "softmax takes floating-point operands, not i32"),
    (Softmax(), "f32[]", "axis -1 is out of range for rank 0"),
    # moves
    (Reshape((2, 4)), "f32[2,3]", "[2, 3] has 6 elements, [2, 4] 8"),
    (Reshape((1,) * 65), "f32[1]", "a shape of 65 dims; 64 is the most"),
    (Reshape((-2, -3)), "f32[2,3]", "negative dimension in shape [-2, -3]"),
    (Reshape((1,)), "", "reshape takes 1 operands, not 0"),
    (Transpose((0, 0)), "f32[2] f32[2]", "transpose takes 1 operands, not 2"),
    (Transpose((0, 0)), "f32[2,3]", "perm [0, 0] does not permute 2 dims"),
    (Transpose((0,)), "f32[2,3]", "perm [0] does not permute 2 dims"),
    (Relayout((0, 2)), "f32[2] f32[2]", "relayout takes 1 operands, not 2"),
    (Relayout((0, 2)), "f32[2,3]", "memory order (0, 2) does not permute 2 dims"),
    (Expand((2, 3)), "f32[3,1]", "[3, 1] does not expand to [2, 3]"),
    (Expand((3,)), "f32[2] f32[2]", "expand takes 1 operands, not 2"),
    (Expand((3,)), "f32[2,3]", "[2, 3] does not expand to [3]"),
    (Concat(0), "", "concat needs an operand"),
    (Concat(1), "f32[2]", "axis 1 is out of range for rank 1"),
    (Concat(0), "f32[2] f16[2]", "operands differ in dtype: f32 and f16"),
    (Concat(0), "f32[2,3] f32[2,4]", "[2, 3] and [2, 4] do not join along axis 0"),
    (Concat(0), "f32[2,3] f32[2]", "[2, 3] and [2] do not join along axis 0"),
    (Split(0, ()), "f32[2] f32[2]", "split takes 1 operands, not 2"),
    (Split(0, ()), "f32[2]", "sizes []"),
    (Split(0, (3, -1)), "f32[2]", "sizes [3, -1]"),
    (Split(0, (1, 2)), "f32[2]", "sizes [1, 2] do not add up to 2 of axis 0"),
    (Split(1, (2,)), "f32[2]", "axis 1 is out of range for rank 1"),
    (Slice((0,), (1,), (1,)), "f32[2] f32[2]", "slice takes 1 operands, not 2"),
    (Slice((0,), (1,), (1,)), "f32[2,3]", "starts, sizes and steps need 2 entries each"),
    (Slice((0,), (1,), (0,)), "f32[2]", "size 1, step 0"),
    (Slice((0,), (-1,), (1,)), "f32[2]", "size -1, step 1"),
    (Slice((1,), (2,), (1,)), "f32[2]", "elements 1..2 of a dim of 2"),
    (Slice((1,), (3,), (-1,)), "f32[2]", "elements 1..-1 of a dim of 2"),
    (Slice((-1,), (1,), (1,)), "f32[2]", "elements -1..-1 of a dim of 2"),
    (Pad((1, 1), "mirror"), "f32[2]", "pad knows no mode 'mirror'"),
    (Pad((1,)), "f32[2] f32[2]", "pad takes 1 operands, not 2"),
    (Pad((1,)), "f32[2]", "pads needs 2 entries, not 1"),
    (Pad((1, -1)), "f32[2]", "negative pads [1, -1]: slice instead"),
    (Pad((1, 0), "edge"), "f32[0]", "edge padding of an empty dim"),
    (Pad((0, 2), "reflect"), "f32[2]", "reflecting 2 of a dim of 2"),
    (Pad((1, 1), "constant", 300.0), "i8[2]", "i8 does not hold the value 300.0"),
    (Pad((1, 1), "constant", 0.5), "i8[2]", "i8 does not hold the value 0.5"),
    (Pad((1, 1), "constant", float("nan")), "i8[2]", "i8 does not hold the value nan"),
    (Pad((1, 1), "constant", 2.0), "bool[2]", "bool does not hold the value 2.0"),
    (GridSample(), "f32[1,2,3,3]", "grid_sample takes 2 operands, not 1"),
    (GridSample(), "f32[1,2,3,3] i64[1,4,4,2]", "grid_sample takes floating-point operands, not i64"),
    (GridSample("area"), "f32[1,2,3,3] f32[1,4,4,2]", "grid_sample knows no mode 'area'"),
    (GridSample(padding="wrap"), "f32[1,2,3,3] f32[1,4,4,2]", "grid_sample knows no padding 'wrap'"),
    (GridSample(coordinates="corners"), "f32[1,2,3,3] f32[1,4,4,2]", "knows no coordinates 'corners'"),
    (GridSample(), "i32[1,2,3,3] f32[1,4,4,2]", "grid_sample of i32"),
    (GridSample(), "f32[1,2,0,3] f32[1,4,4,2]", "grid_sample takes images [N, C, spatial…], not f32[1,2,0,3]"),
    (GridSample(), "f32[1,2,3,3] f32[1,4,4,3]", "grid f32[1,4,4,3] for x f32[1,2,3,3]"),
    (RoiAlign((1, 1), 1), "f32[1,2,3,3] f32[2,4]", "roi_align takes 3 operands, not 2"),
    (RoiAlign((1, 1), 1), "i32[1,2,3,3] f32[2,4] i64[2]", "roi_align takes floating-point operands, not i32"),
    (RoiAlign((1, 1), 1), "f32[1,2,3,3] i32[2,4] i64[2]", "roi_align takes floating-point operands, not i32"),
    (RoiAlign((1, 1), 1, "sum"), "f32[1,2,3,3] f32[2,4] i64[2]", "roi_align knows no mode 'sum'"),
    (RoiAlign((1, 1), 1), "f32[1,2,3] f32[2,4] i64[2]", "roi_align takes images [N, C, H, W], not f32[1,2,3]"),
    (RoiAlign((1, 1), 1), "f32[1,2,3,3] f32[2,5] i64[2]", "rois f32[2,5] for f32[1,2,3,3]"),
    (RoiAlign((1, 1), 1), "f32[1,2,3,3] f32[2,4] i64[3]", "batches i64[3] for rois f32[2,4]"),
    (RoiAlign((1, 0), 1), "f32[1,2,3,3] f32[2,4] i64[2]", "1x0 bins of 1x1 samples"),
    (RoiAlign((1, 1), -1), "f32[1,2,3,3] f32[2,4] i64[2]", "1x1 bins of -1x-1 samples"),
    (RoiPool((1, 1)), "f32[1,2,3,3] f32[2,4]", "roi_pool takes 3 operands, not 2"),
    (RoiPool((1, 1)), "i32[1,2,3,3] f32[2,4] i64[2]", "roi_pool takes floating-point operands, not i32"),
    (RoiPool((1, 0)), "f32[1,2,3,3] f32[2,4] i64[2]", "1x0 bins"),
    (Gather(), "f32[2]", "gather takes 2 operands, not 1"),
    (Gather(), "f32[2] f32[1]", "indices are f32, not integers"),
    (Gather(), "f32[0] i64[1]", "gather from an empty dim"),
    (Gather(1), "f32[2] i64[1]", "axis 1 is out of range for rank 1"),
    (resize((1,)), "f32[2] f32[2]", "resize takes 1 operands, not 2"),
    (resize((1,)), "f32[1,2]", "sizes and scales need 2 entries each"),
    (resize((1, 6)), "f32[1,2]", "2 scaled by 2.0 is not 6"),
    (resize((1, 0)), "f32[1,2]", "resize [1, 2] to [1, 0]"),
    (resize(), "f32[1,0]", "resize [1, 0] to [1, 4]"),
    (resize(scales=(1.0, 0.0)), "f32[1,2]", "scales [1.0, 0.0]"),
    (resize(scales=(1.0, float("inf"))), "f32[1,2]", "scales [1.0, inf]"),
    (resize(mode="cubic"), "f32[1,2]", "resize knows no mode 'cubic'"),
    (resize(mode="linear"), "i8[1,2]", "linear resize of i8"),
    (resize(coordinates="tf_crop"), "f32[1,2]", "resize knows no coordinate transformation 'tf_crop'"),
    (pw("bitwise_and"), "f32[2] f32[2]", "bitwise_and takes integers, not f32"),
    (pw("shift_left"), "bool[2] bool[2]", "shift_left takes integers, not bool"),
    (TopK(1), "f32[2] f32[2]", "top_k takes 1 operands, not 2"),
    (TopK(3), "f32[2]", "k is 3, axis 0 has 2 elements"),
    (TopK(-1), "f32[2]", "k is -1, axis 0 has 2 elements"),
    (TopK(1, 1), "f32[2]", "axis 1 is out of range for rank 1"),
    (TopK(1), "bool[2]", "top_k takes numbers, not bool"),
    (Scatter(), "f32[2] i64[1]", "scatter takes 3 operands, not 2"),
    (Scatter("sum"), "f32[2] i64[1] f32[1]", "scatter knows no reduction 'sum'"),
    (Scatter(), "f32[] i64[1] f32[1]", "scatter takes no scalars"),
    (Scatter(), "f32[2] f32[1] f32[1]", "indices are f32[1], not a list of integers"),
    (Scatter(), "f32[2] i64[1,1] f32[1]", "indices are i64[1,1], not a list of integers"),
    (Scatter(), "f32[2] i64[1] f16[1]", "operands differ in dtype: f32, f16"),
    (Scatter("add"), "bool[2] i64[1] bool[1]", "scatter add takes numbers, not bool"),
    (Scatter(), "f32[2,3] i64[1] f32[1,2]", "updates of shape [1, 2], not [1, 3]"),
    (Scatter(), "f32[0] i64[1] f32[1]", "scatter into an empty dim"),
    (Cumulate("sum", 0), "f32[2] f32[2]", "cumulate takes 1 operands, not 2"),
    (Cumulate("mean", 0), "f32[2]", "cumulate knows no kind 'mean'"),
    (Cumulate("sum", 1), "f32[2]", "axis 1 is out of range for rank 1"),
    (Cumulate("sum", 0), "bool[2]", "cumulate takes numbers, not bool"),
    (resize(rounding="up"), "f32[1,2]", "resize knows no rounding 'up'"),
    (wgrad(), "f32[1,2,4,4]", "conv_wgrad takes 2 operands, not 1"),
    (wgrad(), "f32[1,2] f32[1,2]", "conv_wgrad takes 1 to 3 spatial dims, x has shape [1, 2]"),
    (wgrad((3,)), "f32[1,2,4,4] f32[1,3,2,2]", "window [3] for 2 dims"),
    (ConvWgrad((3, 3), (1,), (0,) * 4, (1, 1)), "f32[1,2,4,4] f32[1,3,2,2]", "strides needs 2 entries, not 1"),
    (wgrad(), "f32[1,2,4,4] f16[1,3,2,2]", "operands differ in dtype: f32, f16"),
    (wgrad(groups=4), "f32[1,2,4,4] f32[1,4,2,2]", "groups=4 with 2 channels"),
    (wgrad(), "f32[1,2,4,4] f32[1,3,2,3]", "dy has shape [1, 3, 2, 3], the convolution gives [1, K, 2, 2]"),
    (wgrad(groups=2), "f32[1,2,4,4] f32[1,3,2,2]", "3 filters do not divide into 2 groups"),
    (unpool(), "f32[1,2,4,4]", "max_pool_backward takes 2 operands, not 1"),
    (unpool(), "f32[1,2,2,2] f32[1,2,4,4]", "dy has shape [1, 2, 2, 2], pooling x gives [1, 2, 3, 3]"),
    (unpool(), "i32[1,2,3,3] i32[1,2,4,4]", "max_pool_backward takes floating-point operands, not i32"),
    (BatchNormTrain(), "f32[2,3]", "batch_norm_train takes 3 operands, not 1"),
    (BatchNormTrain(), "i8[2,3] f32[3] f32[3]", "batch_norm_train takes floating-point operands, not i8"),
    (BatchNormTrain(), "f32[3] f32[3] f32[3]", "batch_norm_train needs a channel dim, x has shape [3]"),
    (BatchNormTrain(), "f32[0,3] f32[3] f32[3]", "batch_norm_train: statistics of an empty batch [0, 3]"),
    (BatchNormTrain(), "f32[2,3] f32[2] f32[3]", "batch_norm_train: parameter of shape [2] for 3 channels"),
    (BatchNormTrain(), "f32[2,3] f16[3] f16[3]", "batch_norm_train: parameters of f16 with x of f32"),
    (ChannelSums(), "f32[2,3] f32[3]", "channel_sums takes 1 operands, not 2"),
    (ChannelSums(), "i8[2,3]", "channel_sums takes floating-point operands, not i8"),
    (ChannelSums(), "f32[3]", "channel_sums needs a channel dim, x has shape [3]"),
    (ChannelSums(), "f32[0,3]", "channel_sums: statistics of an empty batch [0, 3]"),
    (BatchNormBySums(), "f32[2,3]", "batch_norm_by_sums takes 5 operands, not 1"),
    (
        BatchNormBySums(),
        "f32[2,3] f32[3] f32[2] f32[3] f32[3]",
        "batch_norm_by_sums: parameter of shape [2] for 3 channels",
    ),
    (
        BatchNormBySums(),
        "f32[2,3] f32[3] f32[3] f32[2] f32[3]",
        "batch_norm_by_sums: sums of shape [2] for 3 channels",
    ),
    (
        BatchNormBySums(),
        "f32[2,3] f32[3] f32[3] f32[3] f16[3]",
        "batch_norm_by_sums: sums of f16 with x of f32",
    ),
    (BatchNormBackward(), "f32[2,3]", "batch_norm_backward takes 5 operands, not 1"),
    (BatchNormBackward(True), "f32[2,3]", "batch_norm_backward takes 6 operands, not 1"),
    (
        BatchNormBackward(),
        "f32[2,2] f32[2,3] f32[3] f32[3] f32[3]",
        "dy is f32[2,2], x f32[2,3]",
    ),
    (AttentionTrain(), "f32[1,2,3,4] f32[1,2,3,4]", "attention_train takes 3 to 4 operands, not 2"),
    (AttentionTrain(), "f32[1,1,3,4] f32[1,1,3,5] f32[1,1,3,4]", "attention: q has 4 features, k has 5"),
    (AttentionBackward(), "f32[1,1,3,4]", "attention_backward takes 6 to 7 operands, not 1"),
    (
        AttentionBackward(),
        "f32[1,1,3,8] f32[1,1,3,4] f32[1,1,5,4] f32[1,1,5,8] f32[1,1,3,8] f32[1,1,3]",
        "attention_backward: sums is f32[1,1,3], not f32[1,1,3,1]",
    ),
    (AllFinite(), "", "all_finite takes at least one operand"),
    (AllFinite(), "f32[2] i32[2]", "all_finite takes floating-point operands, not i32"),
    (LayerNormBackward(), "f32[2,3]", "layer_norm_backward takes 3 operands, not 1"),
    (LayerNormBackward(2), "f32[2,3] f32[2,3] f32[3]", "axis 2 is out of range for rank 2"),
    (LayerNormBackward(), "i32[2,3] i32[2,3] i32[3]", "layer_norm_backward takes floating-point operands, not i32"),
    (LayerNormBackward(), "f32[2,2] f32[2,3] f32[3]", "dy is f32[2,2], x f32[2,3]"),
    (
        LayerNormBackward(),
        "f32[2,3] f32[2,3] f32[1]",
        "layer_norm_backward: parameter of shape [1] for normalised dims [3]",
    ),
    (LayerNormBackward(), "f32[0,3] f32[0,3] f32[3]", "layer_norm_backward: statistics of an empty batch [0, 3]"),
    (LayerNormBackward(), "f32[2,3] f32[2,3] f16[3]", "layer_norm_backward: parameters of f16 with x of f32"),
    (RandomBits((2,)), "f32[2] f32[2]", "random_bits takes 1 operands, not 2"),
    (RandomBits((2,)), "i64[2]", "the state is i64[2], not u64[2]"),
    (RandomBits((2,), -1), "u64[2]", "stream is -1"),
    (RandomBits((1 << 34,)), "u64[2]", "random bits of shape [17179869184]: too many for one counter"),
    # recurrent
    (Recurrent("elman"), "f32[4,2,3] f32[1,3,3] f32[1,2,3]", "recurrent: knows no cell 'elman'"),
    (Recurrent("rnn", "both"), "f32[4,2,3] f32[1,3,3] f32[1,2,3]", "recurrent: knows no direction 'both'"),
    (Recurrent("rnn", clip=-1.0), "f32[4,2,3] f32[1,3,3] f32[1,2,3]", "recurrent: clip is -1.0"),
    (Recurrent("rnn", input_forget=True), "f32[4,2,3] f32[1,3,3] f32[1,2,3]", "recurrent: input_forget is for lstm"),
    (
        Recurrent("rnn", linear_before_reset=True),
        "f32[4,2,3] f32[1,3,3] f32[1,2,3]",
        "recurrent: linear_before_reset is for gru",
    ),
    (Recurrent("gru", activations=("tanh",)), "f32[4,2,9] f32[1,9,3] f32[1,2,3]", "recurrent: 1 activations, not 2"),
    (
        Recurrent("rnn", activations=("exp",)),
        "f32[4,2,3] f32[1,3,3] f32[1,2,3]",
        "recurrent: knows no activation 'exp'",
    ),
    (Recurrent("lstm"), "f32[4,2,12] f32[1,12,3] f32[1,2,3]", "recurrent takes 4 to 6 operands, not 3"),
    (
        Recurrent("lstm"),
        "f32[4,2,12] f32[1,12,3] f32[1,2,3] i64[2]",
        "recurrent: lstm has 2 states, not 1",
    ),
    (Recurrent("rnn"), "i32[4,2,3] f32[1,3,3] f32[1,2,3]", "recurrent takes floating-point operands, not i32"),
    (
        Recurrent("rnn"),
        "f32[4,2,3] f32[3,3] f32[1,2,3]",
        "recurrent: x is f32[4,2,3], r is f32[3,3]; both need three dims",
    ),
    (
        Recurrent("rnn"),
        "f32[4,2,4] f32[1,3,3] f32[1,2,3]",
        "recurrent: x has shape [4, 2, 4], not [4, 2, 3] (1 directions of 1 gates)",
    ),
    (
        Recurrent("gru", "bidirectional"),
        "f32[4,2,18] f32[1,9,3] f32[1,2,3]",
        "recurrent: r has shape [1, 9, 3], not [2, 9, 3] (2 directions of 3 gates)",
    ),
    (
        Recurrent("rnn"),
        "f32[4,2,3] f32[1,3,3] f32[1,3,3]",
        "recurrent: h has shape [1, 3, 3], not [1, 2, 3] (1 directions of 1 gates)",
    ),
    (
        Recurrent("gru"),
        "f32[4,2,9] f32[1,9,3] f32[1,2,3] f32[1,3]",
        "recurrent: gru takes no parameter f32[1,3]",
    ),
    (
        Recurrent("lstm"),
        "f32[4,2,12] f32[1,12,3] f32[1,2,3] f32[1,2,3] f32[1,3]",
        "recurrent: the parameter has shape [1, 3], not [1, 9] (1 directions of 4 gates)",
    ),
    (Recurrent("rnn"), "f32[4,2,3] f32[1,3,3] f32[1,2,3] u8[2]", "recurrent: lengths of u8"),
    (
        Recurrent("rnn"),
        "f32[4,2,3] f32[1,3,3] f32[1,2,3] i64[3]",
        "recurrent: lengths has shape [3], not [2] (1 directions of 1 gates)",
    ),
]


@pytest.mark.parametrize(("op", "operands", "message"), REFUSALS, ids=[f"{op.name}: {m}" for op, _, m in REFUSALS])
def test_refusal(op: Op, operands: str, message: str) -> None:
    with pytest.raises(VerifyError, match=f"^{re.escape(message)}$"):
        op.infer(*types(operands))


def test_every_op_but_pointwise_ones_has_its_refusals() -> None:
    assert {op.name for op in ALL if not hasattr(op, "row")} <= {op.name for op, _, _ in REFUSALS}


@pytest.mark.parametrize("op_class", ALL, ids=lambda c: c.name)
def test_no_operand_is_a_refusal(op_class: type[Any]) -> None:
    """Whatever the attributes: too few operands never raise IndexError."""
    for op in (op for op, _, _ in REFUSALS if isinstance(op, op_class)):
        with pytest.raises(VerifyError):
            op.infer()
    if hasattr(op_class, "row"):
        with pytest.raises(VerifyError, match="operands, not 0"):
            op_class().infer()
