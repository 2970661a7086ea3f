"""Generate roi_align and roi_pool: a thread computes one bin of one channel, sample by sample or pixel by pixel."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Kernel, ceil_div, compute_type
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, can_generate, rounded_to, thread_index
from fusec.ir import Node, TensorType, Value
from fusec.ops import RoiAlign, RoiPool
from fusec.ops.roi_align import MAX_SAMPLES
from fusec.schedule.program import inputs_of

_CUDA = cuda_template(__package__, "roi_align.cuh")
_ROUNDING = "9.6e-7"  # relative, of the place of a sample


def roi_align(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a roi_align or roi_pool and its epilogue; None for other steps."""
    node, rest = nodes[0], nodes[1:]
    if not isinstance(node.op, (RoiAlign, RoiPool)) or not all(can_generate(each) for each in rest):
        return None
    y = node.result
    if any(v.type.dtype not in C_TYPES or v.type.size >= 1 << 31 for v in (*inputs_of(nodes), y)):
        return None
    if any(v.type.shape != y.type.shape for v in outputs):
        return None
    name = "+".join(each.op.name for each in nodes)
    if y.type.size == 0:
        return Kernel(name, ())
    order = outputs[0].type.order or tuple(range(4))
    arguments = Arguments()
    lines = thread_index(y.type.size, [(f"c{d}", y.type.shape[d]) for d in order])
    lines += _aligned(node, arguments) if isinstance(node.op, RoiAlign) else _largest(node, arguments)
    names = tuple(f"c{d}" for d in range(4))
    code = PointwiseCode(Space(y.type.shape, names), arguments, known={y: "pooled[j]"})
    code.compute(rest, outputs)
    lines += code.lines()
    return Kernel(name, (arguments.launch(node.op.name, lines, ceil_div(y.type.size, BLOCK)),))


def _aligned(node: Node, arguments: Arguments) -> list[str]:
    """Compute the result of a thread in `pooled`, between pixels."""
    op, (x, rois, batches) = node.op, (value.type for value in node.operands)
    assert isinstance(op, RoiAlign)
    images, regions, chosen = (arguments.read(value) for value in node.operands)
    number, coordinate, average = compute_type(x.dtype), compute_type(rois.dtype), op.mode == "avg"
    cuda = _CUDA.bind(NUMBER=number, COORDINATE=coordinate, MOST=MAX_SAMPLES, HALF=literal(0.5, rois.dtype))
    first = literal(0, x.dtype) if average else f"{number}(-INFINITE)"
    lines = _image(chosen, x, batches)
    for d in range(2):
        low, high = _corners(regions, rois, d)
        shift, scale = literal(0.5 if op.half_pixel else 0, rois.dtype), literal(op.scale, rois.dtype)
        names = {"START": f"start{d}", "LENGTH": f"length{d}"}
        lines += cuda("start", LOW=low, HIGH=high, SCALE=scale, SHIFT=shift, **names)
        if not op.half_pixel:
            lines.append(f"length{d} = nmax(length{d}, {literal(1, rois.dtype)});")
        if op.samples:
            lines.append(f"const int count{d} = {op.samples}, first{d} = 0, end{d} = count{d};")
        else:
            lines += cuda("adaptive", COUNT=f"count{d}", WANTED=f"wanted{d}", BINS=op.bins[d], LENGTH=f"length{d}")
            more = {"SIZE": x.shape[2 + d], "BIN": f"c{2 + d}", "COUNT": f"count{d}", "BINS": op.bins[d]}
            locals = {
                key: f"{key.lower()}{d}" for key in ("FIRST", "END", "TOTAL", "SHARE", "SLACK", "EARLIER", "MOST")
            }
            lines += cuda("inside", ROUNDING=_ROUNDING, **names, **more, **locals)
    lines.append(f"{number} pooled[1] = {{{first}}};")
    taps: dict[str, str] = {}
    for k in range(4):
        corners = [("after" if k >> 1 - d & 1 else "before") + str(d) for d in range(2)]
        weights = [f"above{d}" if k >> 1 - d & 1 else f"({literal(1, rois.dtype)} - above{d})" for d in range(2)]
        at = Space(x.shape, ("image", "c1", *corners)).offset(x)
        taps[f"TAP_{k}"] = f"wide({images}[{at}]) * {number}({' * '.join(weights)})"
    body = cuda("average" if average else "largest", INSIDE="inside0 && inside1", **taps)
    for d in (1, 0):
        own = {
            key: f"{key.lower()}{d}" for key in ("SAMPLE", "COUNT", "FIRST", "END", "AT", "START", "LENGTH", "INSIDE")
        }
        more = {"BEFORE": f"before{d}", "AFTER": f"after{d}", "WEIGHT": f"above{d}", "BIN": f"c{2 + d}"}
        body = cuda("each_sample", BINS=op.bins[d], SIZE=x.shape[2 + d], BODY=body, **own, **more)
    if not average and not op.samples:
        body += cuda(
            "skipped", **{f"{key}_{d}": f"{key.lower()}{d}" for key in ("FIRST", "END", "COUNT") for d in (0, 1)}
        )
    count = "(count0 * count1)"
    result = f"pooled[0] / {number}{count}" if average else "pooled[0]"
    rounded = f"{count} > 0 ? {result} : {literal(0, x.dtype)}"
    return [*lines, *body, f"pooled[0] = {rounded};", f"pooled[0] = {rounded_to('pooled[0]', x.dtype)};"]


