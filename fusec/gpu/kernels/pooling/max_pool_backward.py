"""Generate the gradient of max pooling, with an epilogue.

A thread computes as many neighbouring elements as the strides are long, from all windows that overlap them. Thus no
element is summed by two threads, and no atomics are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Kernel, Launch, by_value, ceil_div, compute_type
from fusec.gpu.kernels.codegen.pointwise_code import (
    PointwiseCode,
    Space,
    can_generate,
    split_index,
    stride_along,
    widest_vector,
)
from fusec.ir import Node, Value
from fusec.ops import MaxPoolBackward
from fusec.schedule.program import inputs_of

UNROLLED = 256  # taps of all windows of a thread; the compiler decides about larger loops
KEPT = 64  # numbers that a thread sums in registers


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


def pool_backward(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
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
    steps = [[stride_along(t, rank, 1), *(stride_along(t, rank, d) for d in range(rank) if d != 1)] for t in types]
    vector = widest_vector(x.type.shape[1], types, steps) if packs else 1
    while vector > 1 and vector * tile > KEPT:
        vector //= 2
    pack = ("pack", x.type.shape[1] // vector)

    def setup(names: Sequence[str], counts: Sequence[int]) -> tuple[list[str], int]:
        """Declare a thread for each place in space and vector of channels; return the grid, too."""
        sizes = [("c0", x.type.shape[0]), *zip(names, counts, strict=True)]
        sizes = [*sizes, pack] if packs else [sizes[0], pack, *sizes[1:]]
        total = math.prod(size for _, size in sizes)
        lines = [f"const u32 i = blockIdx.x * {BLOCK}u + threadIdx.x;", f"if (i >= {by_value(total)}) return;"]
        return [*lines, *split_index("i", sizes), f"const u32 c1 = pack * {vector}u;"], ceil_div(total, BLOCK)

    # Where windows overlap, a first launch finds the maximum of each, because several threads need it.
    taps = math.prod(op.window)
    index = "u8" if taps < 1 << 8 else "u16"
    apart = math.prod(d.windows for d in dims) > 1 and taps < 1 << 16
    launches: list[Launch] = []
    if apart:
        arguments = Arguments()
        lines, grid = setup([f"o{d}" for d in range(n)], [d.count for d in dims])
        lines += [*_find_largest(x, dims, vector, arguments), f"Pack<{index}, {vector}> kept;"]
        lines.append(f"for (int j = 0; j < {vector}; ++j) kept.v[j] = ({index})where[j];")
        place = Space(dy.type.shape, ("c0", "c1", *(f"o{d}" for d in range(n)))).offset(dy.type)
        lines.append(f"store_pack<{index}, {vector}>({arguments.scratch(index)} + ({place}), kept);")
        launches.append(arguments.launch(f"{op.name}_places", lines, grid))
    arguments = Arguments()
    lines, grid = setup([f"i{d}" for d in range(n)], [d.tiles for d in dims])
    lines += _sum_gradients(pool, dims, vector, arguments, index if apart else "")
    unroll = ["#pragma unroll"] if _is_small(dims) else []
    for d, dim in enumerate(dims):
        lines += [*unroll, f"for (int u{d} = 0; u{d} < {dim.stride}; ++u{d}) {{"]
        lines.append(
            f"  const u32 c{d + 2} = i{d} * {dim.stride}u + u{d} - {dim.pad}u;"
        )  # negative numbers wrap to large ones
        lines.append(f"  if (c{d + 2} >= {dim.size}u) continue;")
    space = Space(x.type.shape, tuple(f"c{d}" for d in range(rank)), 1, vector)
    code = PointwiseCode(space, arguments)
    code.define(dx, f"sums[{_place('u', dims, 'stride')}][j]")
    for node in rest:
        code.apply(node)
    for value in outputs:
        code.store(value)
    launches.append(arguments.launch(op.name, [*lines, *code.lines(), *["}"] * n], grid))
    return Kernel(name, tuple(launches), dy.type.size * (1 if index == "u8" else 2) if apart else 0)


def _is_small(dims: Sequence[_Dim]) -> bool:
    return math.prod(d.windows * d.window for d in dims) <= UNROLLED


def _place(letter: str, dims: Sequence[_Dim], extent: str) -> str:
    """Return the row-major index of a tap, or element, from its coordinates."""
    text = f"{letter}0"
    for d, dim in enumerate(dims[1:], 1):
        text = f"({text}) * {getattr(dim, extent)} + {letter}{d}"
    return text


def _find_largest(x: Value, dims: Sequence[_Dim], vector: int, arguments: Arguments) -> list[str]:
    """Find the first of the largest taps of the window at o0, o1 and so on, as `where`.

    NaN is the largest of all, and elements outside x are the smallest.
    """
    kind, number = C_TYPES[x.type.dtype], compute_type(x.type.dtype)
    unroll = ["#pragma unroll"] if _is_small(dims) else []
    lines = [f"{number} best[{vector}]; int where[{vector}];"]
    lines.append(f"for (int j = 0; j < {vector}; ++j) {{ best[j] = {number}(-INFINITE); where[j] = 0; }}")
    for d, dim in enumerate(dims):
        lines += [*unroll, f"for (int k{d} = 0; k{d} < {dim.window}; ++k{d}) {{"]
        lines.append(f"  const int p{d} = (int)o{d} * {dim.stride} + k{d} * {dim.dilation} - {dim.pad};")
        lines.append(f"  if ((u32)p{d} >= {dim.size}u) continue;")
    at = Space(x.type.shape, ("c0", "c1", *(f"p{d}" for d in range(len(dims))))).offset(x.type)
    pack = f"Pack<{kind}, {vector}>"
    lines.append(f"  const {pack} taken = load_pack<{kind}, {vector}>({arguments.read(x)} + ({at}));")
    lines += ["  #pragma unroll", f"  for (int j = 0; j < {vector}; ++j) {{"]
    lines.append(f"    const {number} e = wide(taken.v[j]);")
    lines.append("    if (!(e <= best[j]) && best[j] == best[j]) {")
    lines.append(f"      best[j] = e; where[j] = {_place('k', dims, 'window')};")
    return [*lines, "    }", "  }", *["}"] * len(dims)]


def _sum_gradients(pool: Node, dims: Sequence[_Dim], vector: int, arguments: Arguments, kept: str) -> list[str]:
    """Sum the thread's gradients in `sums`: each window's gradient goes to the first of its largest taps.

    kept: the C type of that tap's number in scratch memory; empty if it has to be found.
    """
    dy, x = pool.operands
    kind, number, n = C_TYPES[x.type.dtype], compute_type(x.type.dtype), len(dims)
    unroll = ["#pragma unroll"] if _is_small(dims) else []
    tile = math.prod(d.stride for d in dims)
    lines = [f"{number} sums[{tile}][{vector}];"]
    lines.append(f"for (int q = 0; q < {tile}; ++q) for (int j = 0; j < {vector}; ++j) sums[q][j] = {number}(0);")
    for d, dim in enumerate(dims):
        lines += [*unroll, f"for (int w{d} = 0; w{d} < {dim.windows}; ++w{d}) {{"]
        lines += [f"  const int o{d} = (int)i{d} - w{d};", f"  if ((u32)o{d} >= {dim.count}u) continue;"]
    at = Space(dy.type.shape, ("c0", "c1", *(f"o{d}" for d in range(n)))).offset(dy.type)
    if kept:
        pointer = arguments.scratch(f"const {kept}")
        lines.append(f"const Pack<{kept}, {vector}> places = load_pack<{kept}, {vector}>({pointer} + ({at}));")
        where = "places.v[j]"
    else:
        lines += _find_largest(x, dims, vector, arguments)
        where = "where[j]"
    pack = f"Pack<{kind}, {vector}>"
    lines.append(f"const {pack} loss = load_pack<{kind}, {vector}>({arguments.read(dy)} + ({at}));")
    for d, dim in enumerate(dims):
        lines += [*unroll, f"for (int u{d} = 0; u{d} < {dim.stride}; ++u{d}) {{"]
        lines.append(f"  const int g{d} = w{d} * {dim.stride} + u{d}, t{d} = g{d} / {dim.dilation};")
        lines.append(f"  if (g{d} % {dim.dilation} || t{d} >= {dim.window}) continue;")
    tap, place = _place("t", dims, "window"), _place("u", dims, "stride")
    lines += ["  #pragma unroll", f"  for (int j = 0; j < {vector}; ++j)"]
    lines.append(f"    if ({where} == {tap}) sums[{place}][j] += wide(loss.v[j]);")
    return [*lines, *["}"] * (2 * n)]
