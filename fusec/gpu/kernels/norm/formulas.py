"""Describe reductions, softmax and norms as passes over elements. The meaning is that of fusec.ops."""

from __future__ import annotations

import math

import numpy as np

from fusec.gpu.kernels.codegen.kernel import HALVES, compute_type
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.ir import DType, Node, Op, TensorType
from fusec.ops import GroupNorm, InstanceNorm, LayerNorm, Reduce, RmsNorm, Softmax
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class RowPass:
    """One pass: it combines `term` of each element e, beginning with `start`.

    term: may use the numbers of the passes before it (#0).
    finish: applied to the combined number, which it calls #.
    """

    combine: str
    start: str
    term: str
    finish: str = ""


@dataclass(frozen=True)
class Formula:
    """The passes of an op, and its result.

    c_type: the type that is computed in.
    result: from the numbers of the passes (#0, #1); of a norm, also from element e and the parameters (#s, #b).
    parameters: the types that the parameters are read as.
    merge: how the results of chunks are combined: `plain`, `moments`, or empty if they cannot be.
    """

    c_type: str
    passes: tuple[RowPass, ...]
    result: str
    parameters: tuple[TensorType, ...] = ()
    merge: str = ""


def formula_of(node: Node, op: Op) -> Formula | None:
    """Return the formula of an op; None if it has none.

    node: its operands are those that the op is applied to.
    op: differs from the node's op for a pool that is a reduction.
    """
    x = node.operands[0].type
    if isinstance(op, Reduce):
        return _reduction(op, x)
    if not x.dtype.is_float:
        return None
    kind = compute_type(x.dtype)
    if isinstance(op, Softmax):
        if x.dtype in HALVES and not op.log:
            total = _total("quick_exp(e - #0)", kind, "1.0f / #")
            return Formula(kind, (_largest(x.dtype), total), "quick_exp(e - #0) * #1")
        top, total = _largest(x.dtype), _total("exp(e - #0)", kind)
        return Formula(kind, (top, total), "(e - #0) - log(#1)" if op.log else "exp(e - #0) / #1")
    if isinstance(op, (LayerNorm, RmsNorm)):
        count = math.prod(x.shape[op.axis % x.rank :])
        parameters = tuple(v.type for v in node.operands[1:])
    elif isinstance(op, (InstanceNorm, GroupNorm)):
        count = x.size // max(1, x.shape[0] * (op.groups if isinstance(op, GroupNorm) else x.shape[1]))
        parameters = (TensorType((x.shape[1], *(1,) * (x.rank - 2)), x.dtype),) * 2
    else:
        return None
    inverse = f"{kind}(1) / sqrt(# / {kind}({count}) + {literal(op.epsilon, x.dtype)})"
    if isinstance(op, RmsNorm):
        return Formula(kind, (_total("e * e", kind, inverse),), "e * #0 * #s", parameters, "plain")
    mean = _total("e", kind, f"# / {kind}({count})")
    spread = _total("square(e - #0)", kind, inverse)
    scaled = "(e - #0) * #1 * #s + #b" if len(parameters) > 1 else "(e - #0) * #1 * #s"
    return Formula(kind, (mean, spread), scaled, parameters, "moments")


def _reduction(op: Reduce, x: TensorType) -> Formula | None:
    if not (x.dtype.is_float or (x.dtype.is_int and op.kind in ("sum", "max", "min", "prod", "l1", "sum_square"))):
        return None
    kind = compute_type(x.dtype) if x.dtype.is_float else _accumulator(x.dtype)
    square, magnitude = ("e * e", "fabs(e)") if x.dtype.is_float else ("wrap_mul(e, e)", "wrap_abs(e)")
    count = math.prod(x.shape[a] for a in op.axes)
    if op.kind in ("max", "min"):
        return Formula(kind, (_largest(x.dtype) if op.kind == "max" else _smallest(x.dtype),), "#0", merge="plain")
    if op.kind == "prod":
        return Formula(kind, (RowPass("Multiply", f"{kind}(1)", "e"),), "#0", merge="plain")
    if op.kind == "log_sum_exp":
        top = RowPass("Largest", f"{kind}(-INFINITE)", "e", f"fabs(#) < {kind}(INFINITE) ? # : {kind}(0)")
        return Formula(kind, (top, _total("exp(e - #0)", kind)), "log(#1) + #0")
    terms = {"l1": magnitude, "l2": square, "sum_square": square}
    results = {"mean": f"#0 / {kind}({count})", "l2": "sqrt(#0)", "log_sum": "log(#0)"}
    return Formula(kind, (_total(terms.get(op.kind, "e"), kind),), results.get(op.kind, "#0"), merge="plain")


def _accumulator(dtype: DType) -> str:
    wide = "64" if dtype.itemsize == 8 else "32"
    return f"{dtype.value[0]}{wide}"


def _total(term: str, kind: str, finish: str = "") -> RowPass:
    return RowPass("Add", f"{kind}(0)", term, finish)


def _largest(dtype: DType) -> RowPass:
    low = f"{compute_type(dtype)}(-INFINITE)" if dtype.is_float else literal(int(np.iinfo(dtype.numpy).min), dtype)
    return RowPass("Largest", low, "e")


def _smallest(dtype: DType) -> RowPass:
    high = f"{compute_type(dtype)}(INFINITE)" if dtype.is_float else literal(int(np.iinfo(dtype.numpy).max), dtype)
    return RowPass("Smallest", high, "e")
