"""Describe matrix products that cuDNN refuses (true fp32, unusual strides) to cuBLASLt, whose calls can be captured.

Without it they run through CuPy, whose calls of cuBLAS cannot be captured.
"""

from __future__ import annotations

from fusec.errors import LoweringError
from fusec.gpu.cublaslt.match import product_of
from fusec.gpu.launch.kernel_launcher import Memory
from fusec.ir import Array
from fusec.lower_cudnn import Lowered, lower
from fusec.ops import MatMul
from fusec.schedule.program import Partition, inputs_of


def lone_product(step: Partition) -> Lowered | None:
    """Return a step of one product as a graph that cuBLASLt reads; None for other steps."""
    if len(step.nodes) != 1 or not isinstance(step.nodes[0].op, MatMul):
        return None
    try:
        # The graph only describes the product: cuDNN refuses it. The reference uses no tensor cores either.
        lowered = lower(step.body, tensor_cores=False, for_cudnn=False)
    except LoweringError:
        return None
    return lowered if product_of(lowered.graph) is not None else None


def buffers_of(step: Partition, lowered: Lowered, memory: Memory) -> dict[int, Array]:
    """Return the memory of the tensors of a product, by uid."""
    values = inputs_of(step.nodes)
    named = {v.name: v for v in (*values, *step.outputs)}
    buffers: dict[int, Array] = {}
    for uid, name in (*lowered.inputs, *lowered.outputs):
        buffers[uid] = lowered.part(uid, memory(named[name], named[name].type))
    for binding in lowered.constants:
        value = next(v for v in values if v.literal is binding.literal)
        buffers[binding.uid] = memory(value, binding.type)
    return buffers
