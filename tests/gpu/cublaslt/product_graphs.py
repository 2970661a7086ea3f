"""cuDNN graphs that one call of cuBLASLt computes: products of every layout, type and epilogue."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from fusec.ir import DType
from fusec.lowering.cudnn_graph import Attribute, CudnnCall, CudnnGraph, CudnnTensor
from fusec.lowering.simulator import extent

Dims = tuple[int, ...]
EPILOGUES = (
    (),
    ("bias",),
    ("c",),
    ("relu",),
    ("gelu_approx_tanh",),
    ("scale",),
    ("bias", "relu"),
    ("bias", "gelu_approx_tanh"),
    ("bias", "c"),
    ("c", "bias", "relu"),
    ("scale", "bias", "c_left", "gelu_approx_tanh"),
)
POINTWISE: tuple[tuple[str, Attribute], ...] = (
    ("pre_padding", (0, 0)),
    ("post_padding", (0, 0)),
    ("stride", (1, 1)),
    ("dilation", (1, 1)),
)


def strides(dims: Dims, order: Dims, apart: int = 0) -> Dims:
    """Of a tensor stored in that order, outermost first, with gaps after each innermost row."""
    found, step = [0] * len(dims), 1
    for place, axis in enumerate(reversed(order)):
        found[axis] = step
        step *= dims[axis] + (apart if place == 0 else 0)
    return tuple(found)


def product(
    sizes: Dims = (1, 6, 5, 7),
    epilogue: tuple[str, ...] = (),
    dtype: DType = DType.F16,
    transposed: str = "",
    apart: int = 0,
    one: str = "",
    result: DType | None = None,
    tensor_cores: bool = True,
) -> CudnnGraph:
    """Return the graph of a product of a[batch, m, k] and b[batch, k, n].

    transposed: names of tensors (a, b, c, d) that are stored by columns
    apart: gap between rows of all four
    one: names of operands (a, b, c) that are the same for the whole batch
    """
    batch, m, n, k = sizes
    kind = result or dtype
    tensors: list[CudnnTensor] = []

    def matrix(name: str, rows: int, columns: int, dtype: DType = dtype, virtual: bool = False) -> int:
        dims = (1 if name in one else batch, rows, columns)
        order = (0, 2, 1) if name in transposed else (0, 1, 2)
        concat_choices = strides(dims, order, 0 if virtual else apart)
        tensors.append(CudnnTensor(len(tensors) + 1, dims, concat_choices, DType.F32 if virtual else dtype, virtual))
        return len(tensors)

    def other(step: str) -> int:
        if step == "scale":
            tensors.append(CudnnTensor(len(tensors) + 1, (1, 1, 1), (1, 1, 1), DType.F32, value=0.125))
        elif step == "bias":
            tensors.append(CudnnTensor(len(tensors) + 1, (1, 1, n), (n, n, 1), kind))
        else:
            return matrix("c", m, n, kind)
        return len(tensors)

    operands = (matrix("a", m, k), matrix("b", k, n))
    uid = matrix("d", m, n, kind, bool(epilogue))
    calls = [CudnnCall("matmul", operands, (uid,))]
    for place, step in enumerate(epilogue):
        mode = {"bias": "add", "c": "add", "c_left": "add", "scale": "mul"}.get(step, step)
        pair = (uid, other(step)) if mode in ("add", "mul") else (uid,)
        uid = matrix("d", m, n, kind, place < len(epilogue) - 1)
        calls.append(CudnnCall("pointwise", (*pair[::-1],) if step == "c_left" else pair, (uid,), mode))
    return CudnnGraph(tuple(tensors), tuple(calls), tensor_cores)


def convolution(
    dims: Dims = (2, 8, 3, 5),
    filters: int = 6,
    epilogue: tuple[str, ...] = ("bias", "relu"),
    dtype: DType = DType.F16,
    window: int = 1,
    apart: int = 0,
    attributes: tuple[tuple[str, Attribute], ...] = POINTWISE,
    order: Dims = (0, 2, 3, 1),
    tensor_cores: bool = True,
) -> CudnnGraph:
    """A convolution of an image; apart: channels between two pixels' that are another tensor's."""
    n, c, h, w = dims
    out = (n, filters, h, w)
    tensors = [
        CudnnTensor(1, dims, strides(dims, order, apart), dtype),
        CudnnTensor(2, (filters, c, window, window), strides((filters, c, window, window), (0, 2, 3, 1)), dtype),
    ]

    def image(virtual: bool) -> int:
        concat_choices = strides(out, order, 0 if virtual else apart)
        tensors.append(CudnnTensor(len(tensors) + 1, out, concat_choices, DType.F32 if virtual else dtype, virtual))
        return len(tensors)

    uid = image(bool(epilogue))
    calls = [CudnnCall("conv_fprop", (1, 2), (uid,), attributes=attributes)]
    for place, step in enumerate(epilogue):
        pair: tuple[int, ...] = (uid,)
        if step == "bias":
            tensors.append(CudnnTensor(len(tensors) + 1, (1, filters, 1, 1), (filters, 1, 1, 1), dtype))
            pair = (uid, len(tensors))
        elif step == "c":
            pair = (uid, image(False))
        uid = image(place < len(epilogue) - 1)
        calls.append(CudnnCall("pointwise", pair, (uid,), "add" if step in ("bias", "c") else step))
    return CudnnGraph(tuple(tensors), tuple(calls), tensor_cores)


def gradient(
    op: str,
    dims: Dims = (2, 8, 3, 5),
    filters: int = 6,
    dtype: DType = DType.F16,
    added: bool = False,
    apart: int = 0,
    tensor_cores: bool = True,
    window: int = 1,
    attributes: tuple[tuple[str, Attribute], ...] = POINTWISE,
) -> CudnnGraph:
    """That of a convolution's image (`conv_dgrad`), perhaps with another added, or of its filters (`conv_wgrad`)."""
    n, c, h, w = dims
    shape, order = (filters, c, window, window), (0, 2, 3, 1)
    loss = ((n, filters, h, w), strides((n, filters, h, w), order, apart))
    image, weight = (dims, strides(dims, order, apart)), (shape, strides(shape, order))
    first, second, result = (image, loss, weight) if op == "conv_wgrad" else (loss, weight, image)
    tensors = [CudnnTensor(uid, *each, dtype) for uid, each in ((1, first), (2, second))]
    tensors.append(CudnnTensor(3, *result, DType.F32 if added else dtype, added))
    calls = [CudnnCall(op, (1, 2), (3,), attributes=attributes)]
    if added:
        tensors += [CudnnTensor(uid, *result, dtype) for uid in (4, 5)]
        calls.append(CudnnCall("pointwise", (3, 4), (5,), "add"))
    return CudnnGraph(tuple(tensors), tuple(calls), tensor_cores)


