"""Gradients of matrix products, reductions and softmax."""

from __future__ import annotations

import math

from fusec.builder import Tensor
from fusec.gradients.core import Gradients, Rule, Step, sum_to, wide
from fusec.gradients.indexing import running
from fusec.ir import Node
from fusec.ops import Transpose


def _matmul(step: Step) -> Gradients:
    (a, b), dy = step.x, step.dy
    da = sum_to(dy @ b.swapaxes(-1, -2), a.shape) if step.active[0] else None
    if not step.active[1]:
        return da, None
    # of x @ w.T, what w gets is wanted, which then is no transposed copy
    turned = isinstance(step.node.operands[1].node, Node) and isinstance(step.node.operands[1].node.op, Transpose)
    if math.prod(b.shape[:-2]) == 1 and a.rank >= 2:  # one product over all rows, not a sum of products
        rows, loss = (v.reshape(math.prod(v.shape[:-1]), v.shape[-1]) for v in (a, dy))
        return da, ((loss.T @ rows).T if turned else rows.T @ loss).reshape(b.shape)
    return da, sum_to((dy.swapaxes(-1, -2) @ a).swapaxes(-1, -2) if turned else a.swapaxes(-1, -2) @ dy, b.shape)


def _reduce(step: Step) -> Gradients:
    op, x = step.op, step.x[0]
    kept = tuple(1 if i in op.axes else d for i, d in enumerate(x.shape))
    dy, y = step.dy.reshape(kept), step.y[0].reshape(kept)
    count = math.prod(x.shape[a] for a in op.axes)
    match op.kind:
        case "sum":
            return dy.expand(x.shape)
        case "mean":
            return (dy * (1.0 / count)).expand(x.shape)
        case "max" | "min":  # equals share
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
            return dy * _others(x, op.axes)


def _others(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """For each element the product of the others it is reduced with: of those before and those behind it."""
    kept = [i for i in range(x.rank) if i not in axes]
    order = [*kept, *axes]
    shape = [x.shape[i] for i in order]
    rows = x.transpose(order).reshape(*shape[: len(kept)], math.prod(shape[len(kept) :]))
    count = rows.shape[-1]
    if count < 2:
        return x * 0.0 + 1.0
    pads = [0] * rows.rank * 2
    before, behind = list(pads), list(pads)
    before[rows.rank - 1], behind[-1] = 1, 1
    first = _with_ones(running(rows[..., :-1], "prod"), before)
    last = _with_ones(running(rows[..., 1:], "prod", backwards=True), behind)
    inverse = [order.index(i) for i in range(x.rank)]
    return (first * last).reshape(shape).transpose(inverse)


def _with_ones(x: Tensor, pads: list[int]) -> Tensor:
    """Padded by ones, which change no product."""
    return x.builder.pad(x, pads, value=1.0)


def _softmax(step: Step) -> Gradients:
    op, y, dy = step.op, wide(step.y[0]), wide(step.dy)
    axis = op.axis % y.rank
    if op.log:
        return dy - y.exp() * dy.sum(axis, keepdims=True)
    return y * (dy - (dy * y).sum(axis, keepdims=True))


RULES: dict[str, Rule] = {"matmul": _matmul, "reduce": _reduce, "softmax": _softmax}
