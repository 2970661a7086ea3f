"""Differentiate matrix products, reductions and softmax."""

from __future__ import annotations

import math

from fusec.builder import Tensor
from fusec.gradients.core import BackwardStep, Gradients, Rule, sum_to, wide
from fusec.gradients.indexing import running
from fusec.ir import DType, Node
from fusec.ops import PackedMatMul, Pad, Transpose


def _matmul(step: BackwardStep) -> Gradients:
    (a, b), dy = step.x, step.dy
    da = sum_to(dy @ b.swapaxes(-1, -2), a.shape) if step.active[0] else None
    if not step.active[1]:
        return da, None
    # for x @ w.T the transpose of a product is w's gradient without a transposed copy
    transposed = isinstance(step.node.operands[1].node, Node) and isinstance(step.node.operands[1].node.op, Transpose)
    if math.prod(b.shape[:-2]) == 1 and a.rank >= 2:  # one product over all rows, not a sum of products
        rows, loss = (v.reshape(math.prod(v.shape[:-1]), v.shape[-1]) for v in (a, dy))
        return da, ((loss.T @ rows).T if transposed else rows.T @ loss).reshape(b.shape)
    return da, sum_to((dy.swapaxes(-1, -2) @ a).swapaxes(-1, -2) if transposed else a.swapaxes(-1, -2) @ dy, b.shape)


def _packed_matmul(step: BackwardStep) -> Gradients:
    op: PackedMatMul = step.op
    x, codes, scales, *zeros = step.x
    (columns, depth), blocks, b = codes.shape, scales.shape[1], step.b

    def by_element(v: Tensor) -> Tensor:
        shape = (columns, blocks, op.block)
        return v.reshape(columns, blocks, 1).expand(shape).reshape(columns, blocks * op.block)[:, :depth]

    numbers = codes.astype(DType.F32)
    for zero in zeros:
        numbers = numbers - by_element(zero.astype(DType.F32))
    numbers = numbers.astype(scales.dtype if scales.dtype is DType.F64 else DType.F32)
    rows, loss = (v.reshape(-1, v.shape[-1]).astype(numbers.dtype) for v in (x, step.dy))
    dx = (loss @ (numbers * by_element(scales.astype(numbers.dtype)))).reshape(x.shape) if step.active[0] else None
    if not step.active[2]:
        return dx, None, None, *(None for _ in zeros)
    terms = b.apply(Pad((0, 0, 0, blocks * op.block - depth)), (loss.T @ rows) * numbers)
    return dx, None, terms.reshape(columns, blocks, op.block).sum(2), *(None for _ in zeros)


def _reduce(step: BackwardStep) -> Gradients:
    op, x = step.op, step.x[0]
    shape = tuple(1 if i in op.axes else d for i, d in enumerate(x.shape))
    dy, y = step.dy.reshape(shape), step.y[0].reshape(shape)
    count = math.prod(x.shape[a] for a in op.axes)
    match op.kind:
        case "sum":
            return dy.expand(x.shape)
        case "mean":
            return (dy * (1.0 / count)).expand(x.shape)
        case "max" | "min":  # equal elements share the gradient
            best = x.eq(y).astype(x.dtype)
            return best * (dy / best.sum(op.axes, keepdims=True))
        case "l1":
            return dy * x.pointwise("sign")
        case "l2":
            return step.b.where(y.eq(0.0), 0.0, dy / step.b.where(y.eq(0.0), 1.0, y)) * x
        case "sum_square":
            return dy * x * 2.0
        case "log_sum":
            return (dy * (-y).exp()).expand(x.shape)
        case "log_sum_exp":
            return dy * (x - y).exp()
        case _:
            assert op.kind == "prod"
            return dy * _product_of_others(x, op.axes)


def _product_of_others(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Compute for each element the product of all others along `axes`.

    It is the product of the elements before it times the product of those after it: no division, so zeros are exact.
    """
    outer = [i for i in range(x.rank) if i not in axes]
    order = [*outer, *axes]
    shape = [x.shape[i] for i in order]
    rows = x.transpose(order).reshape(*shape[: len(outer)], math.prod(shape[len(outer) :]))
    count = rows.shape[-1]
    if count < 2:
        return x * 0.0 + 1.0
    pads = [0] * rows.rank * 2
    at_start, at_end = list(pads), list(pads)
    at_start[rows.rank - 1], at_end[-1] = 1, 1
    before = x.builder.pad(running(rows[..., :-1], "prod"), at_start, value=1.0)
    after = x.builder.pad(running(rows[..., 1:], "prod", backwards=True), at_end, value=1.0)
    inverse = [order.index(i) for i in range(x.rank)]
    return (before * after).reshape(shape).transpose(inverse)


def _softmax(step: BackwardStep) -> Gradients:
    op, y, dy = step.op, wide(step.y[0]), wide(step.dy)
    axis = op.axis % y.rank
    if op.log:
        return dy - y.exp() * dy.sum(axis, keepdims=True)
    return y * (dy - (dy * y).sum(axis, keepdims=True))


RULES: dict[str, Rule] = {"matmul": _matmul, "packed_matmul": _packed_matmul, "reduce": _reduce, "softmax": _softmax}
