"""Find steps that convolve an image or a video of up to four channels, with what comes before and after."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import HALVES, Kernel, with_variants
from fusec.gpu.kernels.codegen.mma_tiles import can_follow
from fusec.gpu.kernels.convolution.few_channels.few_channels_step import CHANNELS, FewChannels
from fusec.gpu.kernels.convolution.few_channels.frame_products import frame_products
from fusec.gpu.kernels.convolution.few_channels.group_products import group_products
from fusec.gpu.kernels.convolution.few_channels.pooled_products import pooled_products
from fusec.gpu.kernels.convolution.few_channels.warp_products import warp_products
from fusec.ir import Node, Value
from fusec.ops import Conv, MaxPool, Pad

MOST_FILTERS = 128
IMAGE, VIDEO = 4, 5  # dims
COUNTS = {IMAGE: (CHANNELS,), VIDEO: (CHANNELS - 1, CHANNELS)}  # of channels


def few_channels(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a convolution of four channels with its epilogue; None for other steps.

    The fourth channel of an image may be added by a pad before it, and a max pool may follow. A video may have three.
    """
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, Conv)), None)
    if at is None:
        return None
    pooled = next((i for i, node in enumerate(nodes) if i > at and isinstance(node.op, MaxPool)), len(nodes))
    prologue, conv, rest, after = nodes[:at], nodes[at], nodes[at + 1 : pooled], nodes[pooled + 1 :]
    result = conv.result if pooled == len(nodes) else nodes[pooled].result
    op, (x, w), y = conv.op, conv.operands, conv.result
    assert isinstance(op, Conv)
    if x.type.dtype not in HALVES or op.groups != 1 or x.type.shape[1] not in COUNTS.get(x.type.rank, ()):
        return None
    if w.type.dtype is not x.type.dtype or y.type.shape[1] % 16 or y.type.shape[1] > MOST_FILTERS or not y.type.size:
        return None
    if not all(map(can_follow, (*rest, *after))) or any(v.type.shape != result.type.shape for v in outputs):
        return None
    if not _reads(prologue, (*rest, *after), x):
        return None
    step = FewChannels(tuple(prologue), conv, tuple(rest), tuple(outputs), figures)
    values = (x, w, y, step.source, *outputs, *(v for node in (*rest, *after) for v in node.operands))
    if max(v.type.span for v in values) >= 1 << 31:
        return None
    if x.type.rank == VIDEO:
        return frame_products(step) if result is y else None
    if result is not y:
        return pooled_products(step, nodes[pooled], after)
    grouped = group_products(step)
    return grouped if grouped is not None else with_variants(warp_products(step))


def _reads(prologue: Sequence[Node], rest: Sequence[Node], x: Value) -> bool:
    """Tell if only the convolution reads the prologue: pointwise ops, and of an image then a pad by a channel."""
    made = {v for node in prologue for v in node.results}
    if any(v in made for node in rest for v in node.operands):
        return False
    pads = [node for node in prologue if isinstance(node.op, Pad)]
    if not prologue:
        return True
    if x not in made or not all(can_follow(node) for node in prologue if node not in pads):
        return False
    if x.type.rank == VIDEO or len(pads) != 1:
        return x.type.rank == VIDEO and not pads and all(v.type.shape == x.type.shape for v in made)
    (pad,) = pads
    op, (source,), at = pad.op, pad.operands, list(prologue).index(pad)
    assert isinstance(op, Pad)
    if op.pads != (0, 0, 0, 0, 0, CHANNELS - source.type.shape[1], 0, 0) or (op.mode, op.value) != ("constant", 0.0):
        return False
    if any(node.op.name != "relayout" for node in prologue[at + 1 :]):
        return False
    return all(v.type.shape == source.type.shape for node in prologue[:at] for v in node.results)
