"""Run any graph of pointwise ops, casts, and ops that move elements as one kernel.

Results of one shape are computed together; each thread computes some neighbours of every result. Other blocks of the
same launch compute results of other shapes, such as the parts of a split or the operands of a concat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.indexing import VIEW_OPS, Strided, View, source, view_of_operand
from fusec.gpu.kernels.codegen.kernel import BLOCK, Arguments, Kernel, by_value, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import (
    PointwiseCode,
    Space,
    can_generate,
    merged_dims,
    split_index,
    stride_along,
    widest_vector,
)
from fusec.gpu.kernels.elementwise.transpose_tiles import TransposedDims, tiled, transposed
from fusec.gpu.kernels.elementwise.unaligned_copy import copy_rows, functions, is_unaligned_copy
from fusec.ir import Node, Value
from fusec.ops import Concat, Relayout
from fusec.schedule.program import inputs_of
from fusec.system.dataclass import dataclass

SMALL = 8  # a thread handles all of such a small dim, if tensors are transposed to each other


@dataclass(frozen=True)
class Sink:
    """A value that is stored as `output`.

    view: the memory of the output, in the shape of the value.
    """

    value: Value
    output: Value
    view: View


@dataclass(frozen=True)
class Region:
    """Sinks of one shape, with the nodes and reads they need.

    reads: for each value that a node reads, the value in memory and its view.
    """

    shape: tuple[int, ...]
    sinks: tuple[Sink, ...]
    nodes: tuple[Node, ...]
    reads: dict[Value, tuple[Value, View]]

    @property
    def views(self) -> list[Strided]:
        """Views of all that is moved; what is stored comes first."""
        read = [view for value, view in self.reads.values() if value.type.size != 1]
        return [*(sink.view for sink in self.sinks), *read]


def pointwise(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of pointwise and moving ops; None for other steps."""
    sinks = _sinks(nodes, outputs)
    if sinks is None:
        return None
    regions: dict[tuple[int, ...] | Sink, list[Sink]] = {}
    for sink in sinks:
        regions.setdefault(sink if isinstance(nodes[-1].op, Concat) else sink.value.type.shape, []).append(sink)
    made = [_region(nodes, each) for each in regions.values()]
    name = "+".join(node.op.name for node in nodes)
    arguments = Arguments()
    lines: list[str] = []
    total = 0
    for region in made:
        if region is None:
            return None
        if 0 in region.shape:
            continue
        packed = any(view.dtype.bits < 8 for view in region.views)  # a tile has an element, not a byte, in each place
        tile = transposed(region.shape, region.views) if len(made) == 1 and not packed else None
        body, blocks = _generate(region, arguments, tile)
        if len(made) == 1:
            lines += [f"const {_index(region)} b = blockIdx.x;", *body]
        else:
            lines += [f"if (blockIdx.x >= {by_value(total)} && blockIdx.x < {by_value(total + blocks)}) {{"]
            lines += [f"const {_index(region)} b = blockIdx.x - {by_value(total)};", *body, "}"]
        total += blocks
    preamble = functions() if any("ENTRY_cut" in line for line in lines) else ()
    return Kernel(name, (arguments.early_launch("pointwise", lines, total, preamble=preamble),) if total else ())


def _sinks(nodes: Sequence[Node], outputs: Sequence[Value]) -> list[Sink] | None:
    last = nodes[-1]
    joins = isinstance(last.op, Concat)
    if not all(can_generate(node) or isinstance(node.op, VIEW_OPS) for node in (nodes[:-1] if joins else nodes)):
        return None
    if joins:
        return _parts(last, nodes) if tuple(outputs) == (last.result,) else None
    sinks: list[Sink] = []
    for output in outputs:
        sink = _before_views(Sink(output, output, View.of(output.type)), nodes)
        if sink is None:
            return None
        sinks.append(sink)
    return sinks


def _before_views(sink: Sink, nodes: Sequence[Node]) -> Sink | None:
    """Return a sink whose value a kernel can compute or read; None if elements have to move to a view of it."""
    while (node := sink.value.node) is not None and node in nodes and isinstance(node.op, VIEW_OPS):
        if source(sink.value, nodes) is not None:
            break
        before = view_of_operand(node, sink.view)
        if before is None:
            return None
        sink = Sink(node.operands[0], sink.output, before)
    return sink


def _parts(concat: Node, nodes: Sequence[Node]) -> list[Sink] | None:
    """Return a sink for each operand of a concat, which writes its part of the result."""
    assert isinstance(concat.op, Concat)
    whole, axis, start = View.of(concat.result.type), concat.op.axis % concat.result.type.rank, 0
    sinks: list[Sink] = []
    for value in concat.operands:
        view = View(value.type.shape, whole.strides, whole.dtype, start * whole.strides[axis])
        sink = _before_views(Sink(value, concat.result, view), nodes)
        if sink is None:
            return None
        sinks.append(sink)
        start += value.type.shape[axis]
    return sinks


def _region(nodes: Sequence[Node], sinks: Sequence[Sink]) -> Region | None:
    """Return what the sinks need; None if an operand is neither computed nor a view of memory."""
    wanted = {sink.value for sink in sinks}
    reads: dict[Value, tuple[Value, View]] = {}
    needed: list[Node] = []
    for node in reversed(nodes):
        if isinstance(node.op, Concat) or not wanted.intersection(node.results):
            continue
        if can_generate(node) or (isinstance(node.op, Relayout) and source(node.result, nodes) is None):
            needed.insert(0, node)
            wanted |= set(node.operands)
            continue
        for value in wanted.intersection(node.results):
            found = source(value, nodes)
            if found is None:
                return None
            reads[value] = found
    done = {v for node in needed for v in node.results}
    reads |= {v: (v, View.of(v.type)) for v in wanted if v not in done and v not in reads}
    shape = sinks[0].value.type.shape
    order = {v: i for i, v in enumerate((*inputs_of(nodes), *(v for node in nodes for v in node.results)))}
    return Region(shape, tuple(sinks), tuple(needed), dict(sorted(reads.items(), key=lambda item: order[item[0]])))


