"""Run matrix products that cuDNN refuses (true fp32, unusual strides) by cuBLASLt, in calls that can be captured.

Without it they run through CuPy, whose calls of cuBLAS cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import cupy

from fusec.errors import ExecutionError, LoweringError
from fusec.gpu.cublaslt.algorithms import Blas, BlasPlan
from fusec.gpu.launch.kernel_launcher import Memory
from fusec.gpu.measure.random_inputs import poison, random_array
from fusec.gpu.measure.tolerance import TOLERANCE
from fusec.ir import Array, DType, TensorType, Value
from fusec.lower_cudnn import Lowered, lower
from fusec.lowering.packing import unpack
from fusec.ops import MatMul
from fusec.plans.plan_record import Choice
from fusec.reference import evaluate_node
from fusec.schedule.program import Partition, inputs_of

TYPES = (DType.F32, DType.F16)  # that CuPy computes with, too


@dataclass(frozen=True, eq=False)
class LoneProduct:
    """Step of one product and the plan that runs it."""

    step: Partition
    lowered: Lowered
    plan: BlasPlan

    def bound(self, memory: Memory, workspace: Callable[[], int]) -> Callable[[], None]:
        """Return a function that runs the product over the step's values on the current stream.

        It neither allocates nor waits.

        workspace: returns the address of the workspace; 0 if there is none.
        """
        values = inputs_of(self.step.nodes)
        named = {v.name: v for v in (*values, *self.step.outputs)}
        buffers: dict[int, Array] = {}
        for uid, name in (*self.lowered.inputs, *self.lowered.outputs):
            buffers[uid] = self.lowered.part(uid, memory(named[name], named[name].type))
        for binding in self.lowered.constants:
            value = next(v for v in values if v.literal is binding.literal)
            buffers[binding.uid] = memory(value, binding.type)
        addresses = self.plan.addresses({uid: array.data.ptr for uid, array in buffers.items()})
        held = tuple(buffers.values())  # `run` keeps them alive, because the call gets addresses only

        def run() -> None:
            assert held
            self.plan.execute(addresses, workspace(), None)

        return run

    def is_right(self) -> bool:
        """Compare the product with the reference on random data. The output is filled with NaN first."""
        (node,), held = self.step.nodes, dict[Value, Array]()

        def memory(value: Value, type: TensorType) -> Array:
            if value not in held:
                held[value] = random_array(type)
            return held[value]

        result = memory(node.result, node.result.type)
        poison(result)
        scratch = cupy.empty(self.plan.workspace_bytes, cupy.uint8) if self.plan.workspace_bytes else None
        self.bound(memory, lambda: 0 if scratch is None else scratch.data.ptr)()
        operands = [unpack(memory(v, v.type), v.type) for v in node.operands]
        (want,) = evaluate_node(node, operands, cupy)
        got = unpack(result, node.result.type)
        error = cupy.linalg.norm(got.astype(cupy.float64) - want.astype(cupy.float64))
        return bool(error <= TOLERANCE * cupy.linalg.norm(want.astype(cupy.float64)))


def lone_product(
    blas: Blas, step: Partition, known: dict[str, list[Choice]], workspace_limit: int | None
) -> LoneProduct | None:
    """Return a step as a call of cuBLASLt, by the first algorithm whose result is right; None if there is none.

    known: by graph, algorithms whose results were right; the function adds to it.
    workspace_limit: the most bytes of workspace that an algorithm may need; None: no limit.
    """
    if len(step.nodes) != 1 or not isinstance(step.nodes[0].op, MatMul):
        return None
    if step.nodes[0].result.type.dtype not in TYPES:
        return None
    try:
        # The graph only describes the product: cuDNN refuses it. The reference uses no tensor cores either.
        lowered = lower(step.body, tensor_cores=False, for_cudnn=False)
    except LoweringError:
        return None
    graph = lowered.graph
    if graph.key not in known:
        offers = blas.offers(graph)
        if workspace_limit is not None:
            offers = [choice for choice in offers if choice.workspace_bytes <= workspace_limit]
        right = (choice for choice in offers if _is_right(blas, step, lowered, choice))
        known[graph.key] = list(islice(right, 1))
    return next((LoneProduct(step, lowered, blas.build(graph, choice)) for choice in known[graph.key]), None)


def _is_right(blas: Blas, step: Partition, lowered: Lowered, choice: Choice) -> bool:
    try:
        return LoneProduct(step, lowered, blas.build(lowered.graph, choice)).is_right()
    except (ExecutionError, cupy.cuda.memory.OutOfMemoryError):  # no room to try it
        return False
