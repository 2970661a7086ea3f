"""Lower batch norm in training, and its gradients, to cuDNN calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from fusec.errors import LoweringError
from fusec.ir import DType, Literal, Node, TensorType, Value, quote
from fusec.lowering.dim_folding import DimFolding, trace
from fusec.lowering.graph_builder import ConstantBinding, CudnnBuilder
from fusec.ops import BatchNormBackward, BatchNormTrain

_FLOATS = (DType.F32, DType.F16, DType.BF16)


def batch_norm_train(b: CudnnBuilder, node: Node) -> None:
    """Lower batch norm in training. cuDNN also updates running statistics, which the op does not have.

    The update starts from zeros, and nothing reads its results.
    """
    assert isinstance(node.op, BatchNormTrain)
    _require_types(node, node.operands[0], node.operands[1:])
    folding = b.foldings[node]
    image = b.operand(node.operands[0], folding)
    parameters = [_channel_operand(b, value, folding) for value in node.operands[1:]]
    running = [_zeros(b, node, folding) for _ in range(2)]
    rank = len(folding.groups)
    numbers = (b.scalar(node.op.epsilon, rank), b.scalar(1.0, rank))  # the momentum is 1
    result = b.result(node.results[0], folding)
    statistics = [_channel_result(b, value, folding) for value in node.results[1:]]
    updated = [_channel_tensor(b, node.results[1], folding) for _ in range(2)]
    b.spare += updated
    b.call("batchnorm", (image, *parameters, *running, *numbers), (result, *statistics, *updated))


def batch_norm_backward(b: CudnnBuilder, node: Node) -> None:
    """Lower the gradients of batch norm in training."""
    assert isinstance(node.op, BatchNormBackward)
    if node.op.relu:
        raise LoweringError("batch_norm_backward with relu: cuDNN cannot compute the mask of the relu again")
    dy, x, *numbers = node.operands
    _require_types(node, x, numbers)
    folding = b.foldings[node]
    loss, image = (b.operand(value, folding) for value in (dy, x))
    if loss == image:
        image = b.alias(loss)
    parameters = [_channel_operand(b, value, folding) for value in numbers]
    gradients = [_channel_result(b, value, folding) for value in node.results[1:]]
    result = b.result(node.results[0], folding)
    b.call("batchnorm_backward", (loss, image, *parameters), (result, *gradients))


def _require_types(node: Node, x: Value, numbers: tuple[Value, ...] | list[Value]) -> None:
    if x.type.dtype not in _FLOATS:
        raise LoweringError(f"{node.op.name} in {x.type.dtype.value} is not lowered")
    if any(value.type.dtype is not DType.F32 for value in numbers):
        raise LoweringError(f"{node.op.name}: cuDNN stores statistics in fp32 only")


def _channels(value: Value, folding: DimFolding) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of one number for each channel in the dims of the image, and strides."""
    shape = tuple(value.type.size if d == 1 else 1 for d in range(len(folding.shape)))
    return shape, TensorType(shape, DType.F32).strides


def _channel_tensor(b: CudnnBuilder, value: Value, folding: DimFolding) -> int:
    return b.tensor(folding.place(quote(value.name), *_channels(value, folding)), DType.F32)


def _channel_operand(b: CudnnBuilder, value: Value, folding: DimFolding) -> int:
    """Add a tensor for an input or constant with one number for each channel."""
    root = trace(value)
    if value.literal is None and (root.root.node is not None or root.offset or root.root.type != value.type):
        raise LoweringError(f"{quote(value.name)}: a computed number of each channel")
    uid = _channel_tensor(b, value, folding)
    if value.literal is not None:
        b.constants.append(ConstantBinding(uid, value.literal, value.type))
    else:
        b.inputs.append((uid, root.root.name))
    return uid


def _channel_result(b: CudnnBuilder, value: Value, folding: DimFolding) -> int:
    """Add a stored tensor for a result with one number for each channel; a spare one if nothing reads it."""
    uid = _channel_tensor(b, value, folding)
    if value in b.stored:
        b.outputs.append((uid, b.stored[value][0]))
        b.uids[value] = uid
    else:
        b.spare.append(uid)
    return uid


def _zeros(b: CudnnBuilder, node: Node, folding: DimFolding) -> int:
    """Add a constant of zeros, the running statistics before an update."""
    statistic = node.results[1]
    zeros = Literal.of(np.zeros(statistic.type.shape, np.float32))
    uid = _channel_tensor(b, statistic, folding)
    b.constants.append(ConstantBinding(uid, zeros, zeros.type))
    return uid


TRAINING_NORMS: Mapping[str, Callable[[CudnnBuilder, Node], None]] = {
    "batch_norm_train": batch_norm_train,
    "batch_norm_backward": batch_norm_backward,
}
