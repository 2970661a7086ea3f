"""Name the sets of ops that passes, lowerings and kernels share."""

from __future__ import annotations

from fusec.ops.attention import Attention, AttentionBackward, AttentionTrain
from fusec.ops.convolution import Conv, ConvTranspose, FlippedConv
from fusec.ops.matmul import MatMul
from fusec.ops.normalization import InstanceNorm, LayerNorm, RmsNorm
from fusec.ops.pointwise import CLASSES, Cast, Pointwise
from fusec.ops.reduction import Reduce
from fusec.ops.shape import Relayout, Reshape, Slice, Split, Transpose
from fusec.ops.training import BatchNormBackward, BatchNormTrain, ConvWgrad

POINTWISE_OPS = (Pointwise, Cast)  # each element of the result alone
ACTIVATION_GRADIENTS = tuple(  # the gradient of a result, times a function of the activation's operand
    CLASSES[f"{name}_backward"]
    for name in ("relu", "leaky_relu", "sigmoid", "tanh", "elu", "gelu", "gelu_tanh", "softplus", "swish")
)
ATTENTION_OPS = (Attention, AttentionTrain, AttentionBackward)
FORWARD_CONVOLUTIONS = (Conv, FlippedConv)  # that cuDNN's conv_fprop computes, in one of its two modes
IMAGE_CONVOLUTIONS = (*FORWARD_CONVOLUTIONS, ConvTranspose)  # of an image and filters
LINEAR_OPS = (*IMAGE_CONVOLUTIONS, MatMul)  # products of an image or rows with weights
CONVOLUTIONS = (*IMAGE_CONVOLUTIONS, ConvWgrad)
PRODUCTS = (*CONVOLUTIONS, MatMul)
EPILOGUE_ANCHORS = (
    *PRODUCTS,
    LayerNorm,
    RmsNorm,
    InstanceNorm,
    BatchNormTrain,
)  # anchors that take pointwise ops after them
ANCHORS = (*EPILOGUE_ANCHORS, *ATTENTION_OPS, Reduce, BatchNormBackward)  # ops that a cuDNN partition grows around
PART_VIEWS = (Slice, Split)  # views of a part of their operand, so that their memory has gaps
STRIDED_VIEWS = (Reshape, Transpose, Relayout, *PART_VIEWS)  # ops that a cuDNN graph reads by strides
