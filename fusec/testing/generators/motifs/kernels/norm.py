"""Draw steps for the kernels of norms and reductions."""

from __future__ import annotations

from fusec.ir import TensorType
from fusec.ops import BatchNormBackward, InstanceNorm, LayerNormBackward, MaxPool, Reduce
from fusec.testing.generators.graph_builder import RandomGraph
from fusec.testing.generators.motifs.kernels.parts import image_input, image_side, op_with_epilogue
from fusec.testing.generators.motifs.layers import ACTIVATIONS
from fusec.testing.generators.operations.pointwise import draw_pointwise


def instance_norm(b: RandomGraph) -> None:
    """Draw an instance norm of a channels-last image, pointwise ops, and sometimes a pool of the result."""
    x = image_input(b, b.pick([8, 16, 4, 32]), image_side(b), image_side(b))
    y = b.add(InstanceNorm(b.pick([1e-5, 1e-2])), x, *(b.constant((x.type.shape[1],), x.type.dtype) for _ in range(2)))
    for _ in range(b.below(3)):
        y = draw_pointwise(b, b.pick(ACTIVATIONS), y)
    if b.chance(30) and min(y.type.shape[2:]) > 1:
        b.add(MaxPool((2, 2), (2, 2), (0, 0, 0, 0), (1, 1)), y)


def row_reduction(b: RandomGraph) -> None:
    """Draw a norm, a softmax or a reduction of rows of many lengths, with pointwise ops after it."""
    type = TensorType((b.pick([3, 1, 8]), b.pick([8, 33, 5, 128, 300])), b.dtype)
    op_with_epilogue(b, b.input(type), b.pick(["softmax", "layer_norm", "rms_norm", "reduce"]))


def batch_norm(b: RandomGraph) -> None:
    """Draw a batch norm of training or its gradients, in any layout, with pointwise ops after it.

    Sometimes another norm has the same gradient, as that of a shortcut.
    """
    x = image_input(b, b.pick([4, 8, 3, 17]), image_side(b), image_side(b))
    op_with_epilogue(b, x, b.pick(["batch_norm_train", "batch_norm_backward", "channel_sums", "batch_norm_by_sums"]))
    norm = next((node for node in b.graph.nodes if node.op == BatchNormBackward()), None)
    if norm is not None and b.chance(50):
        b.insert(BatchNormBackward(), norm.operands[0], b.like(x), *norm.operands[2:])


def layer_norm_backward(b: RandomGraph) -> None:
    """Draw the gradients of a layer or RMS norm, and sometimes an addend and the sum over rows (a bias's gradient)."""
    features = b.pick([8, 16, 3, 33, 64, 129])
    type = TensorType((*(b.pick([2, 3, 5]) for _ in range(b.between(1, 2))), features), b.dtype)
    dy, x = b.input(type), b.input(type)
    op = LayerNormBackward(-1, b.pick([1e-5, 1e-2]), b.chance(60))
    dx = b.insert(op, dy, x, b.constant((features,), b.dtype)).results[0]
    if b.chance(50):
        dx = b.pointwise("add", dx, b.input(type))
    if b.chance(30):
        b.add(Reduce("sum", tuple(range(type.rank - 1)), False), dx)
