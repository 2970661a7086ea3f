"""List every op: ALL is a tuple one can read, BY_NAME finds one by its name in the text form."""

from __future__ import annotations

from collections.abc import Mapping

from fusec.ir import Op
from fusec.ops.attention import Attention, AttentionBackward, AttentionTrain, Rotary
from fusec.ops.convolution import Conv, ConvTranspose, FlippedConv
from fusec.ops.deform_conv import DeformConv
from fusec.ops.indexing import Cumulate, LinearScan, Scatter, TopK
from fusec.ops.matmul import MatMul, PackedMatMul
from fusec.ops.non_max_suppression import NonMaxSuppression
from fusec.ops.normalization import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, LocalResponseNorm, RmsNorm
from fusec.ops.op_sets import (
    ACTIVATION_GRADIENTS,
    ANCHORS,
    ATTENTION_OPS,
    CONVOLUTIONS,
    EPILOGUE_ANCHORS,
    FORWARD_CONVOLUTIONS,
    IMAGE_CONVOLUTIONS,
    LINEAR_OPS,
    PART_VIEWS,
    POINTWISE_OPS,
    PRODUCTS,
    STRIDED_VIEWS,
)
from fusec.ops.pointwise import CLASSES, Cast, Pointwise, pw
from fusec.ops.pooling import AvgPool, MaxPool
from fusec.ops.random import RandomBits
from fusec.ops.recurrent import Recurrent
from fusec.ops.reduction import AllFinite, Reduce, Softmax
from fusec.ops.roi_align import RoiAlign, RoiPool
from fusec.ops.sampling import GridSample
from fusec.ops.scan import Scan
from fusec.ops.shape import Concat, Dilate, Expand, Gather, Pad, Relayout, Reshape, Resize, Slice, Split, Transpose
from fusec.ops.training import (
    BatchNormBackward,
    BatchNormBySums,
    BatchNormTrain,
    ChannelSums,
    ConvWgrad,
    LayerNormBackward,
    MaxPoolBackward,
    MaxPoolTrain,
)

ALL: tuple[type[Op], ...] = (
    *CLASSES.values(),
    Cast,
    Conv,
    FlippedConv,
    ConvTranspose,
    DeformConv,
    MatMul,
    PackedMatMul,
    Attention,
    Rotary,
    BatchNorm,
    InstanceNorm,
    GroupNorm,
    LayerNorm,
    RmsNorm,
    LocalResponseNorm,
    MaxPool,
    AvgPool,
    Reduce,
    Softmax,
    Reshape,
    Transpose,
    Relayout,
    Expand,
    Concat,
    Split,
    Slice,
    Pad,
    Dilate,
    Gather,
    Resize,
    GridSample,
    RoiAlign,
    RoiPool,
    TopK,
    NonMaxSuppression,
    Scatter,
    Cumulate,
    LinearScan,
    Scan,
    ConvWgrad,
    MaxPoolBackward,
    MaxPoolTrain,
    BatchNormTrain,
    ChannelSums,
    BatchNormBySums,
    BatchNormBackward,
    LayerNormBackward,
    RandomBits,
    AllFinite,
    AttentionTrain,
    AttentionBackward,
    Recurrent,
)

BY_NAME: Mapping[str, type[Op]] = {op.name: op for op in ALL}

__all__ = [
    "ACTIVATION_GRADIENTS",
    "ALL",
    "ANCHORS",
    "ATTENTION_OPS",
    "BY_NAME",
    "CLASSES",
    "CONVOLUTIONS",
    "EPILOGUE_ANCHORS",
    "FORWARD_CONVOLUTIONS",
    "IMAGE_CONVOLUTIONS",
    "LINEAR_OPS",
    "PART_VIEWS",
    "POINTWISE_OPS",
    "PRODUCTS",
    "STRIDED_VIEWS",
    "AllFinite",
    "Attention",
    "AttentionBackward",
    "AttentionTrain",
    "AvgPool",
    "BatchNorm",
    "BatchNormBackward",
    "BatchNormBySums",
    "BatchNormTrain",
    "Cast",
    "ChannelSums",
    "Concat",
    "Conv",
    "ConvTranspose",
    "ConvWgrad",
    "Cumulate",
    "DeformConv",
    "Dilate",
    "Expand",
    "FlippedConv",
    "Gather",
    "GridSample",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "LayerNormBackward",
    "LinearScan",
    "LocalResponseNorm",
    "MatMul",
    "MaxPool",
    "MaxPoolBackward",
    "MaxPoolTrain",
    "NonMaxSuppression",
    "PackedMatMul",
    "Pad",
    "Pointwise",
    "RandomBits",
    "Recurrent",
    "Reduce",
    "Relayout",
    "Reshape",
    "Resize",
    "RmsNorm",
    "RoiAlign",
    "RoiPool",
    "Rotary",
    "Scan",
    "Scatter",
    "Slice",
    "Softmax",
    "Split",
    "TopK",
    "Transpose",
    "pw",
]
