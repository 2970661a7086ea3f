"""Generate instance norm for channels last: select the steps that fit.

A max pool of windows that do not overlap, or an upsampling by copies of pixels, may follow in the same kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import HALVES, Kernel
from fusec.gpu.kernels.codegen.pointwise_code import can_generate
from fusec.gpu.kernels.norm import row_reduction
from fusec.gpu.kernels.norm.group_norm import merges
from fusec.gpu.kernels.norm.instance_norm_source import BLOCK, InstanceNormSource
from fusec.ir import DType, Node, Value
from fusec.ops import InstanceNorm, MaxPool, Resize
from fusec.passes.folding.fold_upsampling import copies
from fusec.schedule.program import inputs_of

FEW_PIXELS = 1024  # with fewer, the kernels of `row_reduction` come first: one launch, and tuning times all


def instance_norm(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of an instance norm, its epilogue, and perhaps a pool or copies last; None for other steps."""
    anchor, epilogue = nodes[0], nodes[1:]
    if not isinstance(anchor.op, InstanceNorm):
        return None
    last = epilogue[-1] if epilogue and isinstance(epilogue[-1].op, (MaxPool, Resize)) else None
    epilogue = epilogue if last is None else epilogue[:-1]
    x, y = anchor.operands[0], anchor.result
    if x.type.dtype not in (*HALVES, DType.F32) or not x.type.size or not all(can_generate(node) for node in epilogue):
        return None
    window = (1, 1) if last is None else _window(last)
    if last is not None and (
        window is None or list(outputs) != [last.result] or last.operands[0] != nodes[-2].results[0]
    ):
        return None
    if last is None and any(v.type.shape != y.type.shape for v in outputs):
        return None
    norm = InstanceNormSource(anchor, epilogue, last, window or (1, 1), outputs, figures)
    if x.type.strides[1] != 1 or x.type.shape[1] % norm.vector or norm.lanes * norm.vector > BLOCK:
        return None
    if last is not None and last.result.type.dtype is not x.type.dtype:
        return None
    read = [v for v in inputs_of(epilogue) if v is not y]
    types = [v.type for v in (x, *read, *outputs) if v.type.size != 1]
    whole = types if last is None else types[:-1]
    if any(t.span >= 1 << 31 for t in types) or not all(merges(t, x.type.shape) for t in whole):
        return None
    if any(stride % norm.vector for t in types for stride in t.strides if stride != 1):
        return None
    if any(node.op.name == "gen_index" for node in epilogue):
        return None
    other = row_reduction.row_reduction(nodes, outputs, figures)
    theirs = [] if other is None else [replace(other, others=()), *other.others]
    best, *others = [*theirs, norm.kernel()] if norm.pixels < FEW_PIXELS else [norm.kernel(), *theirs[:1]]
    return replace(best, others=tuple(others))


def _window(node: Node) -> tuple[int, int] | None:
    """Return the window of a pool that does not overlap, or how often each pixel is copied; None for other ops."""
    op, x, y = node.op, node.operands[0].type, node.result.type
    if x.rank != 4 or x.shape[:2] != y.shape[:2] or y.strides[1] != 1:
        return None
    if isinstance(op, MaxPool):
        window = (op.window[0], op.window[1])
        fits = op.strides == op.window and not any(op.pads) and set(op.dilations) == {1}
        whole = all(a == b * k for a, b, k in zip(x.shape[2:], y.shape[2:], window, strict=True))
        return window if fits and whole else None
    times = copies(node)
    return None if times is None else (times[0], times[1])
