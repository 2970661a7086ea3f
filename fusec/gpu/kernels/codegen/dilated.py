"""Read an operand whose elements are apart in the result of a dilate; the zeros between them are never stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusec.gpu.kernels.codegen.indexing import View
from fusec.gpu.kernels.codegen.kernel import C_TYPES
from fusec.ir import Node, Value
from fusec.ops import Dilate


def dilates(nodes: Sequence[Node]) -> Mapping[Value, Node] | None:
    """Return the dilate of each operand that only dilates of these nodes read; None if a kernel cannot read one."""
    found: dict[Value, Node] = {}
    for node in nodes:
        if not isinstance(node.op, Dilate):
            continue
        (x,), steps = node.operands, set(node.op.steps)
        readers = [user for user in x.users if user in nodes]
        if x.node in nodes or readers != [node] or x.type.dtype not in C_TYPES or x.type.dtype.bits < 8:
            return None
        if len(steps - {1}) > 1:  # `dilated_view` would merge some dims
            return None
        found[x] = node
    return found


def dilated_view(node: Node) -> View:
    """Return a view of a dilate's operand in the shape of its result, to plan accesses with.

    Its strides are those of neighbours in memory times the steps, so that no dilated dim merges with another one.
    """
    assert isinstance(node.op, Dilate)
    x, shape = node.operands[0].type, node.result.type.shape
    strides = tuple(
        stride * step if size != 1 else 0 for stride, step, size in zip(x.strides, node.op.steps, shape, strict=True)
    )
    return View(shape, strides, x.dtype)


def dilated_names(node: Node, coordinates: Sequence[str | None]) -> tuple[tuple[str | None, ...], str]:
    """Return the coordinates of an element in a dilate's operand, and the condition that there is one, as C.

    coordinates: coordinates of the element in the result; None is zero.
    """
    assert isinstance(node.op, Dilate)
    names: list[str | None] = []
    conditions: list[str] = []
    for name, step, size, count in zip(
        coordinates, node.op.steps, node.op.sizes, node.operands[0].type.shape, strict=True
    ):
        if name is None or (step == 1 and size == count):
            names.append(name)
            continue
        names.append(f"({name} / {step}u)")
        conditions.append(f"{name} % {step}u == 0u")
        if (size - 1) // step >= count:
            conditions.append(f"{name} / {step}u < {count}u")
    return tuple(names), " && ".join(conditions) or "true"
