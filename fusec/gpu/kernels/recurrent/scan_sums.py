"""Generate the reductions and matrix products of a scan's body: threads share the addends of an element."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager

import numpy as np

from fusec.gpu.kernels.codegen.kernel import HALVES, compute_type
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import rounded_to
from fusec.gpu.kernels.recurrent.scan_code import BodyCode
from fusec.gpu.kernels.recurrent.scan_views import At
from fusec.ir import DType, Node
from fusec.ops import MatMul, Reduce

UNROLLED = 8  # turns of a loop over addends
# The first number, the function of the prelude that takes in another, and what is taken in of an operand x.
_KINDS: Mapping[str, tuple[str, str, str]] = {
    "sum": ("{T}(0)", "Add()", "{x}"),
    "mean": ("{T}(0)", "Add()", "{x}"),
    "max": ("{low}", "Largest()", "{x}"),
    "min": ("{high}", "Smallest()", "{x}"),
    "prod": ("{T}(1)", "Multiply()", "{x}"),
    "l1": ("{T}(0)", "Add()", "fabs({x})"),
    "l2": ("{T}(0)", "Add()", "{x} * {x}"),
    "sum_square": ("{T}(0)", "Add()", "{x} * {x}"),
    "log_sum": ("{T}(0)", "Add()", "{x}"),
}


def sum_code(code: BodyCode, node: Node, at: At, lanes: int) -> str:
    """Return the name of an element of a reduction or a product, after the statements that compute it.

    lanes: how many threads side by side share its addends. All of them get the element.
    """
    if isinstance(node.op, MatMul):
        return _product(code, node, at, lanes)
    op, dtype = node.op, node.result.type.dtype
    assert isinstance(op, Reduce)
    if op.kind == "log_sum_exp":
        top = _reduced(code, node, at, "max", lanes)
        top = code.number(
            f"fabs({top}) < {compute_type(dtype)}(INFINITE) ? {top} : {compute_type(dtype)}(0)", compute_type(dtype)
        )
        total = _reduced(code, node, at, "sum", lanes, f"exp({{x}} - {top})")
        text = f"log({total}) + {top}"
    else:
        text = _reduced(code, node, at, op.kind, lanes)
        count = math.prod(node.operands[0].type.shape[axis] for axis in op.axes)
        text = {
            "mean": f"{text} / {literal(count, dtype)}",
            "l2": f"sqrt({text})",
            "log_sum": f"log({text})",
        }.get(op.kind, text)
    rounds = dtype in HALVES and op.kind not in ("max", "min")
    return code.number(rounded_to(text, dtype) if rounds else text, compute_type(dtype))


def _reduced(code: BodyCode, node: Node, at: At, kind: str, lanes: int, taken: str = "") -> str:
    """Return the name of a sum, product or extreme over the axes of a reduction."""
    op, (x,) = node.op, node.operands
    assert isinstance(op, Reduce)
    start, function, term = _KINDS[kind]
    c_type, dtype = compute_type(x.type.dtype), x.type.dtype
    first = start.format(T=c_type, low=_extreme(dtype, largest=False), high=_extreme(dtype, largest=True))
    total = code.variable(first, c_type)
    sizes = [x.type.shape[axis] for axis in op.axes]
    with _addends(code, math.prod(sizes), lanes):
        inner = dict(zip(op.axes, code.coordinates("k", sizes), strict=True))
        left = list(at) if not op.keepdims else [c for d, c in enumerate(at) if d not in inner]
        place = tuple(inner[d] if d in inner else left.pop(0) for d in range(x.type.rank))
        element = (taken or term).format(x=code.element(x, place))
        code.lines.append(f"{total} = {function}({total}, ({c_type})({element}));")
    _share(code, total, function, lanes)
    return total


def _product(code: BodyCode, node: Node, at: At, lanes: int) -> str:
    """Return the name of an element of a matrix product."""
    a, b = node.operands
    c_type, dtype = compute_type(node.result.type.dtype), node.result.type.dtype
    total = code.variable(f"{c_type}(0)", c_type)
    with _addends(code, a.type.shape[-1], lanes):
        batch = at[:-2]
        left = code.element(a, (*batch[len(batch) - a.type.rank + 2 :], at[-2], "k"))
        right = code.element(b, (*batch[len(batch) - b.type.rank + 2 :], "k", at[-1]))
        code.lines.append(f"{total} += {left} * {right};")
    _share(code, total, "Add()", lanes)
    return code.number(rounded_to(total, dtype), c_type)


def _addends(code: BodyCode, count: int, lanes: int) -> AbstractContextManager[None]:
    """Begin the loop over the addends of a thread, whose index is `k`. Loads of several turns are on their way."""
    begin = f"threadIdx.x % {lanes}u" if lanes > 1 else "0u"
    code.lines.append(f"#pragma unroll {UNROLLED}")
    return code.block(f"for (u32 k = {begin}; k < {count}u; k += {lanes}u)")


def _share(code: BodyCode, total: str, function: str, lanes: int) -> None:
    """Combine what threads side by side have, so that each has the whole."""
    if lanes > 1:
        shuffled = f"__shfl_xor_sync(0xffffffffu, {total}, s)"
        code.lines.append(f"for (int s = {lanes // 2}; s > 0; s /= 2) {total} = {function}({total}, {shuffled});")


def _extreme(dtype: DType, largest: bool) -> str:
    """Return the number that every other one of a type replaces, as C."""
    if dtype.is_float:
        return literal(math.inf if largest else -math.inf, dtype)
    info = np.iinfo(dtype.numpy)
    return literal(int(info.max if largest else info.min), dtype)
