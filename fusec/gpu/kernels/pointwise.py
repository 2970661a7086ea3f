"""Any graph of pointwise ops over one shape as one kernel: each thread computes some neighbours of every result."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusec.gpu.kernels.chain import Chain, Space, decoded, merged, step, takes, widest
from fusec.gpu.kernels.spec import BLOCK, Arguments, Kernel, ceil_div
from fusec.ir import Node, TensorType, Value
from fusec.program import inputs_of


def pointwise(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """The kernel for a step of pointwise ops and casts whose results have one shape; None if it is no such step."""
    shapes = {v.type.shape for v in outputs}
    if len(shapes) != 1 or not all(takes(node) for node in nodes):
        return None
    (shape,) = shapes
    name = "+".join(node.op.name for node in nodes)
    if 0 in shape:
        return Kernel(name, ())
    rank = len(shape)
    types = [*(v.type for v in outputs), *(v.type for v in inputs_of(nodes) if v.type.size != 1)]
    indexed = any(node.op.name == "gen_index" for node in nodes)  # which needs each coordinate for itself
    groups = merged(shape, outputs[0].type.order, [] if indexed else types) or [[rank - 1] if rank else []]
    sizes = [math.prod(shape[d] for d in group) for group in groups]
    along = groups[-1][-1] if groups[-1] else -1
    steps = [[step(t, rank, along) if along >= 0 else 0, *(step(t, rank, g[-1]) for g in groups[:-1])] for t in types]
    vector = widest(sizes[-1], types, steps, exact=len(groups) > 1)
    packs = ceil_div(sizes[-1], vector)
    total = packs * math.prod(sizes[:-1])
    big = _is_big(types, total)
    c_type = "u64" if big else "u32"
    names = {group[-1]: f"c{group[-1]}" for group in groups if group}
    spaced = tuple(names.get(d) for d in range(rank))
    arguments = Arguments()
    lines = [f"const {c_type} i = ({c_type})blockIdx.x * {BLOCK}u + threadIdx.x;", f"if (i >= {total}ull) return;"]
    inner = f"c{along}" if along >= 0 else "c"
    lines += decoded("i", [*((f"c{g[-1]}", n) for g, n in zip(groups[:-1], sizes, strict=False)), ("pack", packs)], big)
    lines.append(f"const {c_type} {inner} = pack * {vector}u;")
    whole = _applied(Space(shape, spaced, along, vector), nodes, outputs, arguments)
    if sizes[-1] % vector == 0:
        lines += whole
    else:  # one dim alone: the last thread has fewer elements than the others
        one = _applied(Space(shape, spaced, along, 1), nodes, outputs, arguments)
        lines += [f"if ({inner} + {vector}u <= {sizes[-1]}u) {{", *whole, "} else {"]
        lines += [f"for ({c_type} at = {inner}; at < {sizes[-1]}u; ++at) {{", f"  const {c_type} {inner} = at;"]
        lines += [*(f"  {line}" for line in one), "}", "}"]
    return Kernel(name, (arguments.launch("pointwise", lines, ceil_div(total, BLOCK)),))


def _applied(space: Space, nodes: Sequence[Node], outputs: Sequence[Value], arguments: Arguments) -> list[str]:
    chain = Chain(space, arguments)
    for node in nodes:
        chain.apply(node)
    for value in outputs:
        chain.store(value)
    return chain.lines()


def _is_big(types: Sequence[TensorType], total: int) -> bool:
    return max([total, *(t.size for t in types)]) >= 1 << 31
