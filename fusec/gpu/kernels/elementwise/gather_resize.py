"""Generate resize, gather, pad and dilate: each result is an element of the operand, or a weighted sum of some.

Coordinates are computed at compile time, by the op itself, and are tables in the source. Pointwise ops before and after
are fused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from itertools import takewhile
from typing import Any

import numpy as np

from fusec.gpu.kernels.codegen.dilated import dilated_names
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Kernel, ceil_div, compute_type
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import (
    PointwiseCode,
    Space,
    can_generate,
    rounded_to,
    strides_from,
    thread_index,
    widest_vector,
)
from fusec.ir import DType, Node, Value
from fusec.ops import Dilate, Gather, Pad, Relayout, Resize
from fusec.schedule.program import inputs_of
from fusec.system.dataclass import dataclass

WAVES = 4  # times as many threads as fill the GPU; more elements are turns of a thread
MAX_TABLE = 1 << 14  # entries; the kernel does not run longer ones
ANCHORS = (Resize, Gather, Pad, Dilate)


@dataclass
class Sample:
    """Positions of the operand's elements.

    lines, preamble: statements, and tables before the kernel.
    names: the coordinate of each dim.
    linear: dims that are interpolated between coordinates `low` and `high`.
    guards: by dim, the condition that the element exists; otherwise the result is `fill`.
    moved: dims of the result whose neighbours are not neighbours in the operand.
    """

    lines: list[str] = field(default_factory=list[str])
    names: list[str] = field(default_factory=list[str])
    linear: list[int] = field(default_factory=list[int])
    guards: dict[int, str] = field(default_factory=dict[int, str])
    fill: str = ""
    preamble: list[str] = field(default_factory=list[str])
    moved: set[int] = field(default_factory=set[int])


@dataclass(frozen=True)
class _Turns:
    """The neighbours along a dim that a thread interpolates one after the other, at a place that it looks up once.

    each: elements of a thread, of `size`.
    """

    dim: int
    size: int
    each: int

    @property
    def name(self) -> str:
        return f"c{self.dim}"

    @property
    def index(self) -> tuple[str, int]:
        """The thread's coordinate along the dim."""
        return (self.name, self.size) if self.each == 1 else ("part", ceil_div(self.size, self.each))

    def loop(self, body: Sequence[str]) -> list[str]:
        """Generate the loop over a thread's elements."""
        if self.each == 1:
            return list(body)
        first = f"part * {self.each}u"
        fits = [] if self.size % self.each == 0 else [f"if ({self.name} >= {self.size}u) break;"]
        loop = f"for (u32 {self.name} = {first}; {self.name} < {first} + {self.each}u; ++{self.name}) {{"
        return ["#pragma unroll 4", loop, *fits, *body, "}"]


