"""Generate non-maximum suppression: sort the boxes of each class, compare them in many blocks, and choose.

Boxes are compared by panels, so that the answers for one panel fit in a block's shared memory. A panel has two
launches. They do nothing after the last box whose score is high enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import (
    BLOCK,
    C_TYPES,
    HALVES,
    Arguments,
    Kernel,
    Launch,
    by_value,
    ceil_div,
    power_of_two,
)
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.selection.suppression_plan import KEY_BYTES, TILE, TILE_BYTES, SuppressionPlan
from fusec.ir import DType, Node, Value
from fusec.ops import NonMaxSuppression

MAX_THREADS = 1024
MAX_BOXES = 1 << 17  # of a class: 128 panels
BLOCKS_OF_PROCESSOR = 4
FIRST_NORMAL = np.finfo(np.float32).smallest_normal
_CUDA = cuda_template(__package__, "non_max_suppression.cuh")
_SORT = cuda_template(__package__, "bitonic_sort.cuh")


def non_max_suppression(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a non_max_suppression; None for other steps, for fp64, and where there are no boxes.

    Both results are written, so both must be read.
    """
    op, operands = nodes[0].op, nodes[0].operands
    if len(nodes) != 1 or not isinstance(op, NonMaxSuppression):
        return None
    if any(value.type.dtype not in (DType.F32, *HALVES) for value in operands):
        return None
    rows, count = nodes[0].results
    if rows not in outputs or count not in outputs:
        return None
    images, classes, boxes = operands[1].type.shape
    most = min(op.most, boxes)
    if not images * classes * most or boxes > MAX_BOXES:
        return None
    plan, regions = SuppressionPlan.of(boxes, most, figures), images * classes
    cuda = _bound(op, operands, plan)
    blocks = min(plan.tiles + plan.columns, ceil_div(BLOCKS_OF_PROCESSOR * figures.processors, regions))
    launches = [_sort(op, operands, plan, cuda)]
    for panel in range(plan.panels):
        launches += [_compare(operands, plan, cuda, panel, blocks), _choose(operands, plan, cuda, panel)]
    joined = Arguments()
    lines = cuda.bind(BLOCK=BLOCK)(
        "rows",
        SCRATCH=joined.scratch("const u32"),
        ROWS=joined.write(rows),
        COUNT=joined.write(count),
        REGIONS=by_value(regions),
    )
    launches.append(joined.launch("suppress_rows", lines, regions))
    return Kernel(op.name, tuple(launches), 4 * plan.words * regions)


def _bound(op: NonMaxSuppression, operands: Sequence[Value], plan: SuppressionPlan) -> CudaTemplate:
    """Fill the holes that several launches have."""
    of_image, of_box, of_corner = operands[0].type.strides
    iou = np.float32(op.iou)
    above = np.maximum(np.nextafter(iou, np.float32(np.inf)), FIRST_NORMAL)  # smaller numbers are zero on the GPU
    return _CUDA.bind(
        ABOVE=literal(float(above), DType.F32),
        ANSWERS=plan.answers,
        BOXES_OF_IMAGE=of_image,
        BOX_STEP=of_box,
        CLASSES=operands[1].type.shape[1],
        CORNER=C_TYPES[operands[0].type.dtype],
        GONE=plan.gone,
        IOU=literal(op.iou, DType.F32),
        MOST=plan.most,
        ORDER=plan.order,
        PANEL=TILE * plan.columns,
        REGION=plan.words,
        SIDE=_CUDA("centred" if op.centred else "opposite"),
        STEP=of_corner,
    )


def _sort(op: NonMaxSuppression, operands: Sequence[Value], plan: SuppressionPlan, cuda: CudaTemplate) -> Launch:
    """Sort the boxes of each class whose scores are high enough."""
    arguments, scores = Arguments(), operands[1].type
    threads = min(MAX_THREADS, max(BLOCK, power_of_two(plan.boxes)))
    all_boxes = op.least == -math.inf
    cuda = cuda.bind(
        BLOCK=threads,
        BOXES=plan.boxes,
        SCORE=C_TYPES[scores.dtype],
        SCORES_OF_CLASS=scores.strides[1],
        SCORES_OF_IMAGE=scores.strides[0],
        SCORE_STEP=scores.strides[2],
        SHARED=plan.sorted_keys,
    )
    lines = cuda(
        "sort",
        SCORES=arguments.read(operands[1]),
        SCRATCH=arguments.scratch("u32"),
        FIND_KEYS=cuda("keys_in_scratch_memory", KEYS=plan.keys) if plan.spills else cuda("keys_in_shared_memory"),
        FIND_BOXES=cuda("all_boxes") if all_boxes else cuda("better_boxes", LEAST=literal(op.least, DType.F32)),
        FEW_TO_SHARED=cuda("few_to_shared_memory") if plan.spills else "",
    )
    preamble = [*cuda("key"), *_SORT("functions", BLOCK=threads)]
    launch = arguments.launch("suppress_sort", lines, _regions(operands), threads, preamble=preamble)
    return replace(launch, resident_bytes=KEY_BYTES * plan.sorted_keys)


def _compare(operands: Sequence[Value], plan: SuppressionPlan, cuda: CudaTemplate, panel: int, blocks: int) -> Launch:
    """Compare the boxes of a panel with each other and with those chosen before. Each class has `blocks` blocks."""
    arguments = Arguments()
    boxes, scratch = arguments.read(operands[0]), arguments.scratch("u32")
    lines = cuda.bind(BOXES_READ=boxes)(
        "compare",
        BLOCKS=by_value(blocks),
        PANEL_BEGINS=cuda("panel", SCRATCH=scratch, NUMBER=by_value(panel)),
        CHOSEN_BEFORE=cuda("chosen_before", BOXES_READ=boxes) if plan.panels > 1 else "",
    )
    grid = _regions(operands) * blocks
    return arguments.launch("suppress_compare", lines, grid, 4 * TILE, preamble=cuda("overlap"))


def _choose(operands: Sequence[Value], plan: SuppressionPlan, cuda: CudaTemplate, panel: int) -> Launch:
    """Choose the boxes of a panel that no chosen one overlaps."""
    arguments = Arguments()
    lines = cuda.bind(BLOCK=BLOCK)(
        "choose",
        COLUMNS=plan.columns,
        PANEL_BEGINS=cuda("panel", SCRATCH=arguments.scratch("u32"), NUMBER=by_value(panel)),
        GONE_BEFORE=f"((const u64*)(own + {plan.gone}u))[threadIdx.x]" if plan.panels > 1 else "0ull",
    )
    launch = arguments.launch("suppress_choose", lines, _regions(operands))
    return replace(launch, resident_bytes=TILE_BYTES * plan.tiles)


def _regions(operands: Sequence[Value]) -> int:
    images, classes, _ = operands[1].type.shape
    return images * classes
