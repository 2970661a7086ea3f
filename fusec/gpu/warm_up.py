"""Load and compile what choosing plans needs in any model, while the process waits for its workers."""

from __future__ import annotations

from collections.abc import Collection

import cudnn

from fusec.gpu.cudnn.plan_list import list_small_convolution
from fusec.gpu.launch import reorder
from fusec.gpu.measure import device_distance, timer
from fusec.gpu.nvrtc import function_of
from fusec.ir import DType


def warm_up(storage: DType, others: Collection[DType] = ()) -> None:
    """List plans of a small graph, and compile the kernels that time and compare plans and order weights.

    storage: the float type of the model
    others: types of its results, those of 8 bits of which are compared, too
    """
    handle = cudnn.create_handle()
    try:
        list_small_convolution(handle)
    finally:
        cudnn.destroy_handle(handle)
    timer.module().compile()
    width = storage.numpy.itemsize
    for dtype in (storage, *(each for each in device_distance.BYTES if each in others)):
        function_of(device_distance.source_of(dtype), f"fusec_distance_{dtype.value}")
    function_of(reorder.source_of(width), f"fusec_reorder{width}")
