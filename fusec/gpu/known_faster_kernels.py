"""Tell which bodies cuDNN is not asked about, because a kernel runs them.

cuDNN compiles each plan of such a body at run time, to tell that it is legal.

- A product of 8-bit integers, which takes most of a second: the kernel was faster on an H200 for each of these products
  of ResNet-50 and MobileNetV2. So tuning builds no plan either.
- Pointwise ops: most bodies that are proposed do not become a step, and tuning times cuDNN's plans for those that do.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels import GpuFigures, find
from fusec.gpu.kernels.product.product_step import ProductStep, match_product
from fusec.ir import DType, Graph, Node
from fusec.ops import POINTWISE_OPS, PRODUCTS
from fusec.passes.partition import Judge
from fusec.passes.partition.cost_model import BYTE_RATE, flops
from fusec.passes.partition.judge import RefusesItself
from fusec.plans.verdict import PROPOSED, Refused, Verdict
from fusec.schedule.program import inputs_of, outputs_of

MIN_ROWS = 4096  # with fewer, cuDNN was faster for some
BY_ROWS = ("thin_product", "resident_weights")  # kernels of products that memory bounds
BY_PIXELS = "resident_filters"
POINTWISE = "pointwise"


class KnownFasterKernels:
    """A judge that proposes these bodies, and asks another judge about the rest."""

    def __init__(self, judge: Judge, figures: GpuFigures):
        self.inner, self._figures = judge, figures

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        known = [self.refusal(body) is None and self._is_run_by_kernel(body) for body in bodies]
        asked = [body for body, is_known in zip(bodies, known, strict=True) if not is_known]
        answers = iter(self.inner.judge(asked) if asked else ())
        return [PROPOSED if is_known else next(answers) for is_known in known]

    def refusal(self, body: Graph) -> Refused | None:
        """Return a refusal that is known without asking."""
        return self.inner.refusal(body) if isinstance(self.inner, RefusesItself) else None

    def _is_run_by_kernel(self, body: Graph) -> bool:
        nodes = tuple(body.nodes)
        return is_known_faster(nodes, self._figures) or _is_pointwise_kernel(nodes, self._figures)


def is_known_faster(nodes: Sequence[Node], figures: GpuFigures) -> bool:
    """Tell if a kernel is known to run a product of 8-bit integers faster than cuDNN."""
    nodes = [node for node in nodes if node.operands]  # without constants
    products = [node for node in nodes if isinstance(node.op, PRODUCTS)]
    if len(products) != 1 or products[0].result.type.dtype is not DType.I32:
        return False
    y = products[0].result.type
    step = match_product(nodes)
    if step is None and y.size // y.shape[1] < MIN_ROWS:
        return False
    if step is not None and (step.rows < MIN_ROWS or not _is_bound_by_memory(step, figures)):
        return False
    kernel = find(nodes, outputs_of(nodes), figures)
    wanted = BY_ROWS if step is not None else BY_PIXELS
    return kernel is not None and all(launch.entry.startswith(wanted) for launch in kernel.launches)


def _is_pointwise_kernel(nodes: Sequence[Node], figures: GpuFigures) -> bool:
    """Tell if nodes are pointwise ops, which one kernel runs."""
    nodes = [node for node in nodes if node.operands]  # without constants
    if not nodes or not all(isinstance(node.op, POINTWISE_OPS) for node in nodes):
        return False
    kernel = find(nodes, outputs_of(nodes), figures)
    return kernel is not None and all(launch.entry.startswith(POINTWISE) for launch in kernel.launches)


def _is_bound_by_memory(step: ProductStep, figures: GpuFigures) -> bool:
    """Tell if a product moves its bytes for longer than it multiplies. Of an image with strides, it reads a part."""
    nodes, x = [*step.prologue, step.product, *step.epilogue], step.product.operands[0]
    others = [v for v in (*inputs_of(nodes), *outputs_of(nodes)) if v is not x]
    moved = step.rows * step.depth * x.type.dtype.itemsize + sum(v.type.device_bytes for v in others)
    return moved * figures.intensity * BYTE_RATE >= flops(step.product)
