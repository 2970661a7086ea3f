"""Check what cuDNN's attention accepts: strided heads whose first element is 16-byte aligned."""

from __future__ import annotations

from fusec.errors import LoweringError
from fusec.ir import HALVES
from fusec.lowering.dim_folding import Frame, Strided

ALIGNMENT = 16  # bytes, which the bulk copies of the kernels need
DTYPES = HALVES


def attention_frame(shape: tuple[int, ...]) -> Frame:
    """Return a frame of four separate dims; a bias of fewer gets leading dims of 1."""
    full = (1,) * (4 - len(shape)) + shape
    return Frame(full, ((0,), (1,), (2,), (3,)), (0, 1, 2, 3))


def require_aligned(what: str, view: Strided) -> None:
    """Check that the last dim is contiguous and the first element aligned.

    Raises LoweringError: when one of them is not.

    what: name of the tensor, for the message
    """
    if view.shape[-1] != 1 and view.strides[-1] != 1:
        raise LoweringError(f"{what}: the last dim of an attention's operand must be contiguous in memory")
    if view.offset * view.root.type.dtype.itemsize % ALIGNMENT:
        raise LoweringError(f"{what}: its first element is not aligned to {ALIGNMENT} bytes, as attention kernels need")
