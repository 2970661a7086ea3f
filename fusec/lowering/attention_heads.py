"""What cuDNN's attention takes: strided heads that begin on 16 bytes."""

from __future__ import annotations

from fusec.errors import LoweringError
from fusec.ir import DType
from fusec.lowering.dim_folding import Frame, Strided

ALIGNMENT = 16  # bytes; the bulk copies of the kernels start there
DTYPES = (DType.F16, DType.BF16)


def heads_frame(shape: tuple[int, ...]) -> Frame:
    """Four dims, each for itself; a bias of fewer gets dims of 1 in front."""
    full = (1,) * (4 - len(shape)) + shape
    return Frame(full, ((0,), (1,), (2,), (3,)), (0, 1, 2, 3))


def require_aligned(what: str, view: Strided) -> None:
    """LoweringError unless the last dim lies side by side and the first element on the alignment."""
    if view.shape[-1] != 1 and view.strides[-1] != 1:
        raise LoweringError(f"{what}: the last dim of an attention's operand must lie side by side in memory")
    if view.offset * view.root.type.dtype.itemsize % ALIGNMENT:
        raise LoweringError(f"{what}: begins inside of {ALIGNMENT} bytes, where the kernels of attention cannot start")
