"""Generate the gradient of max pooling, with an epilogue.

A thread computes as many neighbouring elements as the strides are long, from all windows that overlap them. Thus no
element is summed by two threads, and no atomics are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Kernel, Launch, compute_type
from fusec.gpu.kernels.codegen.pointwise_code import (
    PointwiseCode,
    Space,
    can_generate,
    strides_from,
    widest_vector,
)
from fusec.gpu.kernels.pooling.first_maxima import Threads, WindowDim, find_largest, index_in, unrolled, window_dims
from fusec.ir import Node, TensorType, Value
from fusec.ops import MaxPoolBackward
from fusec.schedule.program import inputs_of

MAX_SUMS = 64  # that a thread has in registers
_CUDA = cuda_template(__package__, "pool.cuh")


def max_pool_backward(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a max_pool_backward and its epilogue; None for other steps."""
    pool, rest = nodes[0], nodes[1:]
    if not isinstance(pool.op, MaxPoolBackward) or not all(can_generate(node) for node in rest):
        return None
    (dy, x), dx, op = pool.operands, pool.result, pool.op
    if dx.type.dtype not in C_TYPES or any(v.type.shape != dx.type.shape for v in outputs):
        return None
    name = "+".join(node.op.name for node in nodes)
    if dx.type.size == 0:
        return Kernel(name, ())
    if dx.type.size >= 1 << 31:
        return None
    rank, n = dx.type.rank, dx.type.rank - 2
    dims = window_dims(op, dx.type.shape[2:], dy.type.shape[2:])
    tile = math.prod(d.stride for d in dims)
    read = [v.type for v in inputs_of(rest) if v.type.size != 1 and v is not dx]
    types = [*(v.type for v in outputs), x.type, dy.type, *read]
    packs = all(t.strides[1] == 1 for t in (x.type, dy.type))
    steps = [strides_from(t, rank, 1) for t in types]
    vector = widest_vector(dx.type.shape[1], types, steps) if packs else 1
    while vector > 1 and vector * tile > MAX_SUMS:
        vector //= 2
    threads = Threads(dx.type.shape[0], dx.type.shape[1], vector, packs)
    # Where windows overlap, a first launch finds the maximum of each, because several threads need it.
    taps, given = math.prod(op.window), bool(op.image)
    index = "u8" if given or taps < 1 << 8 else "u16"
    apart = not given and math.prod(d.windows for d in dims) > 1 and taps < 1 << 16
    launches: list[Launch] = []
    dtype = dx.type.dtype
    types_in_c = {"TYPE": C_TYPES[dtype], "NUMBER": compute_type(dtype), "INDEX": index}
    cuda = _CUDA.bind(VECTOR=vector, UNROLL=unrolled(dims), **types_in_c)
    if apart:
        arguments = Arguments()
        lines, grid = threads.setup([f"o{d}" for d in range(n)], [d.count for d in dims])
        lines += find_largest(x, dims, cuda, arguments)
        place = Space(dy.type.shape, ("c0", "c1", *(f"o{d}" for d in range(n)))).offset(dy.type)
        lines += cuda("store_largest", STORED=f"{arguments.scratch(index)} + ({place})")
        launches.append(arguments.early_launch(f"{op.name}_places", lines, grid))
    arguments = Arguments()
    lines, grid = threads.setup([f"i{d}" for d in range(n)], [d.tiles for d in dims])
    lines += _sum_gradients(pool, dims, cuda, arguments, index if apart or given else "")
    space = Space(dx.type.shape, tuple(f"c{d}" for d in range(rank)), 1, vector)
    code = PointwiseCode(space, arguments)
    code.define(dx, f"sums[{index_in('u', dims, 'stride')}][j]")
    code.compute(rest, outputs)
    body = code.lines()
    for d, dim in reversed(tuple(enumerate(dims))):
        body = cuda(
            "each_element",
            ELEMENT=f"u{d}",
            STRIDE=dim.stride,
            COORDINATE=f"c{d + 2}",
            TILE_NUMBER=f"i{d}",
            PAD=dim.pad,
            SIZE=dim.size,
            BODY=body,
        )
    launches.append(arguments.early_launch(op.name, [*lines, *body], grid))
    return Kernel(name, tuple(launches), dy.type.size * (1 if index == "u8" else 2) if apart else 0)


def _sum_gradients(
    pool: Node, dims: Sequence[WindowDim], cuda: CudaTemplate, arguments: Arguments, index: str
) -> list[str]:
    """Sum the gradients of the thread's elements in `sums`.

    index: the C type of the number of a window's largest tap in memory; empty if it has to be found.
    """
    assert isinstance(pool.op, MaxPoolBackward)
    dy, x = pool.operands
    window = Space(dy.type.shape, ("c0", "c1", *(f"o{d}" for d in range(len(dims)))))

    def load(c_type: str, name: str, pointer: str, order: TensorType) -> str:
        pack = f"{c_type}, {cuda.holes['VECTOR']}"
        return f"const Pack<{pack}> {name} = load_pack<{pack}>({pointer} + ({window.offset(order)}));"

    if pool.op.image:  # places that are an operand, in a memory order of their own
        find = [load(index, "places", arguments.read(x), x.type)]
    elif index:
        find = [load(index, "places", arguments.scratch(f"const {index}"), dy.type)]
    else:
        find = find_largest(x, dims, cuda, arguments)
    add = cuda(
        "add_gradient",
        WHERE="places.v[j]" if index else "where[j]",
        TAP_NUMBER=index_in("t", dims, "window"),
        ELEMENT_NUMBER=index_in("u", dims, "stride"),
    )
    for d, dim in reversed(tuple(enumerate(dims))):
        add = cuda(
            "each_overlap",
            ELEMENT=f"u{d}",
            STRIDE=dim.stride,
            GAP=f"g{d}",
            WINDOW=f"w{d}",
            TAP=f"t{d}",
            DILATION=dim.dilation,
            TAPS=dim.window,
            BODY=add,
        )
    body = [*find, load(C_TYPES[dy.type.dtype], "loss", arguments.read(dy), dy.type), *add]
    for d, dim in reversed(tuple(enumerate(dims))):
        body = cuda(
            "each_window",
            WINDOW=f"w{d}",
            WINDOWS=dim.windows,
            OUTPUT=f"o{d}",
            TILE_NUMBER=f"i{d}",
            OUTPUTS=dim.count,
            BODY=body,
        )
    return cuda("sum_gradients", TILE=math.prod(d.stride for d in dims), EACH_WINDOW=body)
