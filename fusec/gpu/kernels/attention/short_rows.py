"""Tell which views kernels of attention over short sequences read and write."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.indexing import View, view_of_operand
from fusec.ir import DType, Node, Value

OCTET = 8  # neighbours of a row that one copy moves
MOST_FEATURES = 64  # more sums than these do not fit into the registers of a thread
MOST_KEYS = 256  # gradients of scores with more of them do not fit into the registers of a thread


def stored_view(node: Node, epilogue: Sequence[Node], output: Value) -> tuple[int, Value, View] | None:
    """Return the result of a node that an output views: its place, the output, and the view of the result.

    epilogue: the views after the node. Returns None if elements have to move.
    """
    value, view = output, View.of(output.type)
    for last in reversed(epilogue):
        if value is last.results[0]:
            found = view_of_operand(last, view)
            if found is None:
                return None
            value, view = last.operands[0], found
    return (value.index, output, view) if value.node is node else None


def has_short_rows(view: View) -> bool:
    """Tell if rows are few pairs of octets of contiguous fp16, and offsets fit into 32 bits without a sign.

    In bf16, scores may be beyond fp32 before they are scaled.
    """
    if view.dtype is not DType.F16 or view.strides[3] != 1 or any(stride < 0 for stride in view.strides):
        return False
    reach = view.start + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    aligned = not any(s % OCTET for s in (*view.strides[:3], view.start))
    return aligned and view.shape[3] % (2 * OCTET) == 0 and view.shape[3] <= MOST_FEATURES and reach < 1 << 31


def are_of_one_head(views: Sequence[View]) -> bool:
    """Tell if queries, keys, values and results have the same heads and features, and all rows are short."""
    return all(map(has_short_rows, views)) and len({(view.shape[1], view.shape[3]) for view in views}) == 1


def of_head(pointer: str, view: View) -> str:
    """Return the address of the first row of a head, as C, where `image` and `head` are its coordinates."""
    image, head, *_ = view.strides
    return f"({pointer} + (image * {image}u + head * {head}u + {view.start}u))"
