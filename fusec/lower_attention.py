"""What cuDNN's attention takes: strided heads that begin on 16 bytes, and masks that leave each query a key."""

from __future__ import annotations

from fusec.errors import LoweringError
from fusec.frame import Frame, Strided
from fusec.ir import DType, Node, quote
from fusec.ops import Attention

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


def require_keys(node: Node) -> None:
    """LoweringError if a query may be left without keys and is then to give zero: with -infinity everywhere
    cuDNN's answer is not known."""
    op = node.op
    assert isinstance(op, Attention)
    if op.guarded and len(node.operands) == 4 and not op.seen:
        bias = quote(node.operands[3].name)
        raise LoweringError(f"{bias}: may hide every key from a query, whose result is to be zero then")