FP8_EPILOGUES = (
    (),
    ("scale",),
    ("scale", "bias"),
    ("scale", "c"),
    ("scale", "bias", "relu"),
    ("scale", "bias", "gelu_approx_tanh"),
    ("scale", "bias", "c"),
    ("scale", "c", "bias", "relu"),
)


def fp8_product(
    sizes: Dims = (24, 16, 32),
    epilogue: tuple[str, ...] = (),
    result: DType = DType.F16,
    added: DType | None = None,
    ends: tuple[str, ...] = ("scale", "max", "min", "identity"),
    limit: float = 448.0,
) -> CudnnGraph:
    """[m, k] by [k, n] stored by columns, with scales in memory; a result in fp8 is scaled and saturated.

    added: type of the bias and the residual. ends: the steps after the epilogue of a result in fp8.
    """
    m, n, k = sizes
    tensors = [
        CudnnTensor(1, (1, m, k), (m * k, k, 1), DType.F8E4M3),
        CudnnTensor(2, (1, k, n), (k * n, 1, k), DType.F8E4M3),
    ]
    kind = added or (DType.F16 if result is DType.F8E4M3 else result)

    def tensor(dims: Dims, dtype: DType = DType.F32, virtual: bool = False, value: float | None = None) -> int:
        tensors.append(CudnnTensor(len(tensors) + 1, dims, strides(dims, (0, 1, 2)), dtype, virtual, value))
        return len(tensors)

    others = {
        "scale": lambda: tensor((1, 1, 1)),
        "bias": lambda: tensor((1, 1, n), kind),
        "c": lambda: tensor((1, m, n), kind),
        "scales": lambda: tensor((1, 1, n)),
        "max": lambda: tensor((1, 1, 1), value=-limit),
        "min": lambda: tensor((1, 1, 1), value=limit),
    }
    steps = (*epilogue, *(ends if result is DType.F8E4M3 else ()))
    uid = tensor((1, m, n), DType.F32 if steps else result, bool(steps))
    calls = [CudnnCall("matmul", (1, 2), (uid,))]
    for place, step in enumerate(steps):
        inputs = (uid, others[step]()) if step in others else (uid,)
        last = place == len(steps) - 1
        uid = tensor((1, m, n), result if last else DType.F32, not last)
        mode = {"bias": "add", "c": "add", "scale": "mul", "scales": "mul"}.get(step, step)
        calls.append(CudnnCall("pointwise", inputs, (uid,), mode))
    return CudnnGraph(tuple(tensors), tuple(calls))


