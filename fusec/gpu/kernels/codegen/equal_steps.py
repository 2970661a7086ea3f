"""Write the kernel of equal steps once, because models repeat their layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import Argument, Kernel
from fusec.ir import HALVES, DType, Node, Value

Family = Callable[[Sequence[Node], Sequence[Value], GpuFigures], Kernel | None]
_FLOATS = frozenset({*HALVES, DType.F32})


def once_for_equal_steps(family: Family) -> Family:
    """Let a family write the kernel of equal steps of a graph once. Other steps get it with their own arguments.

    The family reads of a step what `_structure` returns: ops, types and order of nodes, single numbers, and which
    operands are constants. It looks at no node that is not in the step.
    """

    @wraps(family)
    def found(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
        values: dict[Value, int] = {}
        structure = _structure(nodes, outputs, values)
        if structure is None:
            return family(nodes, outputs, figures)
        written, work = nodes[0].graph.memo, (found, figures, structure)
        if work not in written:
            written[work] = family(nodes, outputs, figures), tuple(values)
        kernel, theirs = written[work]
        return None if kernel is None else _with_values(kernel, dict(zip(theirs, values, strict=True)))

    return found


def _structure(nodes: Sequence[Node], outputs: Sequence[Value], values: dict[Value, int]) -> Hashable:
    """Return what equal steps have in common, and number their values; None for steps with other types than floats."""

    def numbered(value: Value) -> tuple[Any, ...]:
        known = values.get(value)
        if known is not None:
            return (known,)
        values[value] = len(values)
        return value.type, value.literal is not None, _bits(value)

    parts: list[Hashable] = []
    for node in nodes:
        if any(value.type.dtype not in _FLOATS for value in (*node.operands, *node.results)):
            return None
        wiring = (*map(numbered, node.operands), *map(numbered, node.results))
        parts.append((repr(node.op), len(node.operands), *wiring))  # repr: 0.0 is not -0.0
    return (*parts, *map(numbered, outputs))


def _bits(value: Value) -> bytes | None:
    """Return the bits of a constant number, which a source may contain."""
    return None if value.literal is None or value.type.size != 1 else value.literal.array.tobytes()


def _with_values(kernel: Kernel, values: Mapping[Value, Value]) -> Kernel:
    """Return a kernel with other values for its arguments."""
    if all(value is other for value, other in values.items()):
        return kernel

    def argument(each: Argument) -> Argument:
        return each if each.value is None else Argument(values[each.value], each.type)

    launches = tuple(replace(each, arguments=tuple(map(argument, each.arguments))) for each in kernel.launches)
    others = tuple(_with_values(other, values) for other in kernel.others)
    return replace(kernel, launches=launches, others=others)
