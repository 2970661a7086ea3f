"""Depthwise convolution with pointwise ops behind it: a thread computes a strip of results along the last dim for some
neighbouring channels, so that each column of the image is read once for all the windows of the strip it is in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Kernel, by_value, ceil_div, compute_type
from fusec.gpu.kernels.codegen.pointwise_code import Chain, Space, decoded, step, takes, widest
from fusec.gpu.kernels.convolution.depthwise_source import Blocks, Tile
from fusec.ir import Node, TensorType, Value
from fusec.ops import Conv, Reduce
from fusec.schedule.program import inputs_of

STRIP = 4  # results of a thread at most, divided by the stride
ENOUGH_THREADS = 1 << 17  # to fill the largest GPU; with fewer, strips are shorter
MAX_STRIP = 8
MAX_TAPS = 128  # of which each row's are unrolled
HELD_FILTERS = 128  # numbers that a thread keeps in registers over its turns, at most
MANY = 1 << 30  # blocks: as many as there is work for, each thread's turn being its only one
UNROLLED_TAPS = 16  # the rows, too: more are more code than the instruction cache holds


def depthwise(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """The kernel for a convolution of each channel for itself and pointwise ops over its result; None if the step is
    no such thing."""
    conv, rest = nodes[0], nodes[1:]
    if any(isinstance(node.op, Reduce) for node in rest):
        name = "+".join(["depthwise", *(node.op.name for node in rest)])
        found = with_mean(nodes, [v for v in outputs if v is not nodes[-1].results[0]])
        kernels = [Kernel(name, blocks.launches(), blocks.scratch_bytes) for blocks in found]
        return replace(kernels[0], others=tuple(kernels[1:])) if kernels else None
    if not is_for(nodes, outputs):
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


def is_for(nodes: Sequence[Node], outputs: Sequence[Value]) -> bool:
    """Whether the nodes are a convolution of each channel for itself and pointwise ops over its result."""
    conv, rest = nodes[0], nodes[1:]
    if not isinstance(conv.op, Conv) or not all(takes(node) for node in rest):
        return False
    (x, w), y = conv.operands, conv.result
    if conv.op.groups != x.type.shape[1] or w.type.shape[0] != x.type.shape[1]:
        return False
    if any(v.type.shape != y.type.shape for v in outputs) or w.type.size > MAX_TAPS * w.type.shape[0]:
        return False
    return max(x.type.size, y.type.size) < 1 << 31


def with_mean(nodes: Sequence[Node], outputs: Sequence[Value]) -> list[Blocks]:
    """Ways to compute a depthwise convolution, pointwise ops over its result that store `outputs`, and, the last node,
    the sum or mean over space of what comes of it; none if the nodes are no such thing."""
    conv, *rest, mean = nodes
    op, (summed, *_) = mean.op, mean.operands
    if not isinstance(conv.op, Conv) or not isinstance(op, Reduce) or not is_for([conv, *rest], outputs):
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
    tiles = [Tile(vector, strip), Tile(half, strip, blocks=MANY), Tile(vector, strip, blocks=MANY), Tile(vector, 7)]
    tiles += [Tile(half, 2 * strip, blocks=MANY), Tile(vector, 2), Tile(half, 2, blocks=MANY)]
    tiles += [Tile(each, s, r, True) for each, s, r in ((half, 4, 1), (half, 2, 2), (half, 7, 1), (vector // 4, 7, 1))]
    fitting = [
        tile
        for tile in tiles
        if tile.vector
        and tile.strip <= width
        and tile.rows <= height
        and taps * tile.vector * tile.held <= HELD_FILTERS
    ]
    tiles = fitting or [Tile(vector, 1)]
    return [Blocks(conv, rest, outputs, mean, tile) for tile in dict.fromkeys(tiles)]


def _vector(conv: Node, rest: Sequence[Node], outputs: Sequence[Value]) -> int:
    """How many neighbouring channels a thread can take."""
    x, y = conv.operands[0], conv.result
    read = [v.type for v in inputs_of(rest) if v.type.size != 1 and v is not y]
    rank = y.type.rank
    types = [*(v.type for v in outputs), x.type, *read]
    steps = [[step(t, rank, 1), *(step(t, rank, d) for d in range(rank) if d != 1)] for t in types]
    return widest(y.type.shape[1], types, steps) if y.type.strides[1] == x.type.strides[1] == 1 else 1


def _kernel(nodes: Sequence[Node], outputs: Sequence[Value], vector: int, strip: int) -> Kernel:
    """Each thread computes so many channels of so many results."""
    conv, rest = nodes[0], nodes[1:]
    filters, y = _stored_filters(conv.operands[1]), conv.result
    rank, width, total = y.type.rank, y.type.shape[-1], y.type.size // vector
    strips = ceil_div(width, strip)
    threads = total // width * strips
    sizes = [(f"c{d}", y.type.shape[d]) for d in y.type.order or range(rank)]
    counts = {"c1": ("pack", y.type.shape[1] // vector), f"c{rank - 1}": ("strip", strips)}
    lines = [f"const u32 i = blockIdx.x * {BLOCK}u + threadIdx.x;", f"if (i >= {by_value(threads)}) return;"]
    lines += decoded("i", [counts.get(name, (name, size)) for name, size in sizes])
    lines.append(f"const u32 c1 = pack * {vector}u;")
    arguments = Arguments()
    lines += _sums(conv, filters, vector, strip, arguments)
    names = tuple(f"c{d}" for d in range(rank))
    chain = Chain(Space(y.type.shape, names, 1, vector), arguments, rounds=False)
    chain.define(y, "acc[s][j]")
    for node in rest:
        chain.apply(node)
    for value in outputs:
        chain.store(value)
    lines += ["#pragma unroll", f"for (int s = 0; s < {strip}; ++s) {{"]
    lines.append(f"  const u32 c{rank - 1} = strip * {strip}u + s;")
    lines.append(f"  if (c{rank - 1} >= {width}u) break;")
    lines += [*(f"  {line}" for line in chain.lines()), "}"]
    return Kernel(_name(rest), (arguments.launch("depthwise", lines, ceil_div(threads, BLOCK)),))


def _name(rest: Sequence[Node]) -> str:
    return "+".join(["depthwise", *(node.op.name for node in rest)])


def _stored_filters(w: Value) -> TensorType:
    """Constant filters with channels innermost, others as they lie."""
    return w.type if w.literal is None else w.type.with_order((*range(2, w.type.rank), 0, 1))


def _sums(conv: Node, filters: TensorType, vector: int, strip: int, arguments: Arguments) -> list[str]:
    """Statements that leave the sums of products in `acc`."""
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
