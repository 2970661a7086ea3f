"""Small cuDNN graphs as plain data, shared by the tests of fusec.gpu."""

from __future__ import annotations

from fusec.ir import DType
from fusec.lowering.cudnn_graph import Attribute, CudnnCall, CudnnGraph, CudnnTensor

WINDOW: tuple[tuple[str, Attribute], ...] = (
    ("pre_padding", (1, 1)),
    ("post_padding", (1, 1)),
    ("stride", (1, 1)),
    ("dilation", (1, 1)),
)


def nhwc(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Strides with the channels innermost."""
    strides, step = [0] * len(dims), 1
    for axis in (1, *range(len(dims) - 1, 1, -1), 0):
        strides[axis], step = step, step * dims[axis]
    return tuple(strides)


def rows(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides."""
    strides, step = [0] * len(dims), 1
    for axis in reversed(range(len(dims))):
        strides[axis], step = step, step * dims[axis]
    return tuple(strides)


def image(uid: int, dims: tuple[int, ...], dtype: DType = DType.F16, virtual: bool = False) -> CudnnTensor:
    return CudnnTensor(uid, dims, nhwc(dims), dtype, virtual)


def matrix(uid: int, dims: tuple[int, ...], dtype: DType = DType.F16, virtual: bool = False) -> CudnnTensor:
    return CudnnTensor(uid, dims, rows(dims), dtype, virtual)


def scalar(uid: int, value: float, rank: int = 4) -> CudnnTensor:
    return CudnnTensor(uid, (1,) * rank, (1,) * rank, DType.F32, value=value)


def conv(
    *epilogue: str, filters: int = 64, dtype: DType = DType.F16, tensor_cores: bool = True, size: int = 28
) -> CudnnGraph:
    """A 3x3 convolution of 8x64 channels; then, in order, `bias`, `z` (conv + z), `z_left` (z + conv), or a mode."""
    out = (8, filters, size, size)
    tensors = [image(1, (8, 64, size, size), dtype), image(2, (filters, 64, 3, 3), dtype)]
    calls: list[CudnnCall] = []
    steps = ("conv", *epilogue)
    for place, step in enumerate(steps):
        last, uid = place == len(steps) - 1, len(tensors) + 1
        operands = (1, 2) if step == "conv" else (calls[-1].outputs[0],)
        if step in ("bias", "z", "z_left"):
            tensors.append(image(uid, (1, filters, 1, 1) if step == "bias" else out, dtype))
            operands = (uid, *operands) if step == "z_left" else (*operands, uid)
            uid += 1
        tensors.append(image(uid, out, dtype if last else DType.F32, virtual=not last))
        if step == "conv":
            calls.append(CudnnCall("conv_fprop", operands, (uid,), attributes=WINDOW))
        else:
            calls.append(
                CudnnCall("pointwise", operands, (uid,), step if step not in ("bias", "z", "z_left") else "add")
            )
    return CudnnGraph(tuple(tensors), tuple(calls), tensor_cores)


def pointwise(mode: str, *operands: tuple[int, ...], result: tuple[int, ...] = (1, 8, 64)) -> CudnnGraph:
    """One mode on row-major tensors."""
    count = len(operands)
    tensors = [matrix(i + 1, dims) for i, dims in enumerate(operands)]
    call = CudnnCall("pointwise", tuple(range(1, count + 1)), (count + 1,), mode)
    return CudnnGraph((*tensors, matrix(count + 1, result)), (call,))


def matmul(a: tuple[int, ...], b: tuple[int, ...], c: tuple[int, ...], dtype: DType = DType.F16) -> CudnnGraph:
    tensors = (matrix(1, a, dtype), matrix(2, b, dtype), matrix(3, c, dtype))
    return CudnnGraph(tensors, (CudnnCall("matmul", (1, 2), (3,)),))


def norm(op: str, x: tuple[int, ...], parameters: tuple[int, ...]) -> CudnnGraph:
    tensors = (
        image(1, x),
        image(2, parameters, DType.F32),
        image(3, parameters, DType.F32),
        scalar(4, 1e-5),
        image(5, x),
    )
    return CudnnGraph(tensors, (CudnnCall(op, (1, 2, 3, 4), (5,)),))


def batch_norm(x: tuple[int, ...], channels: tuple[int, ...]) -> CudnnGraph:
    """Batch norm in training, with running statistics."""
    numbers = tuple(image(uid, channels, DType.F32) for uid in (*range(2, 6), *range(9, 13)))
    tensors = (image(1, x), *numbers[:4], scalar(6, 1e-5), scalar(7, 0.1), image(8, x), *numbers[4:])
    return CudnnGraph(tensors, (CudnnCall("batchnorm", tuple(range(1, 8)), tuple(range(8, 13))),))


def batch_norm_backward(x: tuple[int, ...], channels: tuple[int, ...]) -> CudnnGraph:
    """The gradients of batch norm in training."""
    numbers = tuple(image(uid, channels, DType.F32) for uid in (3, 4, 5, 7, 8))
    tensors = (image(1, x), image(2, x), *numbers[:3], image(6, x), *numbers[3:])
    return CudnnGraph(tensors, (CudnnCall("batchnorm_backward", tuple(range(1, 6)), (6, 7, 8)),))


def conv_feeding_matmul() -> CudnnGraph:
    """Kills the process inside cuDNN 9.19 (SIGSEGV while plans are made)."""
    tensors = (
        image(1, (8, 64, 28, 28)),
        image(2, (64, 64, 3, 3)),
        image(3, (8, 64, 28, 28), virtual=True),
        image(4, (8, 64, 28, 16)),
        image(5, (8, 64, 28, 16)),
    )
    calls = (CudnnCall("conv_fprop", (1, 2), (3,), attributes=WINDOW), CudnnCall("matmul", (3, 4), (5,)))
    return CudnnGraph(tensors, calls)


def conv_with_sums() -> CudnnGraph:
    """A convolution, and the sums of its channels and of their squares."""
    tensors = [image(1, (8, 64, 28, 28)), image(2, (32, 64, 3, 3)), image(3, (8, 32, 28, 28))]
    tensors += [image(uid, (1, 32, 1, 1), DType.F32) for uid in (4, 5)]
    calls = (CudnnCall("conv_fprop", (1, 2), (3,), attributes=WINDOW), CudnnCall("genstats", (3,), (4, 5)))
    return CudnnGraph(tuple(tensors), calls)
