"""Generate the rotary embedding, which combines each element with the one half a row away.

The operand may be part of a larger tensor, and pointwise ops may follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.indexing import VIEW_OPS, Strided, source
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Kernel, by_value, ceil_div, compute_type
from fusec.gpu.kernels.codegen.pointwise_code import (
    PointwiseCode,
    Space,
    can_generate,
    split_index,
    stride_along,
    widest_vector,
)
from fusec.ir import Node, Value
from fusec.ops import Rotary
from fusec.schedule.program import inputs_of


def rotary(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """Return the kernel of a rotary embedding, with views before and pointwise ops after it; None for other steps."""
    at = next((i for i, node in enumerate(nodes) if not isinstance(node.op, VIEW_OPS)), len(nodes) - 1)
    views, turn, epilogue = nodes[:at], nodes[at], nodes[at + 1 :]
    if not isinstance(turn.op, Rotary) or not all(can_generate(node) for node in epilogue):
        return None
    (x, cos, sin), y = turn.operands, turn.result
    read = source(x, views)
    if read is None or any(v in node.results for node in views for v in (*outputs, cos, sin)):
        return None
    if any(v in node.results for node in views for later in epilogue for v in later.operands):
        return None
    memory, laid = read
    if any(v.type.shape != y.type.shape for v in outputs) or y.type.size >= 1 << 31 or y.type.dtype not in C_TYPES:
        return None
    name = "+".join(node.op.name for node in nodes)
    if y.type.size == 0:
        return Kernel(name, ())
    rank, half = y.type.rank, y.type.shape[-1] // 2
    along = rank - 1
    types: list[Strided] = [laid, *(v.type for v in outputs)]
    types += [v.type for v in inputs_of((turn, *epilogue)) if v.type.size != 1 and v is not x]
    steps = [[stride_along(t, rank, along), *(stride_along(t, rank, d) for d in range(rank - 1))] for t in types]
    steps[0].append(laid.start)
    vector = widest_vector(half, types, steps)  # neighbours are in the same half
    dims = [d for d in y.type.order or range(rank) if d != along]
    total = y.type.size // vector
    lines = [f"const u32 i = blockIdx.x * {BLOCK}u + threadIdx.x;", f"if (i >= {by_value(total)}) return;"]
    lines += split_index("i", [*((f"c{d}", y.type.shape[d]) for d in dims), ("pack", y.type.shape[along] // vector)])
    lines.append(f"const u32 c{along} = pack * {vector}u;")
    lines.append(f"const bool front = c{along} < {half}u;")
    lines.append(f"const u32 away = front ? c{along} + {half}u : c{along} - {half}u;")
    number, names, arguments = compute_type(y.type.dtype), [f"c{d}" for d in range(rank)], Arguments()
    other = PointwiseCode(Space(x.type.shape, (*names[:-1], "away"), along, vector), arguments, "o")
    away = other.get(x, laid, memory)
    other.body.append(f"turned[j] = front ? -{away} : {away};")
    lines += [f"{number} turned[{vector}];", *other.lines()]
    code = PointwiseCode(Space(y.type.shape, tuple(names), along, vector), arguments)
    code.define(y, f"{code.get(x, laid, memory)} * {code.get(cos)} + turned[j] * {code.get(sin)}")
    for node in epilogue:
        code.apply(node)
    for value in outputs:
        code.store(value)
    return Kernel(name, (arguments.launch("rotary", [*lines, *code.lines()], ceil_div(total, BLOCK)),))
