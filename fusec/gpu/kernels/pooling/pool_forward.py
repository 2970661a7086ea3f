"""Generate max and average pooling over one to three dims, in any memory order, with an epilogue.

A thread computes one result, or several neighbouring channels, which have the same window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, HALVES, Arguments, Kernel, by_value, ceil_div, compute_type
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import (
    MAX_VECTOR,
    VECTOR_BYTES,
    PointwiseCode,
    Space,
    can_generate,
    rounded_to,
    split_index,
    strides_from,
    widest_vector,
)
from fusec.gpu.kernels.pooling.max_pool_train import max_pool_train
from fusec.ir import DType, Node, Op, Value
from fusec.ops import AvgPool, MaxPool, MaxPoolTrain
from fusec.schedule.program import inputs_of

UNROLLED = 64  # taps; the compiler decides about larger loops
WORD = 4  # bytes
Names = Sequence[str | None]  # the C expression of each coordinate; None is zero
_CUDA = cuda_template(__package__, "pool.cuh")


def pool_forward(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a pool and its epilogue; None for other steps."""
    pool, rest = nodes[0], nodes[1:]
    if isinstance(pool.op, MaxPoolTrain):
        return max_pool_train(nodes, outputs)
    if not isinstance(pool.op, (MaxPool, AvgPool)) or not all(can_generate(node) for node in rest):
        return None
    x, y = pool.operands[0], pool.result
    if x.type.dtype not in C_TYPES or any(v.type.shape != y.type.shape for v in outputs):
        return None
    name = "+".join(node.op.name for node in nodes)
    if y.type.size == 0:
        return Kernel(name, ())
    rank, order = y.type.rank, y.type.order or tuple(range(y.type.rank))
    dims = [d for d in order if y.type.shape[d] != 1] or [order[-1]]
    along = dims[-1]
    read = [v.type for v in inputs_of(rest) if v.type.size != 1 and v is not y]
    # neighbours are channels, which have the same window
    types = [*(v.type for v in outputs), x.type, *read] if along == 1 and x.type.strides[1] == 1 else []
    steps = [strides_from(t, rank, along) for t in types]
    in_words = not rest and _may_read_words(pool, figures)
    most = VECTOR_BYTES if in_words else MAX_VECTOR
    vector = widest_vector(y.type.shape[along], types, steps, most=most) if types else 1
    total = y.type.size // vector
    big = max(x.type.size, y.type.size) >= 1 << 31
    c_type = "u64" if big else "u32"
    lines = [
        f"const {c_type} i = ({c_type})blockIdx.x * {BLOCK}u + threadIdx.x;",
        f"if (i >= {by_value(total, long=True)}) return;",
    ]
    sizes = [(f"c{d}", y.type.shape[d]) for d in dims[:-1]]
    lines += split_index("i", [*sizes, ("pack", y.type.shape[along] // vector)], big)
    lines.append(f"const {c_type} c{along} = pack * {vector}u;")
    names = tuple(f"c{d}" if d in dims else None for d in range(rank))
    arguments = Arguments()
    space = Space(y.type.shape, names, along, vector)
    if in_words and vector % WORD == 0:
        lines += _words(pool, space, arguments)
    else:
        lines += _windows(pool, names, vector, arguments)
        code = PointwiseCode(space, arguments, known={y: "pooled[j]"})
        code.compute(rest, outputs)
        lines += code.lines()
    return Kernel(name, (arguments.early_launch(pool.op.name, lines, ceil_div(total, BLOCK)),))


def _may_read_words(pool: Node, figures: GpuFigures) -> bool:
    """Tell if a thread may find its largest bytes as halves of words, for which Hopper has an instruction."""
    return isinstance(pool.op, MaxPool) and pool.result.type.dtype is DType.I8 and figures.has("sm_90")


def _words(pool: Node, space: Space, arguments: Arguments) -> list[str]:
    """Store the largest bytes of a thread's windows."""
    cuda = _CUDA.bind(WORDS=space.vector // WORD)
    body = cuda("pool_tap_of_bytes", ELEMENTS=_elements(pool, space.names, arguments))
    stored = f"{arguments.write(pool.result)} + {space.offset(pool.result.type)}"
    return cuda("pool_bytes", EACH_TAP=_each_tap(pool, space.names, body), STORED=stored)


def _windows(pool: Node, names: Names, vector: int, arguments: Arguments) -> list[str]:
    """Compute the results of a thread's windows in `pooled`."""
    dtype = pool.operands[0].type.dtype
    cuda = _CUDA.bind(TYPE=C_TYPES[dtype], NUMBER=compute_type(dtype), VECTOR=vector)
    elements = _elements(pool, names, arguments)
    if isinstance(pool.op, MaxPool):
        taps = _each_tap(pool, names, cuda("largest_tap", ELEMENTS=elements))
        return cuda(
            "pool_window", START=_lowest(dtype), EACH_TAP=taps, COUNT_TAPS=[], RESULT=rounded_to("pooled[j]", dtype)
        )
    inside = [f"(unsigned)p{d} < {size}u" for d, size in enumerate(pool.operands[0].type.shape[2:])]
    body = cuda("sum_tap", ELEMENTS=elements, IS_INSIDE=" && ".join(inside))
    taps, (counts, average) = _each_tap(pool, names, body, "every_tap"), _average(pool, names)
    return cuda(
        "pool_window", START=literal(0, dtype), EACH_TAP=taps, COUNT_TAPS=counts, RESULT=rounded_to(average, dtype)
    )


def _average(pool: Node, names: Names) -> tuple[list[str], str]:
    """Return statements that count taps, and the average in C. Sums of halves are multiplied, which is faster."""
    op, dtype = pool.op, pool.operands[0].type.dtype
    number, loops = compute_type(dtype), _loops(pool, names)
    assert isinstance(op, AvgPool)
    if _all_count(pool):
        count, counts = str(math.prod(op.window)), list[str]()
    else:
        count = " * ".join(f"count{d}" for d in range(len(loops)))
        counts = [line for d, loop in enumerate(loops) for line in _CUDA("count_taps", COUNT=f"count{d}", **loop)]
        counts.append(f"const int count = {count} < 1 ? 1 : {count};")
        count = "count"
    if dtype not in HALVES:
        return counts, f"pooled[j] / {number}({count})"
    return [*counts, f"const {number} share = {number}(1) / {number}({count});"], "pooled[j] * share"


def _all_count(pool: Node) -> bool:
    """Tell if all taps of all windows count."""
    op, x, y = pool.op, pool.operands[0].type, pool.result.type
    assert isinstance(op, AvgPool)
    n = x.rank - 2
    dims = zip(x.shape[2:], y.shape[2:], op.window, op.strides, op.dilations, op.pads[:n], op.pads[n:], strict=True)
    for size, results, window, stride, dilation, before, after in dims:
        last = (results - 1) * stride - before + (window - 1) * dilation
        if last >= size + (after if op.count_include_pad else 0) or (before and not op.count_include_pad):
            return False
    return True


def _elements(pool: Node, names: Names, arguments: Arguments) -> str:
    """Return the address of a tap's elements."""
    x = pool.operands[0].type
    pixel = (f"({_index(x.size)})p{d}" for d in range(x.rank - 2))
    return f"{arguments.read(pool.operands[0])} + {Space(x.shape, (*names[:2], *pixel)).offset(x)}"


def _each_tap(pool: Node, names: Names, body: list[str], fragment: str = "each_tap") -> list[str]:
    """Return loops over the taps of a window: those that count, or with `every_tap` all."""
    for loop in reversed(_loops(pool, names)):
        body = _CUDA(fragment, BODY=body, **loop)
    return body


def _loops(pool: Node, names: Names) -> list[dict[str, str | int]]:
    """Return the holes of a loop over the taps of each dim."""
    op, x = pool.op, pool.operands[0].type
    assert isinstance(op, (MaxPool, AvgPool))
    n = x.rank - 2
    spatial = zip(x.shape[2:], op.window, op.strides, op.dilations, op.pads[:n], op.pads[n:], strict=True)
    unroll = "#pragma unroll" if math.prod(op.window) <= UNROLLED else ""
    loops: list[dict[str, str | int]] = []
    for d, (size, window, stride, dilation, before, after) in enumerate(spatial):
        outside = f"p{d} >= {size + after}" if _counts_pads(op) else f"(unsigned)p{d} >= {size}u"
        place = f"(int){names[2 + d] or 0} * {stride} - {before} + k{d} * {dilation}"
        holes = {"TAP": f"k{d}", "TAPS": window, "PIXEL": f"p{d}", "PLACE": place, "OUTSIDE": outside}
        loops.append({**holes, "UNROLL": unroll})
    return loops


def _counts_pads(op: Op) -> bool:
    return isinstance(op, AvgPool) and op.count_include_pad


def _index(size: int) -> str:
    return "i64" if size >= 1 << 31 else "int"


def _lowest(dtype: DType) -> str:
    return f"{compute_type(dtype)}(-INFINITE)" if dtype.is_float else literal(int(np.iinfo(dtype.numpy).min), dtype)