def _largest(node: Node, arguments: Arguments) -> list[str]:
    """Compute the result of a thread in `pooled`, over whole pixels."""
    op, (x, rois, batches) = node.op, (value.type for value in node.operands)
    assert isinstance(op, RoiPool)
    images, regions, chosen = (arguments.read(value) for value in node.operands)
    number, zero = compute_type(x.dtype), literal(0, x.dtype)
    cuda = _CUDA.bind(COORDINATE=compute_type(rois.dtype), SCALE=literal(op.scale, rois.dtype))
    lines = _image(chosen, x, batches)
    for d in range(2):
        low, high = _corners(regions, rois, d)
        own = _numbered(d, "START", "LENGTH", "LEAST", "MOST", "FIRST", "END")
        lines += cuda("edges", LOW=low, HIGH=high, BINS=op.bins[d], BIN=f"c{2 + d}", SIZE=x.shape[2 + d], **own)
    empty = "first0 >= end0 || first1 >= end1"
    lines.append(f"{number} pooled[1] = {{{empty} ? {zero} : {number}(-INFINITE)}};")
    pixel = f"{images}[{Space(x.shape, ('image', 'c1', 'at0', 'at1')).offset(x)}]"
    return [*lines, *cuda("each_pixel", PIXEL=pixel, **_of_both("FIRST", "END", "AT"))]


def _numbered(d: int, *holes: str) -> dict[str, str]:
    """Return names of variables of a dim, to fill holes."""
    return {hole: f"{hole.lower()}{d}" for hole in holes}


def _of_both(*holes: str) -> dict[str, str]:
    """Return names of variables of both dims, to fill holes that are numbered."""
    return {f"{hole}_{d}": f"{hole.lower()}{d}" for hole in holes for d in (0, 1)}


def _image(chosen: str, x: TensorType, batches: TensorType) -> list[str]:
    """Compute the number of the image of a region; a wrong one is the nearest that exists."""
    index = f"(i64){chosen}[{Space(batches.shape, ('c0',)).offset(batches)}]"
    return [f"const u32 image = (u32)clipped({index}, (i64)0, (i64){x.shape[0] - 1});"]


def _corners(regions: str, rois: TensorType, d: int) -> tuple[str, str]:
    """Return the expressions of the start and the end of a region along a dim."""
    low, high = (f"{regions}[{Space(rois.shape, ('c0', str(k))).offset(rois)}]" for k in (1 - d, 3 - d))
    return low, high
