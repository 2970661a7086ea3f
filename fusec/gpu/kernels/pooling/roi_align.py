"""Generate roi_align: a thread computes one bin of one channel, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Kernel, ceil_div, compute_type
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, can_generate, rounded_to, thread_index
from fusec.ir import Node, Value
from fusec.ops import RoiAlign
from fusec.ops.roi_align import MAX_SAMPLES
from fusec.schedule.program import inputs_of

_CUDA = cuda_template(__package__, "roi_align.cuh")


def roi_align(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a roi_align and its epilogue; None for other steps."""
    node, rest = nodes[0], nodes[1:]
    if not isinstance(node.op, RoiAlign) or not all(can_generate(each) for each in rest):
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
    lines += _pooled(node, arguments)
    names = tuple(f"c{d}" for d in range(4))
    code = PointwiseCode(Space(y.type.shape, names), arguments, known={y: "pooled[j]"})
    code.compute(rest, outputs)
    lines += code.lines()
    return Kernel(name, (arguments.launch(node.op.name, lines, ceil_div(y.type.size, BLOCK)),))


def _pooled(node: Node, arguments: Arguments) -> list[str]:
    """Compute the result of a thread in `pooled`."""
    op, (x, rois, batches) = node.op, (value.type for value in node.operands)
    assert isinstance(op, RoiAlign)
    images, regions, chosen = (arguments.read(value) for value in node.operands)
    number, coordinate, average = compute_type(x.dtype), compute_type(rois.dtype), op.mode == "avg"
    cuda = _CUDA.bind(NUMBER=number, COORDINATE=coordinate, MOST=MAX_SAMPLES, HALF=literal(0.5, rois.dtype))
    first = literal(0, x.dtype) if average else f"{number}(-INFINITE)"
    index = f"(i64){chosen}[{Space(batches.shape, ('c0',)).offset(batches)}]"
    lines = [f"const u32 image = (u32)clipped({index}, (i64)0, (i64){x.shape[0] - 1});"]
    for d in range(2):
        low, high = (f"{regions}[{Space(rois.shape, ('c0', str(k))).offset(rois)}]" for k in (1 - d, 3 - d))
        shift, scale = literal(0.5 if op.half_pixel else 0, rois.dtype), literal(op.scale, rois.dtype)
        names = {"START": f"start{d}", "LENGTH": f"length{d}"}
        lines += cuda("start", LOW=low, HIGH=high, SCALE=scale, SHIFT=shift, **names)
        if not op.half_pixel:
            lines.append(f"length{d} = nmax(length{d}, {literal(1, rois.dtype)});")
        if op.samples:
            lines.append(f"const int count{d} = {op.samples};")
        else:
            lines += cuda("adaptive", COUNT=f"count{d}", WANTED=f"wanted{d}", BINS=op.bins[d], LENGTH=f"length{d}")
    lines.append(f"{number} pooled[1] = {{{first}}};")
    taps: dict[str, str] = {}
    for k in range(4):
        corners = [("after" if k >> 1 - d & 1 else "before") + str(d) for d in range(2)]
        weights = [f"above{d}" if k >> 1 - d & 1 else f"({literal(1, rois.dtype)} - above{d})" for d in range(2)]
        at = Space(x.shape, ("image", "c1", *corners)).offset(x)
        taps[f"TAP_{k}"] = f"wide({images}[{at}]) * {number}({' * '.join(weights)})"
    body = cuda("average" if average else "largest", INSIDE="inside0 && inside1", **taps)
    for d in (1, 0):
        own = {key: f"{key.lower()}{d}" for key in ("SAMPLE", "COUNT", "AT", "START", "LENGTH", "INSIDE")}
        more = {"BEFORE": f"before{d}", "AFTER": f"after{d}", "WEIGHT": f"above{d}", "BIN": f"c{2 + d}"}
        body = cuda("each_sample", BINS=op.bins[d], SIZE=x.shape[2 + d], BODY=body, **own, **more)
    count = "(count0 * count1)"
    result = f"pooled[0] / {number}{count}" if average else "pooled[0]"
    rounded = f"{count} > 0 ? {result} : {literal(0, x.dtype)}"
    return [*lines, *body, f"pooled[0] = {rounded};", f"pooled[0] = {rounded_to('pooled[0]', x.dtype)};"]
