"""Recognise products of many rows of 8-bit integers whose weights stay in shared memory, and propose variants (Hopper).

Products in 16 bits are left to cuBLASLt, cuDNN and the other kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import Kernel, variants_of, with_variants
from fusec.gpu.kernels.product.int8.dense_bytes import dense_bytes
from fusec.gpu.kernels.product.int8.resident_source import OCTET_BYTES, ResidentSource, Tiling
from fusec.gpu.kernels.product.int8.thin_bytes import thin_bytes
from fusec.gpu.kernels.product.product_step import ProductStep, match_product
from fusec.ir import DType, Node, Value
from fusec.schedule.program import inputs_of

TILINGS = (Tiling(128, 2, 2), Tiling(128, 1, 3), Tiling(128, 1, 4))  # in the order in which they are proposed
# Variants, because each takes long to compile: of 16 products of ResNet-50 and MobileNetV2 on an H200, one of two was
# at most 1 % slower than the fastest of five.
MOST = 2
MORE_TURNS = 1.5  # of a team than with the best tiling, up to which another is tried
MIN_ROWS = 256  # a bound of what is tried; tuning times the kernel on each GPU
MIN_DEPTH, MAX_DEPTH = 256, 512  # on an H200 thin products were faster below, and dense ones above
INSTRUCTION_BYTES = 32  # of the depth of one product of a warpgroup


def resident_weights(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of such a product with pointwise ops after it; None for other steps.

    Where only one tiling fits, kernels of thin or dense products are variants, to compare results with.
    """
    step = match_product(nodes) if figures.has(wgmma.ARCHITECTURE) else None
    if step is None or not _fits(step, outputs):
        return None
    sources = [ResidentSource(step, outputs, figures, tiling) for tiling in TILINGS]
    sources = [source for source in sources if source.fits]
    most_turns = MORE_TURNS * min((source.turns for source in sources), default=0)
    sources = [source for source in sources if source.turns <= most_turns][:MOST]
    if not sources:
        return None
    name = "+".join(node.op.name for node in nodes)
    kernels = [Kernel(name, (source.launch(),)) for source in sources]
    if len(kernels) == 1:
        usual = thin_bytes(name, step, outputs, figures) or dense_bytes(nodes, outputs, figures)
        kernels += variants_of(usual) if usual is not None else ()
    return with_variants(kernels)


def _fits(step: ProductStep, outputs: Sequence[Value]) -> bool:
    """Tell if octets of rows can be copied, and if the number of a row is enough to find it after the product."""
    if step.x.dtype is not DType.I8 or step.prologue or any(v not in step.results for v in outputs):
        return False
    if not MIN_DEPTH <= step.depth <= MAX_DEPTH:
        return False
    # with fewer rows, most of what it reads is weights
    if step.rows < max(MIN_ROWS, step.depth // 2, step.columns // 2):
        return False
    read = step.product.operands[0].type
    others = [stride for d, stride in enumerate(read.strides) if d != step.along and read.shape[d] != 1]
    if step.depth % INSTRUCTION_BYTES or any(stride % OCTET_BYTES for stride in others):
        return False
    if max(read.span, step.y.span, step.weights.size) >= 1 << 31:
        return False
    types = [v.type for v in (*inputs_of(step.epilogue), *outputs) if v is not step.product.result]
    return step.is_linear([*types, step.y], step.y)
