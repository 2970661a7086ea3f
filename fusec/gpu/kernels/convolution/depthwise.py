"""Generate depthwise convolution with an epilogue.

A thread computes a strip of results along the last dim for some neighbouring channels, because each column of the image
is then read once for all windows of the strip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Kernel, by_value, ceil_div, compute_type
from fusec.gpu.kernels.codegen.pointwise_code import (
    PointwiseCode,
    Space,
    can_generate,
    split_index,
    stride_along,
    widest_vector,
)
from fusec.gpu.kernels.convolution.depthwise_source import DepthwiseSource, DepthwiseTile
from fusec.ir import Node, TensorType, Value
from fusec.ops import Conv, Reduce
from fusec.schedule.program import inputs_of

STRIP = 4  # results of a thread at most, divided by the stride
ENOUGH_THREADS = 1 << 17  # to fill the largest GPU; with fewer, strips are shorter
MAX_STRIP = 8
MAX_TAPS = 128  # because the taps of a row are unrolled
HELD_FILTERS = 128  # numbers of filters that a thread keeps in registers, at most
MANY = 1 << 30  # blocks: so many that each thread has one turn
UNROLLED_TAPS = 16  # rows are unrolled up to this, because the instruction cache holds no more


def depthwise(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """Return the kernel of a depthwise convolution and its epilogue; None for other steps."""
    conv, rest = nodes[0], nodes[1:]
    if any(isinstance(node.op, Reduce) for node in rest):
        name = "+".join(["depthwise", *(node.op.name for node in rest)])
        found = depthwise_with_mean(nodes, [v for v in outputs if v is not nodes[-1].results[0]])
        kernels = [Kernel(name, blocks.launches(), blocks.scratch_bytes) for blocks in found]
        return replace(kernels[0], others=tuple(kernels[1:])) if kernels else None
    if not is_depthwise(nodes, outputs):
        return None
    y = conv.result
    assert isinstance(conv.op, Conv)
    if y.type.size == 0:
        return Kernel(_name(rest), ())
    vector = _vector(conv, rest, outputs)
    width, total = y.type.shape[-1], y.type.size // vector
    strip = max(1, STRIP // conv.op.strides[-1])
    while strip > 1 and (ceil_div(total, strip) < ENOUGH_THREADS or width < strip):
        strip //= 2
    best = _kernel(nodes, outputs, vector, strip)
    others: dict[tuple[int, int], None] = {}
    for other in ((vector, 2 * strip), (vector, strip // 2), (vector // 2, strip), (vector // 2, 2 * strip)):
        if other[0] >= 1 and 1 <= other[1] <= min(MAX_STRIP, width):
            others[other] = None
    return replace(best, others=tuple(_kernel(nodes, outputs, *other) for other in others))


def is_depthwise(nodes: Sequence[Node], outputs: Sequence[Value]) -> bool:
    """Tell if the nodes are a depthwise convolution and pointwise ops after it."""
    conv, rest = nodes[0], nodes[1:]
    if not isinstance(conv.op, Conv) or not all(can_generate(node) for node in rest):
        return False
    (x, w), y = conv.operands, conv.result
    if conv.op.groups != x.type.shape[1] or w.type.shape[0] != x.type.shape[1]:
        return False
    if any(v.type.shape != y.type.shape for v in outputs) or w.type.size > MAX_TAPS * w.type.shape[0]:
        return False
    return max(x.type.size, y.type.size) < 1 << 31


def depthwise_with_mean(nodes: Sequence[Node], outputs: Sequence[Value]) -> list[DepthwiseSource]:
    """Return the variants of a depthwise convolution whose result is also reduced over space.

    nodes: the convolution, its epilogue, and last the sum or mean over space.
    outputs: results of the epilogue that are stored.
    """
    conv, *rest, mean = nodes
    op, (summed, *_) = mean.op, mean.operands
    if not isinstance(conv.op, Conv) or not isinstance(op, Reduce) or not is_depthwise([conv, *rest], outputs):
        return []
    x, y = conv.operands[0].type, conv.result.type
    if op.kind not in ("sum", "mean") or op.axes != tuple(range(2, y.rank)) or not y.dtype.is_float or not y.size:
        return []
    if summed.node not in nodes or summed.type.shape != y.shape or y.strides[1] != 1 or x.strides[1] != 1:
        return []
    taps = conv.operands[1].type.size // y.shape[1]
    vector = _vector(conv, rest, outputs)
    width, height, strip = y.shape[-1], y.shape[-2] if y.rank > 3 else 1, max(1, STRIP // conv.op.strides[-1])
    half = max(1, vector // 2)
    tiles = [
        DepthwiseTile(vector, strip),
        DepthwiseTile(half, strip, blocks=MANY),
        DepthwiseTile(vector, strip, blocks=MANY),
        DepthwiseTile(vector, 7),
    ]
    tiles += [
        DepthwiseTile(half, 2 * strip, blocks=MANY),
        DepthwiseTile(vector, 2),
        DepthwiseTile(half, 2, blocks=MANY),
    ]
    tiles += [
        DepthwiseTile(each, s, r, True)
        for each, s, r in ((half, 4, 1), (half, 2, 2), (half, 7, 1), (vector // 4, 7, 1))
    ]
    fitting = [
        tile
        for tile in tiles
        if tile.vector
        and tile.strip <= width
        and tile.rows <= height
        and taps * tile.vector * tile.held <= HELD_FILTERS
    ]
    tiles = fitting or [DepthwiseTile(vector, 1)]
    return [DepthwiseSource(conv, rest, outputs, mean, tile) for tile in dict.fromkeys(tiles)]


def _vector(conv: Node, rest: Sequence[Node], outputs: Sequence[Value]) -> int:
    """Return how many neighbouring channels a thread can handle."""
    x, y = conv.operands[0], conv.result
    read = [v.type for v in inputs_of(rest) if v.type.size != 1 and v is not y]
    rank = y.type.rank
    types = [*(v.type for v in outputs), x.type, *read]
    steps = [[stride_along(t, rank, 1), *(stride_along(t, rank, d) for d in range(rank) if d != 1)] for t in types]
    return widest_vector(y.type.shape[1], types, steps) if y.type.strides[1] == x.type.strides[1] == 1 else 1


def _kernel(nodes: Sequence[Node], outputs: Sequence[Value], vector: int, strip: int) -> Kernel:
    """Return the kernel whose threads compute `strip` results of `vector` channels."""
    conv, rest = nodes[0], nodes[1:]
    filters, y = _stored_filters(conv.operands[1]), conv.result
    rank, width, total = y.type.rank, y.type.shape[-1], y.type.size // vector
    strips = ceil_div(width, strip)
    threads = total // width * strips
    sizes = [(f"c{d}", y.type.shape[d]) for d in y.type.order or range(rank)]
    counts = {"c1": ("pack", y.type.shape[1] // vector), f"c{rank - 1}": ("strip", strips)}
    lines = [f"const u32 i = blockIdx.x * {BLOCK}u + threadIdx.x;", f"if (i >= {by_value(threads)}) return;"]
    lines += split_index("i", [counts.get(name, (name, size)) for name, size in sizes])
    lines.append(f"const u32 c1 = pack * {vector}u;")
    arguments = Arguments()
    lines += _sums(conv, filters, vector, strip, arguments)
    names = tuple(f"c{d}" for d in range(rank))
    code = PointwiseCode(Space(y.type.shape, names, 1, vector), arguments, rounds=False)
    code.define(y, "acc[s][j]")
    for node in rest:
        code.apply(node)
    for value in outputs:
        code.store(value)
    lines += ["#pragma unroll", f"for (int s = 0; s < {strip}; ++s) {{"]
    lines.append(f"  const u32 c{rank - 1} = strip * {strip}u + s;")
    lines.append(f"  if (c{rank - 1} >= {width}u) break;")
    lines += [*(f"  {line}" for line in code.lines()), "}"]
    return Kernel(_name(rest), (arguments.launch("depthwise", lines, ceil_div(threads, BLOCK)),))


def _name(rest: Sequence[Node]) -> str:
    return "+".join(["depthwise", *(node.op.name for node in rest)])


def _stored_filters(w: Value) -> TensorType:
    """Return the memory order of the filters: constant ones with channels innermost."""
    return w.type if w.literal is None else w.type.with_order((*range(2, w.type.rank), 0, 1))


def _sums(conv: Node, filters: TensorType, vector: int, strip: int, arguments: Arguments) -> list[str]:
    """Compute the sums of products in `acc`."""
    op, x = conv.op, conv.operands[0].type
    assert isinstance(op, Conv)
    kind, number, n = C_TYPES[x.dtype], compute_type(x.dtype), x.rank - 2
    image, weights = arguments.read(conv.operands[0]), arguments.read(conv.operands[1], filters)
    window, stride, dilation, pad = filters.shape[2:], op.strides[-1], op.dilations[-1], op.pads[n - 1]
    columns = (strip - 1) * stride + (window[-1] - 1) * dilation + 1
    lines = [f"{number} acc[{strip}][{vector}];"]
    lines.append(f"for (int s = 0; s < {strip}; ++s) for (int j = 0; j < {vector}; ++j) acc[s][j] = 0;")
    closes: list[str] = []
    for d in range(n - 1):
        unroll = "#pragma unroll" if filters.size // filters.shape[0] <= UNROLLED_TAPS else "#pragma unroll 1"
        lines += [unroll, f"for (int k{d} = 0; k{d} < {window[d]}; ++k{d}) {{"]
        lines.append(f"const int p{d} = (int)c{2 + d} * {op.strides[d]} - {op.pads[d]} + k{d} * {op.dilations[d]};")
        lines.append(f"if ((u32)p{d} >= {x.shape[2 + d]}u) continue;")
        closes.append("}")
    tap = " + ".join(["c1 * " + str(filters.strides[0]), *(f"k{d} * {filters.strides[2 + d]}" for d in range(n))])
    lines += [f"{number} weight[{window[-1]}][{vector}];", "#pragma unroll"]
    lines.append(f"for (int k{n - 1} = 0; k{n - 1} < {window[-1]}; ++k{n - 1}) {{")
    if filters.strides[0] == 1 and vector > 1:
        lines.append(f"  const Pack<{kind}, {vector}> taken = load_pack<{kind}, {vector}>({weights} + ({tap}));")
        lines.append(f"  for (int j = 0; j < {vector}; ++j) weight[k{n - 1}][j] = wide(taken.v[j]);")
    else:
        one = f"wide({weights}[{tap} + j * {filters.strides[0]}])"
        lines.append(f"  for (int j = 0; j < {vector}; ++j) weight[k{n - 1}][j] = {one};")
    place = Space(x.shape, ("c0", "c1", *(f"p{d}" for d in range(n)))).offset(x)
    lines += ["}", "#pragma unroll", f"for (int q = 0; q < {columns}; ++q) {{"]
    lines.append(f"  const int p{n - 1} = (int)strip * {strip * stride} - {pad} + q;")
    lines.append(f"  if ((u32)p{n - 1} >= {x.shape[-1]}u) continue;")
    lines.append(f"  const Pack<{kind}, {vector}> taken = load_pack<{kind}, {vector}>({image} + ({place}));")
    lines += ["  #pragma unroll", f"  for (int s = 0; s < {strip}; ++s) {{", f"    const int k = q - s * {stride};"]
    lines.append(f"    if (k < 0 || k % {dilation} != 0 || k / {dilation} >= {window[-1]}) continue;")
    lines.append(f"    for (int j = 0; j < {vector}; ++j) acc[s][j] += wide(taken.v[j]) * weight[k / {dilation}][j];")
    return [*lines, "  }", "}", *closes]
