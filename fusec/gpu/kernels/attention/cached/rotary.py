"""Generate the rotary embedding, which combines each element with the one half a row away.

The operand may be part of a larger tensor, and pointwise ops may follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.indexing import VIEW_OPS, Strided, View, source
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Kernel, by_value, ceil_div, compute_type
from fusec.gpu.kernels.codegen.pointwise_code import (
    PointwiseCode,
    Space,
    can_generate,
    split_index,
    strides_from,
    widest_vector,
)
from fusec.ir import Node, TensorType, Value
from fusec.ops import Rotary
from fusec.schedule.program import inputs_of

CUDA = cuda_template(__package__, "rotary.cuh")


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
    rank, along = y.type.rank, y.type.rank - 1
    vector = neighbours(node, found[1], outputs, epilogue)
    sizes = [(f"c{d}", y.type.shape[d]) for d in y.type.order or range(rank) if d != along]
    total, arguments = y.type.size // vector, Arguments()
    lines = CUDA(
        "rotary",
        BLOCK=BLOCK,
        COUNT=by_value(total),
        COORDINATES=split_index("i", [*sizes, ("pack", y.type.shape[along] // vector)]),
        COLUMN=f"c{along}",
        VECTOR=vector,
        ROTATE=rotate(node, found, vector, arguments, lambda code: code.compute(epilogue, outputs)),
    )
    launch = arguments.launch("rotary", [*arguments.begin(), *lines], ceil_div(total, BLOCK))
    return Kernel(name, (replace(launch, dependent=True),))  # of one token it takes about as long as a launch


def neighbours(node: Node, view: View, outputs: Sequence[Value], epilogue: Sequence[Node] = ()) -> int:
    """Return how many neighbours in the last dim, all in the same half, a thread can compute.

    view: memory of the operand.
    outputs: values of the result's shape that are stored.
    """
    x, y = node.operands[0], node.result.type
    types: list[Strided] = [view, *(v.type for v in outputs)]
    types += [v.type for v in inputs_of((node, *epilogue)) if v.type.size != 1 and v is not x]
    steps = [strides_from(t, y.rank, y.rank - 1) for t in types]
    steps[0].append(view.start)
    return widest_vector(y.shape[-1] // 2, types, steps)


def element_coordinates(type: TensorType) -> list[str]:
    """Return the statements that find the coordinates c0, c1 and so on of `element`, in the order of memory."""
    return split_index("element", [(f"c{d}", type.shape[d]) for d in type.order or range(type.rank)])


def rotate(
    node: Node,
    source: tuple[Value, View],
    vector: int,
    arguments: Arguments,
    finish: Callable[[PointwiseCode], None],
) -> list[str]:
    """Return the statements that compute neighbours of the result at the coordinates c0, c1 and so on.

    source: the value whose memory holds the operand, and the view of it.
    vector: neighbours in the last dim, all in the same half.
    finish: adds to the code what follows the embedding.
    """
    (x, cos, sin), y = node.operands, node.result
    (memory, view), along = source, y.type.rank - 1
    names = [f"c{d}" for d in range(y.type.rank)]
    partners = PointwiseCode(Space(x.type.shape, (*names[:-1], "partner"), along, vector), arguments, "o")
    partner = partners.get(x, view, memory)
    partners.body.append(f"rotated[j] = in_first_half ? -{partner} : {partner};")
    code = PointwiseCode(Space(y.type.shape, tuple(names), along, vector), arguments)
    code.define(y, f"{code.get(x, view, memory)} * {code.get(cos)} + rotated[j] * {code.get(sin)}")
    finish(code)
    return CUDA(
        "rotate",
        COLUMN=names[along],
        VECTOR=vector,
        HALF=y.type.shape[along] // 2,
        TYPE=compute_type(y.type.dtype),
        LOAD_PARTNERS=partners.lines(),
        RESULT=code.lines(),
    )
