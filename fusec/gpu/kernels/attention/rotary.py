"""The rotary embedding: each element with the one half a row away, of a part of a larger tensor too, and pointwise ops
behind."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.indexing import MOVES, Laid, source
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Kernel, by_value, ceil_div, compute_type
from fusec.gpu.kernels.codegen.pointwise_code import Chain, Space, decoded, step, takes, widest
from fusec.ir import Node, Value
from fusec.ops import Rotary
from fusec.schedule.program import inputs_of


def rotary(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """The kernel for such an op with views before it and pointwise ops over its result; None if the step is no such
    thing."""
    at = next((i for i, node in enumerate(nodes) if not isinstance(node.op, MOVES)), len(nodes) - 1)
    views, turn, behind = nodes[:at], nodes[at], nodes[at + 1 :]
    if not isinstance(turn.op, Rotary) or not all(takes(node) for node in behind):
        return None
    (x, cos, sin), y = turn.operands, turn.result
    read = source(x, views)
    if read is None or any(v in node.results for node in views for v in (*outputs, cos, sin)):
        return None
    if any(v in node.results for node in views for later in behind for v in later.operands):
        return None
    memory, laid = read
    if any(v.type.shape != y.type.shape for v in outputs) or y.type.size >= 1 << 31 or y.type.dtype not in C_TYPES:
        return None
    name = "+".join(node.op.name for node in nodes)
    if y.type.size == 0:
        return Kernel(name, ())
    rank, half = y.type.rank, y.type.shape[-1] // 2
    along = rank - 1
    types: list[Laid] = [laid, *(v.type for v in outputs)]
    types += [v.type for v in inputs_of((turn, *behind)) if v.type.size != 1 and v is not x]
    steps = [[step(t, rank, along), *(step(t, rank, d) for d in range(rank - 1))] for t in types]
    steps[0].append(laid.start)
    vector = widest(half, types, steps)  # neighbours lie in one half
    dims = [d for d in y.type.order or range(rank) if d != along]
    total = y.type.size // vector
    lines = [f"const u32 i = blockIdx.x * {BLOCK}u + threadIdx.x;", f"if (i >= {by_value(total)}) return;"]
    lines += decoded("i", [*((f"c{d}", y.type.shape[d]) for d in dims), ("pack", y.type.shape[along] // vector)])
    lines.append(f"const u32 c{along} = pack * {vector}u;")
    lines.append(f"const bool front = c{along} < {half}u;")
    lines.append(f"const u32 away = front ? c{along} + {half}u : c{along} - {half}u;")
    number, names, arguments = compute_type(y.type.dtype), [f"c{d}" for d in range(rank)], Arguments()
    other = Chain(Space(x.type.shape, (*names[:-1], "away"), along, vector), arguments, "o")
    away = other.get(x, laid, memory)
    other.inside.append(f"turned[j] = front ? -{away} : {away};")
    lines += [f"{number} turned[{vector}];", *other.lines()]
    chain = Chain(Space(y.type.shape, tuple(names), along, vector), arguments)
    chain.define(y, f"{chain.get(x, laid, memory)} * {chain.get(cos)} + turned[j] * {chain.get(sin)}")
    for node in behind:
        chain.apply(node)
    for value in outputs:
        chain.store(value)
    return Kernel(name, (arguments.launch("rotary", [*lines, *chain.lines()], ceil_div(total, BLOCK)),))