def gather_resize(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a resize, gather, pad or dilate with pointwise ops around it; None for other steps."""
    anchors = [node for node in nodes if isinstance(node.op, ANCHORS)]
    if len(anchors) != 1 or not all(
        can_generate(n) or isinstance(n.op, Relayout) for n in nodes if n is not anchors[0]
    ):
        return None
    (anchor,) = anchors
    at = list(nodes).index(anchor)
    prologue, epilogue = nodes[:at], nodes[at + 1 :]
    x, y = anchor.operands[0], anchor.result
    made = {v for node in prologue for v in node.results}
    if any(v in made for node in epilogue for v in node.operands) or any(v in made for v in anchor.operands[1:]):
        return None
    if any(v in made for v in outputs):  # because each of its elements is visited any number of times
        return None
    if any(v.type.shape != y.type.shape for v in outputs) or x.type.dtype not in C_TYPES:
        return None
    if any(v.type.shape != x.type.shape for v in made) or max(x.type.size, y.type.size) >= 1 << 31:
        return None
    name = "+".join(node.op.name for node in nodes)
    if y.type.size == 0:
        return Kernel(name, ())
    arguments = Arguments()
    rank, order = y.type.rank, outputs[0].type.order or tuple(range(y.type.rank))
    dims = [d for d in order if y.type.shape[d] != 1]
    along = dims[-1] if dims else -1
    sample = _sample(anchor, arguments)
    if sample is None:
        return None
    late = [v.type for v in (*outputs, *(v for v in inputs_of(epilogue) if v is not y and v.type.size != 1))]
    steps = [strides_from(t, rank, along) for t in late]
    shift = x.type.rank - rank  # a dim after the gathered one has another number in the operand
    source_along = along if not isinstance(anchor.op, Gather) or along < anchor.op.axis % x.type.rank else along + shift
    packs = along not in sample.moved
    read = (
        [v.type for v in inputs_of([*prologue, anchor])[: None if prologue else 1] if v.type.size != 1] if packs else []
    )
    own = [(t, x.type.rank) for t in read if t.rank <= x.type.rank]
    steps += [strides_from(t, r, source_along) for t, r in own]
    vector = widest_vector(y.type.shape[along], [*late, *(t for t, _ in own)], steps) if along >= 0 else 1
    if along in sample.moved and (along not in sample.guards or isinstance(anchor.op, Dilate)):
        vector = 1  # neighbours are looked up one by one
    names = tuple(f"c{d}" if d in dims else None for d in range(rank))
    threads = y.type.size // vector
    turns = _turns(sample, y.type.shape, dims, figures) if vector == 1 else None
    if dims:
        sizes = [turns.index if turns and turns.dim == d else (f"c{d}", y.type.shape[d]) for d in dims[:-1]]
        threads = math.prod(size for _, size in sizes) * y.type.shape[along] // vector
        lines = thread_index(threads, [*sizes, ("pack", y.type.shape[along] // vector)])
        lines.append(f"const u32 c{along} = pack * {vector}u;")
    else:
        lines = thread_index(threads)
    lines += [f"const u32 c{d} = 0;" for d in range(rank) if d not in dims]
    space = Space(x.type.shape, tuple(sample.names), source_along, vector, packs)
    body = _load_elements(anchor, sample, space, prologue, arguments)
    code = PointwiseCode(Space(y.type.shape, names, along, vector), arguments, "w", {y: "taken[j]"})
    code.compute(epilogue, outputs)
    body += code.lines()
    lines += [*sample.lines, *(turns.loop(body) if turns else body)]
    grid = ceil_div(threads, BLOCK)
    return Kernel(name, (arguments.early_launch(anchor.op.name, lines, grid, preamble=sample.preamble),))


def _turns(sample: Sample, shape: Sequence[int], dims: Sequence[int], figures: GpuFigures) -> _Turns | None:
    """Choose the dim along which threads have several turns: the last one before those that are interpolated."""
    before = list(takewhile(lambda d: d not in sample.moved, dims[:-1])) if sample.linear else []
    if not before:
        return None
    most = math.prod(shape) // (WAVES * figures.enough_threads)
    return _Turns(before[-1], shape[before[-1]], max(1, min(shape[before[-1]], most)))


def _load_elements(
    anchor: Node, sample: Sample, space: Space, prologue: Sequence[Node], arguments: Arguments
) -> list[str]:
    """Load the elements into `taken`."""
    x, y = anchor.operands[0].type, anchor.result.type
    number, vector = compute_type(x.dtype), space.vector
    lines = [f"{number} taken[{vector}];"]

    def read(corner: Space, target: str) -> PointwiseCode:
        code = PointwiseCode(corner, arguments)
        code.compute(prologue)
        code.body.append(f"{target} = {code.get(anchor.operands[0])};")
        return code

    if sample.linear:
        corners = 1 << len(sample.linear)
        lines.append(f"{number} corner[{corners}][{vector}];")
        for bits in range(corners):
            names = list(space.names)
            for place, dim in enumerate(sample.linear):
                names[dim] = f"{'high' if bits >> place & 1 else 'low'}{dim}"
            around = Space(space.shape, tuple(names), space.along, vector, space.packs)
            lines += read(around, f"corner[{bits}][j]").lines()
        for place, dim in enumerate(sample.linear):  # dim after dim, in their order
            for bits in range(0, corners, 2 << place):
                pair = f"corner[{bits}][j] * below{dim} + corner[{bits + (1 << place)}][j] * above{dim}"
                lines.append(f"for (int j = 0; j < {vector}; ++j) corner[{bits}][j] = {pair};")
        rounded = rounded_to("corner[0][j]", y.dtype)
        return [*lines, f"for (int j = 0; j < {vector}; ++j) taken[j] = {rounded};"]
    code = read(space, "taken[j]")
    if not sample.guards:
        return [*lines, *code.lines()]
    lines.append(f"for (int j = 0; j < {vector}; ++j) taken[j] = {sample.fill};")
    apart = space.along in sample.guards and vector > 1  # each neighbour has its own condition
    fixed = " && ".join(guard for dim, guard in sample.guards.items() if not (apart and dim == space.along)) or "true"
    if apart:
        guard = sample.guards[space.along].replace(" <", " + j <")
        code.body = [f"if ({guard}) {{", *code.body, "}"]
    return [*lines, f"if ({fixed})", *code.lines()]


def _sample(anchor: Node, arguments: Arguments) -> Sample | None:
    """Describe how each element of the result reads the operand; None if a dim cannot be described."""
    op, x, y = anchor.op, anchor.operands[0].type, anchor.result.type
    sample = Sample(names=[f"c{d}" for d in range(x.rank)])
    if isinstance(op, Gather):
        return _gather(anchor, sample, arguments)
    for dim in range(x.rank):
        if isinstance(op, Resize):
            if op.sizes[dim] == x.shape[dim] and op.scales[dim] == 1.0:
                continue
            sample.moved.add(dim)
            if op.mode == "linear":
                if not _interpolate(op, dim, x.shape[dim], sample, x.dtype):
                    return None
            elif not _look_up(op.nearest(np, dim, x.shape[dim]), dim, sample):
                return None
        elif isinstance(op, Pad) and (op.pads[dim] or op.pads[x.rank + dim]):
            first = op.pads[dim]
            sample.moved.add(dim)
            if op.mode == "constant":
                sample.lines.append(f"const u32 p{dim} = c{dim} - {first}u;")
                sample.names[dim] = f"p{dim}"
                sample.guards[dim] = f"p{dim} < {x.shape[dim]}u"
                continue
            _pad_coordinate(op, dim, x.shape[dim], sample)
        elif isinstance(op, Dilate) and (op.steps[dim] != 1 or op.sizes[dim] != x.shape[dim]):
            sample.moved.add(dim)
    if isinstance(op, Dilate):
        names, there = dilated_names(anchor, sample.names)
        sample.names, sample.fill = [name or "0" for name in names], literal(0.0 if y.dtype.is_float else 0, y.dtype)
        sample.guards = dict.fromkeys(sorted(sample.moved)[:1], there)
    if isinstance(op, Pad) and sample.guards:
        value = np.array(op.value).astype(y.dtype.numpy)
        sample.fill = literal(float(value) if y.dtype.is_float else int(op.value), y.dtype)
    return sample


def _pad_coordinate(op: Pad, dim: int, size: int, sample: Sample) -> None:
    """Compute the coordinate in an operand that is padded by its own elements. Sound can be too long for a table."""
    last = size - 1
    sample.lines.append(f"const int m{dim} = (int)c{dim} - {op.pads[dim]};")
    if op.mode == "reflect":  # by less than the operand
        inside = f"m{dim} < 0 ? -m{dim} : m{dim} > {last} ? {2 * last} - m{dim} : m{dim}"
    elif op.mode == "edge":
        inside = f"m{dim} < 0 ? 0 : m{dim} > {last} ? {last} : m{dim}"
    else:
        rounds = ceil_div(op.pads[dim], size) * size  # so that the remainder is that of no negative number
        inside = f"(m{dim} + {rounds}) % {size}"
    sample.lines.append(f"const u32 p{dim} = (u32)({inside});")
    sample.names[dim] = f"p{dim}"


def _look_up(table: np.ndarray[Any, Any], dim: int, sample: Sample) -> bool:
    """Compute one coordinate by a table, or by a division if that gives the same; False if the table is too long."""
    indices = np.arange(len(table))
    factor = len(table) // (int(table.max()) + 1)
    if factor > 1 and np.array_equal(table, indices // factor):
        sample.lines.append(f"const u32 p{dim} = c{dim} / {factor}u;")
    elif len(table) > MAX_TABLE:
        return False
    else:
        sample.preamble.append(_table("u32", f"index{dim}", [str(int(i)) for i in table]))
        sample.lines.append(f"const u32 p{dim} = ENTRY_index{dim}[c{dim}];")
    sample.names[dim] = f"p{dim}"
    return True


def _interpolate(op: Resize, dim: int, size: int, sample: Sample, dtype: DType) -> bool:
    """Compute two coordinates and their weights, as the op does; False if the tables are too long."""
    if op.sizes[dim] > MAX_TABLE:
        return False
    at = np.clip(op.positions(np, dim, size), 0, size - 1)
    low = np.floor(at).astype(np.int64)
    number = compute_type(dtype)
    kind = np.float64 if dtype is DType.F64 else np.float32
    weights = {"below": (1 - (at - low)).astype(kind), "above": (at - low).astype(kind)}
    sample.preamble.append(_table("u32", f"low{dim}", [str(int(i)) for i in low]))
    sample.lines.append(f"const u32 low{dim} = ENTRY_low{dim}[c{dim}];")
    sample.lines.append(f"const u32 high{dim} = low{dim} + 1 < {size}u ? low{dim} + 1 : {size - 1}u;")
    for name, weight in weights.items():
        sample.preamble.append(_table(number, f"{name}{dim}", [literal(float(w), dtype) for w in weight]))
        sample.lines.append(f"const {number} {name}{dim} = ENTRY_{name}{dim}[c{dim}];")
    sample.linear.append(dim)
    return True


def _table(c_type: str, name: str, entries: Sequence[str]) -> str:
    return f"TABLE {c_type} ENTRY_{name}[{len(entries)}] = {{{', '.join(entries)}}};"


def _gather(anchor: Node, sample: Sample, arguments: Arguments) -> Sample | None:
    """Read the coordinate along one dim from memory, and clamp it to the operand."""
    assert isinstance(anchor.op, Gather)
    x, indices = anchor.operands[0].type, anchor.operands[1]
    axis, count = anchor.op.axis % x.rank, indices.type.rank
    if indices.type.dtype not in C_TYPES:
        return None
    pointer = arguments.read(indices)
    place = Space(indices.type.shape, tuple(f"c{axis + d}" for d in range(count))).offset(indices.type)
    sample.lines.append(f"const i64 wanted = (i64){pointer}[{place}];")
    sample.lines.append(f"const i64 counted = wanted < 0 ? wanted + {x.shape[axis]} : wanted;")
    sample.lines.append(f"const u32 row = (u32)clipped(counted, (i64)0, (i64){x.shape[axis] - 1});")
    for dim in range(x.rank):
        sample.names[dim] = f"c{dim}" if dim < axis else "row" if dim == axis else f"c{dim + count - 1}"
    sample.moved |= set(range(axis, axis + count))
    return sample