def fp8_grid() -> Iterator[tuple[str, CudnnGraph]]:
    """Every epilogue by result by size, also of one row and of rows that are no multiple of 16."""
    for sizes in ((24, 16, 32), (1, 48, 16), (197, 64, 768), (128, 256, 1024)):
        for epilogue in FP8_EPILOGUES:
            for result in (DType.F16, DType.BF16, DType.F32, DType.F8E4M3):
                if result is not DType.F32 or not {"bias", "c"} & {*epilogue}:
                    yield f"fp8 {'+'.join(epilogue)} to {result.value} {sizes}", fp8_product(sizes, epilogue, result)
        for added in (DType.F16, DType.BF16):
            graph = fp8_product(sizes, ("scale", "bias", "c"), DType.F8E4M3, added)
            yield f"fp8 with {added.value} to f8e4m3 {sizes}", graph


def integer_product(sizes: Dims = (24, 16, 32)) -> CudnnGraph:
    """[m, k] of i8 by [k, n] of i8 stored by columns, with sums in i32."""
    m, n, k = sizes
    tensors = (
        CudnnTensor(1, (1, m, k), (m * k, k, 1), DType.I8),
        CudnnTensor(2, (1, k, n), (k * n, 1, k), DType.I8),
        CudnnTensor(3, (1, m, n), (m * n, n, 1), DType.I32),
    )
    return CudnnGraph(tensors, (CudnnCall("matmul", (1, 2), (3,), compute=DType.I32),))


INTEGER_SIZES = ((24, 16, 32), (1, 48, 16), (197, 64, 768), (128, 256, 1024))


def grid() -> Iterator[tuple[str, CudnnGraph]]:
    """Every epilogue by type by layout, small and of odd sizes."""
    for dtype, epilogue in itertools.product((DType.F16, DType.BF16, DType.F32), EPILOGUES):
        for transposed in ("", "a", "b", "ab"):
            for sizes, apart in (((1, 6, 5, 7), 0), ((3, 8, 16, 24), 8), ((1, 1, 33, 9), 0), ((2, 17, 1, 8), 0)):
                name = f"{dtype.value} {'+'.join(epilogue)} {transposed or '-'} {sizes} {apart}"
                yield name, product(sizes, epilogue, dtype, transposed, apart)
        for one in ("a", "b", "c", "bc"):
            yield f"{dtype.value} {'+'.join(epilogue)} one {one}", product((3, 8, 16, 24), epilogue, dtype, one=one)
        if "bias" not in epilogue:
            yield f"{dtype.value} {'+'.join(epilogue)} by columns", product((2, 6, 5, 7), epilogue, dtype, "cd")
    for dtype in (DType.F16, DType.BF16):
        for epilogue in EPILOGUES:
            yield (
                f"{dtype.value} {'+'.join(epilogue)} to f32",
                product((2, 6, 8, 16), epilogue, dtype, result=DType.F32),
            )
    for dtype, tensor_cores in ((DType.F16, True), (DType.F32, True), (DType.F32, False)):
        for epilogue in ((), ("bias",), ("c", "bias", "relu"), ("bias", "gelu_approx_tanh")):
            for apart in (0, 8):
                name = f"conv {dtype.value} {'+'.join(epilogue)} {apart} {tensor_cores}"
                yield name, convolution((2, 8, 3, 5), 6, epilogue, dtype, apart=apart, tensor_cores=tensor_cores)

    for dtype, tensor_cores in ((DType.F16, True), (DType.BF16, True), (DType.F32, True), (DType.F32, False)):
        for op, added in (("conv_dgrad", False), ("conv_dgrad", True), ("conv_wgrad", False)):
            for apart in (0, 8):
                name = f"{op} {dtype.value} {added} {apart} {tensor_cores}"
                yield name, gradient(op, (2, 8, 3, 5), 16, dtype, added, apart, tensor_cores)


def buffers(graph: CudnnGraph, seed: int) -> dict[int, np.ndarray]:
    """Normal numbers, or all integers of 8 bits, for what is read, NaN (or 0) where something is to be written."""
    rng = np.random.default_rng(seed)
    made: dict[int, np.ndarray] = {}
    for tensor in graph.inputs:
        if tensor.dims == (1, 1, 1):  # a scale
            made[tensor.uid] = rng.uniform(0.1, 0.5, 1).astype(tensor.dtype.numpy)
            continue
        if tensor.dtype is DType.I8:
            made[tensor.uid] = rng.integers(-128, 128, extent(tensor), np.int8)
            continue
        made[tensor.uid] = rng.standard_normal(extent(tensor)).astype(tensor.dtype.numpy)
    for tensor in graph.outputs:
        nothing = np.nan if tensor.dtype.is_float else 0
        made[tensor.uid] = np.full(extent(tensor), nothing, tensor.dtype.numpy)
    return made
