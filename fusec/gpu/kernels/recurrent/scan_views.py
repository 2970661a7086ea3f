"""Generate C for elements of views in the body of a scan: each is an element of an operand, at other coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fusec.gpu.kernels.codegen.kernel import compute_type
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.ir import Node, TensorType, Value
from fusec.ops import Concat, Expand, Gather, Pad, Relayout, Reshape, Slice, Split, Transpose

if TYPE_CHECKING:
    from fusec.gpu.kernels.recurrent.scan_code import BodyCode

At = tuple[str, ...]  # coordinates in C: names or numbers


def element_of_view(code: BodyCode, node: Node, value: Value, at: At) -> str:
    """Return an element of a view: the element of its operand that it is."""
    op, x = node.op, node.operands[0]
    if isinstance(op, Relayout):
        return code.element(x, at)
    if isinstance(op, Expand):
        return code.element(x, broadcast(at, x.type))
    if isinstance(op, Transpose):
        return code.element(x, tuple(at[op.perm.index(d)] for d in range(len(at))))
    if isinstance(op, Slice):
        moved = (_affine(code, c, step, start) for c, step, start in zip(at, op.steps, op.starts, strict=True))
        return code.element(x, tuple(moved))
    if isinstance(op, Split):
        axis = op.axis % len(at)
        start = sum(op.sizes[: value.index])
        return code.element(x, (*at[:axis], _affine(code, at[axis], 1, start), *at[axis + 1 :]))
    if isinstance(op, Reshape):
        return code.element(x, _reshaped(code, at, value.type.shape, x.type.shape))
    if isinstance(op, Gather):
        return _gathered(code, op, node, at)
    if isinstance(op, Pad):
        return _padded(code, op, x, at)
    assert isinstance(op, Concat)
    return _joined(code, op, node, at)


def _affine(code: BodyCode, c: str, step: int, start: int) -> str:
    """Return `c * step + start` as an unsigned number."""
    if step == 1 and start == 0:
        return c
    if c == "0u":
        return f"{start}u"
    if step < 0:
        return code.number(f"{start}u - {c} * {-step}u")
    return code.number(f"{c} * {step}u + {start}u" if step > 1 else f"{c} + {start}u")


def _reshaped(code: BodyCode, at: At, shape: Sequence[int], wanted: Sequence[int]) -> At:
    """Return the coordinates in a tensor of shape `wanted`. Only merged and split dims take arithmetic."""
    made, left = list[str](), list(zip(at, shape, strict=True))
    rest = list(wanted)
    while rest:
        group, sizes = list[tuple[str, int]](), [rest.pop(0)]
        while math.prod(size for _, size in group) != math.prod(sizes):
            if math.prod(size for _, size in group) < math.prod(sizes):
                group.append(left.pop(0))
            else:
                sizes.append(rest.pop(0))
        group = [(c, size) for c, size in group if size > 1]
        if len(group) == 1 and math.prod(sizes) in sizes:
            made.extend(group[0][0] if size > 1 else "0u" for size in sizes)
            continue
        terms = [f"{c} * {math.prod(n for _, n in group[d + 1 :])}u" for d, (c, _) in enumerate(group)]
        made.extend(code.coordinates(code.number(" + ".join(terms) or "0u"), sizes))
    return tuple(made)


def _gathered(code: BodyCode, op: Gather, node: Node, at: At) -> str:
    x, indices = node.operands
    axis, rank = op.axis % x.type.rank, indices.type.rank
    found, rows = code.element(indices, at[axis : axis + rank]), x.type.shape[axis]
    place = code.number(f"(i64){found} < 0 ? (i64){found} + {rows} : (i64){found}", "i64")
    place = code.number(f"(u32)clipped({place}, (i64)0, (i64){rows - 1})")
    return code.element(x, (*at[:axis], place, *at[axis + rank :]))


def _padded(code: BodyCode, op: Pad, x: Value, at: At) -> str:
    rank, inside, moved = len(at), list[str](), list[str]()
    for d, c in enumerate(at):
        before, size = op.pads[d], x.type.shape[d]
        if before == op.pads[rank + d] == 0:
            moved.append(c)
            continue
        # below the first element the difference wraps around, and is larger than any size
        place = code.number(f"{c} - {before}u")
        inside.append(f"{place} < {size}u")
        moved.append(code.number(f"{place} < {size}u ? {place} : 0u"))
    element, kind = code.element(x, tuple(moved)), x.type.dtype
    if not inside:
        return element
    number = op.value if kind.is_float else int(op.value)
    return code.number(f"{' && '.join(inside)} ? {element} : {literal(number, kind)}", compute_type(kind))


def _joined(code: BodyCode, op: Concat, node: Node, at: At) -> str:
    axis, start, text = op.axis % len(at), 0, ""
    for index, x in enumerate(node.operands):
        size = x.type.shape[axis]
        within = "0u"
        if size > 1:
            place = code.number(f"{at[axis]} - {start}u") if start else at[axis]
            within = code.number(f"{place} < {size}u ? {place} : 0u")
        element = code.element(x, (*at[:axis], within, *at[axis + 1 :]))
        last = index == len(node.operands) - 1
        text += element if last else f"{at[axis]} < {start + size}u ? {element} : "
        start += size
    return code.number(text, compute_type(node.result.type.dtype))


def broadcast(at: At, type: TensorType) -> At:
    """Return the coordinates in a tensor that broadcasts to the shape that has these."""
    own = at[len(at) - type.rank :]
    return tuple("0u" if size == 1 else c for c, size in zip(own, type.shape, strict=True))
