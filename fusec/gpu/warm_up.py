"""Load and compile what choosing plans needs in any model, while the process waits for its workers."""

from __future__ import annotations

from collections.abc import Collection

import cudnn

from fusec.gpu.cudnn.handles import create_handle
from fusec.gpu.cudnn.plans.emit import emit
from fusec.gpu.cudnn.plans.plan_list import modes_of
from fusec.gpu.cudnn.without_driver.deviceless import nvrtc_libraries
from fusec.gpu.launch import reorder
from fusec.gpu.launch.cubins import compile_ahead
from fusec.gpu.measure import device_distance, timer
from fusec.gpu.nvrtc import compute_capability, function_of
from fusec.ir import DType
from fusec.lowering.cudnn_graph import PORTS, CudnnCall, CudnnGraph, CudnnTensor
from fusec.plans.plan_filter import PlanFilter

# A convolution, because listing its plans loads more of cuDNN than those of other graphs.
WINDOW = tuple((name, (size, size)) for name, size in zip(PORTS["conv_dgrad"][2], (0, 0, 1, 1), strict=True))
GRAPH = CudnnGraph(
    (
        CudnnTensor(1, (1, 64, 8, 8), (4096, 1, 512, 64), DType.F16),
        CudnnTensor(2, (64, 64, 1, 1), (64, 1, 64, 64), DType.F16),
        CudnnTensor(3, (1, 64, 8, 8), (4096, 1, 512, 64), DType.F16),
    ),
    (CudnnCall("conv_fprop", (1, 2), (3,), attributes=WINDOW),),
)


def warm_up(storage: DType, others: Collection[DType] = ()) -> None:
    """List plans of a small graph, and compile the kernels that time and compare plans and order weights.

    storage: the float type of the model
    others: types of its results, those of 8 bits of which are compared, too
    """
    handle = create_handle()
    try:
        pygraph = emit(GRAPH, handle=handle)
        pygraph.validate()
        pygraph.build_operation_graph()
        pygraph.create_execution_plans(modes_of(PlanFilter()))
        del pygraph
    finally:
        cudnn.destroy_handle(handle)
    timer.module().compile()
    for dtype in (storage, *(each for each in device_distance.BYTES if each in others)):
        function_of(device_distance.source_of(dtype), f"fusec_distance_{dtype.value}")
    compile_ahead(reorder.kernels_of_weights(), compute_capability(), nvrtc_libraries())