def _index(region: Region) -> str:
    big = math.prod(region.shape) >= 1 << 31 or any(_extent(view) >= 1 << 31 for view in region.views)
    return "u64" if big else "u32"


def _extent(view: Strided) -> int:
    start = view.start if isinstance(view, View) else 0
    return start + sum((d - 1) * abs(s) for d, s in zip(view.shape, view.strides, strict=True))


def _generate(region: Region, arguments: Arguments, tile: TransposedDims | None) -> tuple[list[str], int]:
    """Generate the statements of block `b` of a region; return the number of blocks, too."""
    shape, views, rank = region.shape, region.views, len(region.shape)
    if tile is not None and min(shape[tile.read], shape[tile.written]) > SMALL:
        return tiled(region.shape, tile, _index(region), lambda space: _code(region, space, arguments), region.sinks)
    indexed = any(node.op.name == "gen_index" for node in region.nodes)  # it needs each coordinate
    order = sorted((d for d in range(rank) if shape[d] != 1), key=lambda d: -region.sinks[0].view.strides[d])
    if tile is not None:  # a thread handles all of the small dim; neighbouring threads follow the other
        small = min(tile.read, tile.written, key=lambda d: shape[d])
        order = [*(d for d in order if d not in (tile.read, tile.written)), tile.read, tile.written]
        order = [*(d for d in order if d != small), small]
        groups = [[d] for d in order]
        vector, packs = shape[small], False
        if small == tile.written:
            steps = _steps(views, groups, rank)
            packs = widest_vector(vector, views, steps) == vector
    else:
        groups = merged_dims(shape, order, [] if indexed else views) or [[rank - 1] if rank else []]
        size = math.prod(shape[d] for d in groups[-1])
        vector, packs = widest_vector(size, views, _steps(views, groups, rank), exact=len(groups) > 1), True
        if (copied := _copied(region)) is not None and is_unaligned_copy(shape, groups, copied, vector):
            read, written = region.sinks[0].value, region.sinks[0].output
            source = arguments.read(region.reads[read][0])
            return copy_rows(shape, groups, (arguments.write(written), copied[0]), (source, copied[1]), _index(region))
    sizes = [math.prod(shape[d] for d in group) for group in groups]
    along = groups[-1][-1] if groups[-1] else -1
    total = ceil_div(sizes[-1], vector) * math.prod(sizes[:-1])
    c_type, inner = _index(region), f"c{along}" if along >= 0 else "c"
    names = {group[-1]: f"c{group[-1]}" for group in groups if group}
    spaced = tuple(names.get(d) for d in range(rank))
    lines = [f"const {c_type} i = b * {BLOCK}u + threadIdx.x;", f"if (i < {by_value(total, long=True)}) {{"]
    outer = [(f"c{g[-1]}", n) for g, n in zip(groups[:-1], sizes, strict=False)]
    lines += split_index("i", [*outer, ("pack", ceil_div(sizes[-1], vector))], c_type == "u64")
    lines.append(f"const {c_type} {inner} = pack * {vector}u;")
    whole = _store_sinks(_code(region, Space(shape, spaced, along, vector, packs), arguments), region.sinks)
    if sizes[-1] % vector == 0:
        lines += whole
    else:  # a single dim: the last thread has fewer elements than the others
        one = _store_sinks(_code(region, Space(shape, spaced, along, 1), arguments), region.sinks)
        lines += [f"if ({inner} + {vector}u <= {sizes[-1]}u) {{", *whole, "} else {"]
        lines += [f"for ({c_type} at = {inner}; at < {sizes[-1]}u; ++at) {{", f"const {c_type} {inner} = at;"]
        lines += [*one, "}", "}"]
    return [*lines, "}"], ceil_div(total, BLOCK)


def _copied(region: Region) -> tuple[View, View] | None:
    """Return the views of what a region writes and reads if it only copies; None otherwise."""
    if region.nodes or len(region.sinks) != 1:
        return None
    (sink,) = region.sinks
    return sink.view, region.reads[sink.value][1]


def _steps(views: Sequence[Strided], groups: Sequence[Sequence[int]], rank: int) -> list[list[int]]:
    """Return for each tensor its stride along the innermost group, and then all that a vector must divide."""
    inner = groups[-1][-1] if groups[-1] else -1
    rows: list[list[int]] = []
    for view in views:
        others = [stride_along(view, rank, group[-1]) for group in groups[:-1]]
        start = [view.start] if isinstance(view, View) else []
        rows.append([stride_along(view, rank, inner) if inner >= 0 else 0, *others, *start])
    return rows


def _code(region: Region, space: Space, arguments: Arguments) -> PointwiseCode:
    """Generate all nodes up to the sinks, which are not stored yet."""
    code = PointwiseCode(space, arguments)
    for name, (value, view) in region.reads.items():
        code.get(name, view, memory=value)
    code.compute(region.nodes)
    return code


def _store_sinks(code: PointwiseCode, sinks: Sequence[Sink]) -> list[str]:
    for sink in sinks:
        code.store(sink.output, sink.value, sink.view)
    return code.lines()
