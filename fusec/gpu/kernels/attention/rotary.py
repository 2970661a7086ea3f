"""Generate the rotary embedding, which combines each element with the one half a row away.

The operand may be part of a larger tensor, and pointwise ops may follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
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


def rotary(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a rotary embedding, with views before and pointwise ops after it; None for other steps."""
    at = next((i for i, node in enumerate(nodes) if not isinstance(node.op, VIEW_OPS)), len(nodes) - 1)
    views, node, epilogue = nodes[:at], nodes[at], nodes[at + 1 :]
    if not isinstance(node.op, Rotary) or not all(map(can_generate, epilogue)):
        return None
    (x, cos, sin), y = node.operands, node.result
    found, viewed = source(x, views), {v for view in views for v in view.results}
    if found is None or any(v in viewed for v in (*outputs, cos, sin)):
        return None
    if any(v in viewed for later in epilogue for v in later.operands):
        return None
    if any(v.type.shape != y.type.shape for v in outputs) or y.type.size >= 1 << 31 or y.type.dtype not in C_TYPES:
        return None
    name = "+".join(node.op.name for node in nodes)
    if y.type.size == 0:
        return Kernel(name, ())
    (memory, view), rank, half = found, y.type.rank, y.type.shape[-1] // 2
    along = rank - 1
    types: list[Strided] = [view, *(v.type for v in outputs)]
    types += [v.type for v in inputs_of((node, *epilogue)) if v.type.size != 1 and v is not x]
    steps = [[stride_along(t, rank, along), *(stride_along(t, rank, d) for d in range(rank - 1))] for t in types]
    steps[0].append(view.start)
    vector = widest_vector(half, types, steps)  # neighbours are in the same half
    sizes = [(f"c{d}", y.type.shape[d]) for d in y.type.order or range(rank) if d != along]
    total, names, arguments = y.type.size // vector, [f"c{d}" for d in range(rank)], Arguments()
    partners = PointwiseCode(Space(x.type.shape, (*names[:-1], "partner"), along, vector), arguments, "o")
    partner = partners.get(x, view, memory)
    partners.body.append(f"rotated[j] = in_first_half ? -{partner} : {partner};")
    code = PointwiseCode(Space(y.type.shape, tuple(names), along, vector), arguments)
    code.define(y, f"{code.get(x, view, memory)} * {code.get(cos)} + rotated[j] * {code.get(sin)}")
    code.compute(epilogue, outputs)
    lines = cuda_template(__package__, "rotary.cuh")(
        "rotary",
        BLOCK=BLOCK,
        COUNT=by_value(total),
        COORDINATES=split_index("i", [*sizes, ("pack", y.type.shape[along] // vector)]),
        COLUMN=names[along],
        VECTOR=vector,
        HALF=half,
        TYPE=compute_type(y.type.dtype),
        LOAD_PARTNERS=partners.lines(),
        RESULT=code.lines(),
    )
    launch = arguments.launch("rotary", [*arguments.begin(), *lines], ceil_div(total, BLOCK))
    return Kernel(name, (replace(launch, early=True),))  # of one token it takes about as long as a launch
