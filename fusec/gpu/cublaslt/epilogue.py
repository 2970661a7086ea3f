"""Match the pointwise calls after a product with an epilogue of cuBLASLt.

The epilogue computes result_scale * act(alpha * scale * sums + residual + bias) in fp32, then rounds once.
"""

from __future__ import annotations

import math

from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor
from fusec.lowering.pointwise import FP8_LARGEST
from fusec.system.dataclass import dataclass

ACTIVATIONS = {"relu": "relu", "gelu_approx_tanh": "gelu"}  # cuBLASLt has the gelu with tanh only
_LIMITS = {"max": -FP8_LARGEST, "min": FP8_LARGEST}  # of results in fp8, at which cuBLASLt saturates


@dataclass
class Epilogue:
    """Ops after the sums of a product, as one call of cuBLASLt takes them.

    scale, result_scale: uids of numbers in memory: of the sums, and of a result in fp8.
    limits: modes of the calls that limit the result to the range of fp8.
    """

    alpha: float = 1.0
    residual: CudnnTensor | None = None
    bias: CudnnTensor | None = None
    activation: str = ""
    scale: int | None = None
    result_scale: int | None = None
    limits: tuple[str, ...] = ()

    @property
    def saturates(self) -> bool:
        """Tell if the result is limited to the range of fp8 on both sides."""
        return {*self.limits} == {*_LIMITS}

    def take(self, call: CudnnCall, other: CudnnTensor | None, result: CudnnTensor) -> bool:
        """Add a call to the epilogue; return False if cuBLASLt has no such op after those before it.

        other: the operand that is not the value so far.
        """
        if call.mode == "identity":
            return True
        if call.mode in _LIMITS and other is not None and other.value == _LIMITS[call.mode]:
            self.limits += (call.mode,)
            return True
        if self.limits or self.result_scale is not None:
            return False
        if call.mode in ACTIVATIONS and not self.activation:
            self.activation = ACTIVATIONS[call.mode]
            return True
        if call.mode == "mul" and other is not None:
            return self._scale(other)
        if call.mode != "add" or other is None or self.activation or other.value is not None or other.virtual:
            return False
        if self.bias is None and is_row(other, result):
            self.bias = other
            return True
        whole = other.dims[1:] == result.dims[1:] and other.dims[0] in (1, result.dims[0])
        if self.residual is not None or not whole:
            return False
        self.residual = other
        return True

    def _scale(self, other: CudnnTensor) -> bool:
        """Multiply the sums, or the end, by a number."""
        first = self.residual is None and self.bias is None and not self.activation and self.scale is None
        if other.value is not None and first:
            self.alpha *= other.value
            return True
        if other.value is not None or other.virtual or other.dtype is not DType.F32 or math.prod(other.dims) != 1:
            return False
        if first:
            self.scale = other.uid
        else:
            self.result_scale = other.uid
        return True


def epilogue_of(graph: CudnnGraph, uid: int, calls: list[CudnnCall]) -> Epilogue | None:
    """Return the epilogue of a product if cuBLASLt has these ops in this order; else None.

    uid: tensor of the product's sums.
    """
    found = Epilogue()
    for call in calls:
        before = graph.tensor(uid)
        if call.op != "pointwise" or not before.virtual or before.dtype is not DType.F32:
            return None
        if call.compute is not DType.F32 or call.attributes or call.inputs.count(uid) != 1:
            return None
        others = [graph.tensor(other) for other in call.inputs if other != uid]
        uid = call.outputs[0]
        result = graph.tensor(uid)
        if result.dims != before.dims or len(others) > 1 or not found.take(call, others[0] if others else None, result):
            return None
    return found


def is_row(tensor: CudnnTensor, result: CudnnTensor) -> bool:
    """Tell if a tensor holds one number for each column of a result (channel of an image), contiguous."""
    axis = 2 if len(result.dims) == 3 else 1
    if tensor.dims[axis] != result.dims[axis] or math.prod(tensor.dims) != tensor.dims[axis]:
        return False
    return tensor.strides[axis] == 1 or tensor.dims[axis] == 1
