"""Define attention for training: a forward op that also returns sums of exponentials, and its gradient.

Neither stores scores. The gradient computes the scores again, and the weights from scores and sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fusec.ir import Array, DType, Op, TensorType
from fusec.ops.attention import Attention
from fusec.ops.spec import require, require_arity, wide


@dataclass(frozen=True)
class AttentionTrain(Op):
    """Attention, and for each query the logarithm of the sum of the exponentials of its scores.

    The logarithms are [B, H, S, 1] in f32; in f64 if the operands are f64.
    """

    scale: float = 1.0
    causal: bool = False
    name: ClassVar[str] = "attention_train"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 3, 4)
        (result,) = Attention(self.scale, self.causal).infer(*operands)
        return (result, _statistics(result))

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            q, k, v, *bias = map(wide, operands)
            scores = Attention(self.scale, self.causal).scores(xp, q, k, *bias)
            top = scores.max(axis=-1, keepdims=True)
            top = xp.where(xp.isinf(top), 0.0, top).astype(top.dtype)  # as `reduce` of kind log_sum_exp does
            powers = xp.exp(scores - top)
            total = powers.sum(axis=-1, keepdims=True)
            # exp(scores - sums) would lose the digits of a large sum
            result = grouped_heads(xp.matmul(head_groups(powers / total, k), v[:, :, None]))
            return result.astype(operands[0].dtype), xp.log(total) + top


@dataclass(frozen=True)
class AttentionBackward(Op):
    """Gradients of q, k and v of attention_train, from dy, q, k, v, its two results, and its bias if it has one.

    The logarithms may also have the dtype of the other operands. With `ordered` the gradients are added in a fixed
    order, so that every call gives the same bits.
    """

    scale: float = 1.0
    causal: bool = False
    ordered: bool = False
    name: ClassVar[str] = "attention_backward"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 6, 7)
        dy, q, k, v, y, sums, *bias = operands
        result, statistics = AttentionTrain(self.scale, self.causal).infer(q, k, v, *bias)
        own = TensorType(statistics.shape, q.dtype)
        for name, given, wanted in (("dy", dy, result), ("the result", y, result), ("sums", sums, statistics)):
            same = given.same_value_type(wanted) or (given is sums and given.same_value_type(own))
            require(same, f"{self.name}: {name} is {given}, not {wanted}")
        return tuple(TensorType(t.shape, t.dtype) for t in (q, k, v))

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            dy, q, k, v, y, sums, *bias = map(wide, operands)
            weights = xp.exp(Attention(self.scale, self.causal).scores(xp, q, k, *bias) - sums)
            slopes = grouped_heads(xp.matmul(head_groups(dy, k), v[:, :, None].swapaxes(-1, -2)))
            slopes = weights * (slopes - (dy * y).sum(axis=-1, keepdims=True)) * q.dtype.type(self.scale)
            dq = grouped_heads(xp.matmul(head_groups(slopes, k), k[:, :, None]))
            dk = xp.matmul(head_groups(slopes, k).swapaxes(-1, -2), head_groups(q, k)).sum(axis=2)
            dv = xp.matmul(head_groups(weights, k).swapaxes(-1, -2), head_groups(dy, k)).sum(axis=2)
            return tuple(g.astype(x.dtype) for g, x in zip((dq, dk, dv), operands[1:4], strict=True))


def _statistics(result: TensorType) -> TensorType:
    return TensorType((*result.shape[:3], 1), DType.F64 if result.dtype is DType.F64 else DType.F32)


def head_groups(x: Any, k: Any) -> Any:
    """Reshape an array or a Tensor [B, H, …] to [B, G, H/G, …]: heads that share their keys become one dim."""
    return x.reshape(x.shape[0], k.shape[1], x.shape[1] // k.shape[1], *x.shape[2:])


def grouped_heads(x: Any) -> Any:
    """Reshape [B, G, H/G, …] back to [B, H, …]."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
