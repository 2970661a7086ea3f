"""Generate the gradient of max pooling, with an epilogue.

A thread computes as many neighbouring elements as the strides are long, from all windows that overlap them. Thus no
element is summed by two threads, and no atomics are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Kernel, Launch, ceil_div, compute_type
from fusec.gpu.kernels.codegen.pointwise_code import (
    PointwiseCode,
    Space,
    can_generate,
    strides_from,
    thread_index,
    widest_vector,
)
from fusec.ir import Node, Value
from fusec.ops import MaxPoolBackward
from fusec.schedule.program import inputs_of

UNROLLED = 256  # taps of all windows of a thread; the compiler decides about larger loops
MAX_SUMS = 64  # that a thread has in registers
_CUDA = cuda_template(__package__, "pool.cuh")


@dataclass(frozen=True)
class _Dim:
    """One spatial dim.

    size, count: elements of x, and windows.
    """

    size: int
    count: int
    window: int
    stride: int
    dilation: int
    pad: int

    @property
    def tiles(self) -> int:
        """Threads along the dim."""
        return (self.size - 1 + self.pad) // self.stride + 1

    @property
    def windows(self) -> int:
        """Windows that overlap the elements of a thread."""
        return self.dilation * (self.window - 1) // self.stride + 1


def max_pool_backward(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a max_pool_backward and its epilogue; None for other steps."""
    pool, rest = nodes[0], nodes[1:]
    if not isinstance(pool.op, MaxPoolBackward) or not all(can_generate(node) for node in rest):
        return None
    (dy, x), dx, op = pool.operands, pool.result, pool.op
    if x.type.dtype not in C_TYPES or any(v.type.shape != dx.type.shape for v in outputs):
        return None
    name = "+".join(node.op.name for node in nodes)
    if dx.type.size == 0:
        return Kernel(name, ())
    if x.type.size >= 1 << 31:
        return None
    rank, n = x.type.rank, x.type.rank - 2
    spatial = zip(x.type.shape[2:], dy.type.shape[2:], op.window, op.strides, op.dilations, op.pads[:n], strict=True)
    dims = [_Dim(*each) for each in spatial]
    tile = math.prod(d.stride for d in dims)
    read = [v.type for v in inputs_of(rest) if v.type.size != 1 and v is not dx]
    types = [*(v.type for v in outputs), x.type, dy.type, *read]
    packs = all(t.strides[1] == 1 for t in (x.type, dy.type))
    steps = [strides_from(t, rank, 1) for t in types]
    vector = widest_vector(x.type.shape[1], types, steps) if packs else 1
    while vector > 1 and vector * tile > MAX_SUMS:
        vector //= 2
    pack = ("pack", x.type.shape[1] // vector)

    def setup(names: Sequence[str], counts: Sequence[int]) -> tuple[list[str], int]:
        """Declare a thread for each place in space and vector of channels; return the grid, too."""
        sizes = [("c0", x.type.shape[0]), *zip(names, counts, strict=True)]
        sizes = [*sizes, pack] if packs else [sizes[0], pack, *sizes[1:]]
        total = math.prod(size for _, size in sizes)
        return [*thread_index(total, sizes), f"const u32 c1 = pack * {vector}u;"], ceil_div(total, BLOCK)

    # Where windows overlap, a first launch finds the maximum of each, because several threads need it.
    taps = math.prod(op.window)
    index = "u8" if taps < 1 << 8 else "u16"
    apart = math.prod(d.windows for d in dims) > 1 and taps < 1 << 16
    launches: list[Launch] = []
    unroll = "#pragma unroll" if math.prod(d.windows * d.window for d in dims) <= UNROLLED else ""
    cuda = _CUDA.bind(
        TYPE=C_TYPES[x.type.dtype], NUMBER=compute_type(x.type.dtype), VECTOR=vector, UNROLL=unroll, INDEX=index
    )
    if apart:
        arguments = Arguments()
        lines, grid = setup([f"o{d}" for d in range(n)], [d.count for d in dims])
        lines += _find_largest(x, dims, cuda, arguments)
        place = Space(dy.type.shape, ("c0", "c1", *(f"o{d}" for d in range(n)))).offset(dy.type)
        lines += cuda("store_largest", STORED=f"{arguments.scratch(index)} + ({place})")
        launches.append(arguments.launch(f"{op.name}_places", lines, grid))
    arguments = Arguments()
    lines, grid = setup([f"i{d}" for d in range(n)], [d.tiles for d in dims])
    lines += _sum_gradients(pool, dims, cuda, arguments, index if apart else "")
    space = Space(x.type.shape, tuple(f"c{d}" for d in range(rank)), 1, vector)
    code = PointwiseCode(space, arguments)
    code.define(dx, f"sums[{_place('u', dims, 'stride')}][j]")
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
    launches.append(arguments.launch(op.name, [*lines, *body], grid))
    return Kernel(name, tuple(launches), dy.type.size * (1 if index == "u8" else 2) if apart else 0)


def _place(letter: str, dims: Sequence[_Dim], extent: str) -> str:
    """Return the row-major index of a tap, or element, from its coordinates."""
    text = f"{letter}0"
    for d, dim in enumerate(dims[1:], 1):
        text = f"({text}) * {getattr(dim, extent)} + {letter}{d}"
    return text


def _find_largest(x: Value, dims: Sequence[_Dim], cuda: CudaTemplate, arguments: Arguments) -> list[str]:
    """Find the first of the largest taps of the window at o0, o1 and so on, as `where`."""
    at = Space(x.type.shape, ("c0", "c1", *(f"p{d}" for d in range(len(dims))))).offset(x.type)
    tap = _place("k", dims, "window")
    body = cuda("compare_tap", ELEMENTS=f"{arguments.read(x)} + ({at})", TAP_NUMBER=tap)
    for d, dim in reversed(tuple(enumerate(dims))):
        place = f"(int)o{d} * {dim.stride} + k{d} * {dim.dilation} - {dim.pad}"
        outside = f"(u32)p{d} >= {dim.size}u"
        body = cuda("each_tap", TAP=f"k{d}", TAPS=dim.window, PIXEL=f"p{d}", PLACE=place, OUTSIDE=outside, BODY=body)
    return cuda("find_largest", EACH_TAP=body)


def _sum_gradients(pool: Node, dims: Sequence[_Dim], cuda: CudaTemplate, arguments: Arguments, index: str) -> list[str]:
    """Sum the gradients of the thread's elements in `sums`.

    index: the C type of the number of a window's largest tap in scratch memory; empty if it has to be found.
    """
    dy, x = pool.operands
    at = Space(dy.type.shape, ("c0", "c1", *(f"o{d}" for d in range(len(dims))))).offset(dy.type)

    def load(c_type: str, name: str, pointer: str) -> str:
        pack = f"{c_type}, {cuda.holes['VECTOR']}"
        return f"const Pack<{pack}> {name} = load_pack<{pack}>({pointer} + ({at}));"

    if index:
        find = [load(index, "places", arguments.scratch(f"const {index}"))]
    else:
        find = _find_largest(x, dims, cuda, arguments)
    add = cuda(
        "add_gradient",
        WHERE="places.v[j]" if index else "where[j]",
        TAP_NUMBER=_place("t", dims, "window"),
        ELEMENT_NUMBER=_place("u", dims, "stride"),
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
    body = [*find, load(C_TYPES[x.type.dtype], "loss", arguments.read(dy)), *add]
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
