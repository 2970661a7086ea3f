"""Generate grid_sample: a thread computes one result, from the pixels around the place that the grid gives it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Kernel, ceil_div, compute_type
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, can_generate, rounded_to, thread_index
from fusec.ir import Node, Value
from fusec.ops import GridSample
from fusec.ops.sampling import CUBIC
from fusec.system.dataclass import dataclass

MAX_TAPS = 64  # pixels that a result adds up; a reference runs longer sums
_CUDA = cuda_template(__package__, "grid_sample.cuh")


@dataclass(frozen=True)
class _Tap:
    """A pixel along one dim. index, inside, weight: C expressions."""

    index: str
    inside: str
    weight: str


def grid_sample(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a grid_sample and its epilogue; None for other steps."""
    node, rest = nodes[0], nodes[1:]
    if not isinstance(node.op, GridSample) or not all(can_generate(each) for each in rest):
        return None
    (x, grid), y = node.operands, node.result
    taps = {"nearest": 1, "linear": 2, "cubic": 4}[node.op.mode] ** (x.type.rank - 2)
    if x.type.dtype not in C_TYPES or grid.type.dtype not in C_TYPES or taps > MAX_TAPS:
        return None
    if any(v.type.shape != y.type.shape for v in outputs) or max(v.type.size for v in (x, grid, y)) >= 1 << 31:
        return None
    name = "+".join(each.op.name for each in nodes)
    if y.type.size == 0:
        return Kernel(name, ())
    order = outputs[0].type.order or tuple(range(y.type.rank))
    dims = [d for d in order if y.type.shape[d] != 1] or [order[-1]]
    names = tuple(f"c{d}" if d in dims else None for d in range(y.type.rank))
    arguments = Arguments()
    lines = thread_index(y.type.size, [(f"c{d}", y.type.shape[d]) for d in dims])
    lines += _sampled(node, names, arguments)
    code = PointwiseCode(Space(y.type.shape, names), arguments, known={y: "sampled[j]"})
    code.compute(rest, outputs)
    lines += code.lines()
    return Kernel(name, (arguments.launch(node.op.name, lines, ceil_div(y.type.size, BLOCK)),))


def _sampled(node: Node, names: Sequence[str | None], arguments: Arguments) -> list[str]:
    """Compute the result of a thread in `sampled`."""
    op, x, grid = node.op, node.operands[0].type, node.operands[1].type
    assert isinstance(op, GridSample)
    n, number = x.rank - 2, compute_type(x.dtype)
    places = arguments.read(node.operands[1])
    images = arguments.read(node.operands[0])
    lines: list[str] = []
    taps: list[list[_Tap]] = []
    for d, size in enumerate(x.shape[2:]):
        place = Space(grid.shape, (names[0], *names[2:], str(n - 1 - d)))
        lines.append(f"{compute_type(grid.dtype)} at{d} = wide({places}[{place.offset(grid)}]);")
        made, found = _along(op, node, d, size)
        lines += made
        taps.append(found)
    lines.append(f"{number} sampled[1] = {{{literal(0, x.dtype)}}};")
    for chosen in itertools.product(*taps):
        at = Space(x.shape, (names[0], names[1], *(tap.index for tap in chosen)))
        pixel = f"wide({images}[{at.offset(x)}])"
        if op.padding == "zeros":
            pixel = f"({' && '.join(tap.inside for tap in chosen)} ? {pixel} : {literal(0, x.dtype)})"
        if op.mode == "nearest":
            lines.append(f"sampled[0] = {pixel};")
        else:
            lines.append(f"sampled[0] += {pixel} * {number}({' * '.join(tap.weight for tap in chosen)});")
    return [*lines, f"sampled[0] = {rounded_to('sampled[0]', x.dtype)};"]


def _along(op: GridSample, node: Node, d: int, size: int) -> tuple[list[str], list[_Tap]]:
    """Return the statements for one dim, which `at` has the coordinate of, and its taps."""
    dtype = node.operands[1].type.dtype
    number, at = compute_type(dtype), f"at{d}"
    cuda = _CUDA.bind(NUMBER=number, LAST=literal(size - 1, dtype))

    def padded(place: str) -> list[str]:
        if op.padding == "zeros":
            return []
        moved: list[str] = []
        if op.padding == "reflection":
            low, high = op.range[0], size - 1 + op.range[1]
            if high == low:
                return [f"{place} = {place} * {literal(0, dtype)};"]
            numbers = {"LOW": low, "SPAN": high - low, "PERIOD": 2 * (high - low)}
            moved = cuda("reflect", PLACE=place, **{key: literal(value, dtype) for key, value in numbers.items()})
        return [*moved, *cuda("limit", PLACE=place)]

    one, half = literal(1, dtype), literal(0.5, dtype)
    lines: list[str] = []
    if op.coordinates == "centres":
        lines.append(f"{at} = ({at} + {one}) * {literal((size - 1) / 2, dtype)};")
    elif op.coordinates == "edges":
        lines.append(f"{at} = (({at} + {one}) * {literal(size, dtype)} - {one}) * {half};")
    if op.mode == "nearest":
        lines += [f"{at} = rint({at});", *padded(at)]
        places, weights = [at], [one]
    elif op.mode == "linear":
        lines += [*padded(at), f"const {number} low{d} = floor({at}), above{d} = {at} - low{d};"]
        places, weights = [f"low{d}", f"(low{d} + {one})"], [f"({one} - above{d})", f"above{d}"]
    else:
        lines.append(f"const {number} low{d} = floor({at}), above{d} = {at} - low{d};")
        places, weights = [f"place{d}_{i}" for i in range(4)], [f"weight{d}_{i}" for i in range(4)]
        for i, (place, weight) in enumerate(zip(places, weights, strict=True)):
            lines += [f"{number} {place} = low{d} + {literal(i - 1, dtype)};", *padded(place)]
            factors = (CUBIC + 2, -(CUBIC + 3), 0.0, 1.0) if i in (1, 2) else tuple(CUBIC * k for k in (1, -5, 8, -4))
            filled = dict(
                zip(("FIRST", "SECOND", "THIRD", "FOURTH"), (literal(f, dtype) for f in factors), strict=True)
            )
            lines += cuda("weight", WEIGHT=weight, FRACTION=f"above{d}", OFFSET=literal(i - 1, dtype), **filled)
    taps: list[_Tap] = []
    for i, (place, weight) in enumerate(zip(places, weights, strict=True)):
        lines += cuda("index", PLACE=place, INDEX=f"p{d}_{i}", INSIDE=f"inside{d}_{i}")
        taps.append(_Tap(f"p{d}_{i}", f"inside{d}_{i}", weight))
    return lines, taps
