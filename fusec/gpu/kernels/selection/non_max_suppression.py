"""Generate non-maximum suppression: a block chooses the boxes of one class, and a second launch joins all classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, HALVES, Arguments, Kernel, by_value, power_of_two
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.ir import DType, Node, Value
from fusec.ops import NonMaxSuppression

KEY_BYTES = 8
MAX_THREADS = 1024
MAX_BOXES = 1 << 20
_CUDA = cuda_template(__package__, "non_max_suppression.cuh")


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
    threads = min(MAX_THREADS, max(BLOCK, power_of_two(boxes)))
    room = figures.dynamic_bytes // 2 // KEY_BYTES
    shared = min(power_of_two(boxes), power_of_two(room + 1) // 2)  # keys that are sorted there, a power of two
    first = 2 + most + most % 2  # word of the first key, which is aligned
    spills = boxes > shared
    region = first + (KEY_BYTES // 4 * power_of_two(boxes) if spills else 0)
    of_image, of_box, of_corner = operands[0].type.strides
    cuda = _CUDA.bind(
        BLOCK=threads,
        BOXES=boxes,
        BOXES_OF_IMAGE=of_image,
        BOX_STEP=of_box,
        CLASSES=classes,
        CORNER=C_TYPES[operands[0].type.dtype],
        IOU=literal(op.iou, DType.F32),
        MOST=most,
        REGION=region,
        SCORE=C_TYPES[operands[1].type.dtype],
        SCORES_OF_CLASS=operands[1].type.strides[1],
        SCORES_OF_IMAGE=operands[1].type.strides[0],
        SCORE_STEP=operands[1].type.strides[2],
        SIDE=_CUDA("centred" if op.centred else "opposite"),
        STEP=of_corner,
    )
    arguments = Arguments()
    all_boxes = op.least == -math.inf
    lines = cuda(
        "suppress",
        SCORES=arguments.read(operands[1]),
        BOXES_READ=arguments.read(operands[0]),
        SCRATCH=arguments.scratch("u32"),
        FIND_KEYS=cuda("keys_in_scratch_memory", KEYS=first) if spills else cuda("keys_in_shared_memory"),
        FIND_BOXES=cuda("all_boxes") if all_boxes else cuda("better_boxes", LEAST=literal(op.least, DType.F32)),
        FEW_TO_SHARED=cuda("few_to_shared_memory", SHARED=shared) if spills else "",
    )
    suppress = arguments.launch("suppress", lines, images * classes, threads, preamble=cuda("functions"))
    joined = Arguments()
    lines = cuda.bind(BLOCK=BLOCK)(
        "rows",
        SCRATCH=joined.scratch("const u32"),
        ROWS=joined.write(rows),
        COUNT=joined.write(count),
        REGIONS=by_value(images * classes),
    )
    join = joined.launch("suppress_rows", lines, images * classes)
    suppress = replace(suppress, resident_bytes=KEY_BYTES * shared)
    return Kernel(op.name, (suppress, join), 4 * region * images * classes)
